"""Comparison of several ways to compute the same result:
time as a ratio, peak memory in a separate process.

A benchmark passes its contests to :func:`main`. Contestants take turns, in an order drawn anew each
time, so that other load on the machine and the contents of its caches affect all of them alike; a
ratio is the median over rounds of the peer's time / the contestant's. Absolute times say little on
a shared machine and are not printed. Memory is the amount that a step adds, at its peak, to the
memory in use before it: on a CPU in a fresh process for each contestant, on a GPU as torch counts.
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
# Functions that prepare the step of a contestant, by name; the first is the peer.
Contest = Mapping[str, Callable[[], Step]]

__all__ = [
    "Contest",
    "Step",
    "compare",
    "main",
    "memory",
    "options",
    "print_table",
    "training_step",
]


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns that each contestant gets")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    # A child process measures the memory of this contestant in this contest.
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser


def main(
    parser: argparse.ArgumentParser,
    contests: Callable[[argparse.Namespace], Mapping[str, Contest]],
    report: Callable[[argparse.Namespace, Mapping[str, Contest]], None] | None = None,
) -> None:
    """Run the contests and print a table.

    Args:
        parser: Result of :func:`options`, with further options of the benchmark.
        contests: Function from the options to the contests, by name.
        report: Function that runs the contests and prints their results; :func:`compare` by
            default.
    """
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    contests_by_name = contests(arguments)
    if arguments.child:
        contest, contestant = arguments.child
        # The parent reads the last word that is printed.
        print(_peak_memory(contests_by_name[contest][contestant](), arguments.device))
        return
    (report or compare)(arguments, contests_by_name)
    device = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"CPU, {arguments.threads} thread(s)"
    )
    rounds = "" if report else f"; median of {arguments.rounds} rounds"
    print(f"\n{device}, {arguments.dtype}, torch {torch.__version__}{rounds}")


def compare(arguments: argparse.Namespace, contests: Mapping[str, Contest]) -> None:
    """Print a table of times, as ratios, and peak memory."""
    rows = []
    contestants = sum(map(len, contests.values()))
    turns = tqdm(total=contestants * (arguments.rounds + 1), disable=None, leave=False)
    for name, contest in contests.items():
        steps = {contestant: prepare() for contestant, prepare in contest.items()}
        seconds = _take_turns(steps, arguments.rounds, arguments.device, turns)
        peaks = {
            contestant: _peak_memory(steps[contestant], arguments.device)
            if arguments.device == "cuda"
            else _memory_in_child(name, contestant)
            for contestant in contest
        }
        peer = next(iter(contest))
        for contestant in contest:
            ratios = [p / s for p, s in zip(seconds[peer], seconds[contestant], strict=True)]
            speed = "1" if contestant == peer else _figure(statistics.median(ratios))
            spread = (
                "" if contestant == peer else f"{_figure(min(ratios))} - {_figure(max(ratios))}"
            )
            # The peak is 0 if a step fits into memory that was in use before.
            saving = _figure(peaks[peer] / max(peaks[contestant], 1))
            rows.append(
                (
                    name,
                    contestant,
                    speed,
                    spread,
                    f"{peaks[contestant] / 2**20:.0f}",
                    saving,
                )
            )
    turns.close()
    print_table(
        (
            "",
            "",
            "times as fast",
            "least - most",
            "peak memory, MiB",
            "times less memory",
        ),
        rows,
    )


def memory(contests: Mapping[str, Contest]) -> dict[str, dict[str, int]]:
    """Measure the bytes that a step adds at its peak,
    by contest and contestant, each in a separate process.
    """
    with tqdm(total=sum(map(len, contests.values())), disable=None, leave=False) as bar:
        peaks: dict[str, dict[str, int]] = {name: {} for name in contests}
        for name, contest in contests.items():
            for contestant in contest:
                peaks[name][contestant] = _memory_in_child(name, contestant)
                bar.update()
    return peaks


def training_step(forward: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Step:
    """Return a step of forward and backward with the output's sum
    of squares as the loss; gradients are dropped.
    """

    def step() -> None:
        forward(*leaves).square().sum().backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def _take_turns(
    steps: Mapping[str, Step],
    rounds: int,
    device: str,
    turns: tqdm,  # type: ignore[type-arg]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)  # seeded, so that every run has the same turns
    for turn in range(rounds + 1):
        for name in order.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            _wait(device)
            if turn > 0:  # the first turn warms up caches and allocators
                seconds[name].append(time.perf_counter() - start)
            turns.update()
    return seconds


def _memory_in_child(contest: str, contestant: str) -> int:
    script = [
        sys.executable,
        Path(sys.argv[0]),
        *sys.argv[1:],
        "--child",
        contest,
        contestant,
    ]
    # With fixed thresholds glibc returns freed memory to the system at once, so that it does not
    # count as in use before the step.
    thresholds = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    process = subprocess.run(
        script, capture_output=True, text=True, check=False, env=os.environ | thresholds
    )
    if process.returncode:
        raise RuntimeError(f"{contestant} in {contest} failed:\n{process.stderr}")
    return int(process.stdout.split()[-1])


def _peak_memory(step: Step, device: str) -> int:
    """Measure the bytes by which a step exceeds, at its peak, the memory in use before it."""
    step()  # a first step warms up caches and allocators
    _wait(device)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        _wait(device)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak (Linux)
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
    """Print a table in Markdown."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    for line in lines:
        print(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            + " |"
        )
