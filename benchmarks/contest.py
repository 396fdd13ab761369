"""Two or more ways to do the same, side by side in one run: time as a ratio, peak memory in a process of its own.

A benchmark hands :func:`main` its contests. Contestants take turns, in an order drawn anew each time, so that whatever
else the machine does, and what is left in its caches, meets all of them; a ratio is the median over rounds of peer's
time / ours. Absolute times say little on a shared machine and are not printed. Memory is what one step adds at its peak
to what was there before it, in a fresh process for each contestant.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tqdm.auto import tqdm

Step = Callable[[], object]
Contest = Mapping[str, Callable[[], Step]]  # contestants by name, the peer first; each call prepares one

__all__ = ["Contest", "Step", "compare", "main", "memory", "options", "print_table", "training_step"]


def options(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns that each contestant gets")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # contest and contestant to take the memory of
    return parser


def main(
    parser: argparse.ArgumentParser,
    contests: Callable[[argparse.Namespace], Mapping[str, Contest]],
    report: Callable[[argparse.Namespace, Mapping[str, Contest]], None] | None = None,
) -> None:
    """Run the contests that the options ask for and print a table.

    Args:
        parser: from :func:`options`, with options of its own where there are such.
        contests: what to compare, by name, given the options.
        report: what to do with them; :func:`compare` unless given.
    """
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    every = contests(arguments)
    if arguments.child:
        contest, contestant = arguments.child
        print(_peak_memory(every[contest][contestant](), arguments.device))
        return
    (report or compare)(arguments, every)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {arguments.threads} thread(s)"
    rounds = "" if report else f"; median of {arguments.rounds} rounds"
    print(f"\n{device}, {arguments.dtype}, torch {torch.__version__}{rounds}")


def compare(arguments: argparse.Namespace, every: Mapping[str, Contest]) -> None:
    """A table of times, as ratios, and peak memory."""
    rows = []
    turns = tqdm(total=sum(len(c) for c in every.values()) * (arguments.rounds + 1), disable=None, leave=False)
    for name, contest in every.items():
        seconds = _take_turns(contest, arguments.rounds, arguments.device, turns)
        peaks = {contestant: _memory_in_child(name, contestant) for contestant in contest}
        peer = next(iter(contest))
        for contestant in contest:
            ratios = [p / s for p, s in zip(seconds[peer], seconds[contestant], strict=True)]
            speed = "1" if contestant == peer else _figure(statistics.median(ratios))
            spread = "" if contestant == peer else f"{_figure(min(ratios))} - {_figure(max(ratios))}"
            less = _figure(peaks[peer] / max(peaks[contestant], 1))
            rows.append((name, contestant, speed, spread, f"{peaks[contestant] / 2**20:.0f}", less))
    turns.close()
    print_table(("", "", "times as fast", "least - most", "peak memory, MiB", "times less memory"), rows)


def memory(every: Mapping[str, Contest]) -> dict[str, dict[str, int]]:
    """Bytes that one step adds at its peak, by contest and contestant, each in a process of its own."""
    with tqdm(total=sum(map(len, every.values())), disable=None, leave=False) as bar:
        found: dict[str, dict[str, int]] = {name: {} for name in every}
        for name, contest in every.items():
            for contestant in contest:
                found[name][contestant] = _memory_in_child(name, contestant)
                bar.update()
    return found


def training_step(forward: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Step:
    """Forward of the leaves and backward of its sum of squares, gradients dropped."""

    def step() -> None:
        forward(*leaves).square().sum().backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def _take_turns(contest: Contest, rounds: int, device: str, turns: tqdm) -> dict[str, list[float]]:  # type: ignore[type-arg]
    steps = {name: prepare() for name, prepare in contest.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contest}
    order = random.Random(0)
    for turn in range(rounds + 1):
        for name in order.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            _wait(device)
            if turn > 0:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
            turns.update()
    return seconds


def _memory_in_child(contest: str, contestant: str) -> int:
    script = [sys.executable, Path(sys.argv[0]), *sys.argv[1:], "--child", contest, contestant]
    # Fixed thresholds: what is freed goes back to the system at once, and is not taken for in use before the step.
    thresholds = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=os.environ | thresholds)
    if done.returncode:
        raise RuntimeError(f"{contestant} in {contest} failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def _peak_memory(step: Step, device: str) -> int:
    """Bytes by which one step exceeds, at its peak, what was in use before. The first of two steps warms up."""
    step()
    _wait(device)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        _wait(device)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (Linux)
    before = _kibibytes("VmRSS")
    step()
    return 1024 * (_kibibytes("VmHWM") - before)


def _kibibytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _figure(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}" if x < 1 else f"{x:.1f}"


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """As Markdown."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
