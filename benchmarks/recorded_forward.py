"""(j) A recorded forward beside a plain one, in the processor's time.

    python benchmarks/recorded_forward.py      DeiT-S and T-ResNet50, batch 8 at 224; about 5 minutes on one core

Two equal models take turns, first with the one recorded, then with the other: where a model lies in memory makes a
hundredth, which this cancels. On the CPU it is the processor's time that counts, so that nobody else's load does.
"""

import argparse
import copy
import statistics
import time

import numpy as np
import timm
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import contest
import tcnn_model  # noqa: F401  (registers t_resnet50 with timm)
import tcnn_probe


def forward(model: nn.Module, images: Tensor) -> float:
    """Seconds of a forward."""
    clock = time.perf_counter if images.is_cuda else time.process_time
    start = clock()
    with torch.inference_mode():
        model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def ratios(recorded: nn.Module, plain: nn.Module, images: Tensor, rounds: int) -> list[float]:
    """Time of the one model over that of the other, a round each."""
    with tcnn_probe.record(recorded) as recorder:
        found = []
        for number in range(rounds + 1):
            turns = (recorded, plain) if number % 2 else (plain, recorded)
            seconds = {model: forward(model, images) for model in turns}
            found.append(seconds[recorded] / seconds[plain])
        recorder.mark(epoch=0)
    return found[1:]  # the first warms up


def compare(model: nn.Module, images: Tensor, rounds: int, repeats: int) -> list[float]:
    """Median ratio of each repeat: the geometric mean over both roles."""
    both = model, copy.deepcopy(model)
    medians = [
        [statistics.median(ratios(one, other, images, rounds)) for one, other in (both, both[::-1])]
        for _ in tqdm(range(repeats), disable=None, leave=False)
    ]
    return np.sqrt(np.prod(medians, axis=1)).tolist()


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = contest.options(__doc__)
    parser.add_argument("--models", nargs="+", default=["deit_small_patch16_224", "t_resnet50"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.set_defaults(rounds=8)
    return parser


def main() -> None:
    """Print how much longer a recorded forward takes."""
    arguments = parser().parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.models:
        torch.manual_seed(0)
        model = timm.create_model(name).eval().to(arguments.device)
        images = torch.randn(arguments.batch, 3, 224, 224, device=arguments.device)
        found = compare(model, images, arguments.rounds, arguments.repeats)
        over = f"({min(found):.3f} to {max(found):.3f} in {len(found)} repeats)"
        times = f"{statistics.median(found):.3f} times as long as a plain one {over}"
        print(f"{name}, batch {arguments.batch}: a recorded forward takes {times}")


if __name__ == "__main__":
    main()
