"""(j) The processor time of a recorded forward, relative to a plain one.

    # DeiT-S and T-ResNet50, batch 8 at 224; about 5 minutes on one core
    python benchmarks/recorded_forward.py

Two equal models take turns, and each is the recorded one in half of the rounds: the place of a
model in memory makes a difference of a hundredth, which this cancels. On the CPU the processor time
is measured, so that other load on the machine does not count.
"""

import argparse
import copy
import statistics
import time
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import contest
import tcnn_model.models  # noqa: F401  (registers t_resnet50 with timm)
import tcnn_probe


def forward(model: nn.Module, images: Tensor) -> float:
    """Measure the time of a forward in seconds."""
    clock = time.perf_counter if images.is_cuda else time.process_time
    start = clock()
    with torch.inference_mode():
        model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def ratios(
    recorded: nn.Module, plain: nn.Module, images: Tensor, rounds: int, **options: Any
) -> list[float]:
    """Return the ratio, in each round, of the time
    of the recorded model to that of the plain model.

    Args:
        recorded, plain: Two equal models.
        images: Images of a forward.
        rounds: Number of forwards of each model.
        **options: Options of ``record``.
    """
    with tcnn_probe.record(recorded, **options) as recorder:
        measured = []
        for turn in range(rounds + 1):
            # The order alternates, so that each model finds the images in the caches equally often.
            order = (recorded, plain) if turn % 2 else (plain, recorded)
            seconds = {model: forward(model, images) for model in order}
            measured.append(seconds[recorded] / seconds[plain])
        recorder.mark(epoch=0)
    return measured[1:]  # the first round warms up


def compare(
    model: nn.Module, images: Tensor, rounds: int, repeats: int, **options: Any
) -> list[float]:
    """Return the median ratio of each repeat:
    the geometric mean over both roles of the two models.
    """
    twin = copy.deepcopy(model)
    medians = []
    for _ in tqdm(range(repeats), disable=None, leave=False):
        first = statistics.median(ratios(model, twin, images, rounds, **options))
        second = statistics.median(ratios(twin, model, images, rounds, **options))
        medians.append((first, second))
    # A factor that favours a place in memory multiplies one ratio and divides the other.
    return np.sqrt(np.prod(medians, axis=1)).tolist()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--models", nargs="+", default=["deit_small_patch16_224", "t_resnet50"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--health", action="store_true", help='record the probe "health" too')
    parser.set_defaults(rounds=8)
    return parser


def main() -> None:
    """Print how much longer a recorded forward takes."""
    arguments = parser().parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.models:
        torch.manual_seed(0)
        images = torch.randn(arguments.batch, 3, 224, 224, device=arguments.device)
        images = images.to(getattr(torch, arguments.dtype))
        model = timm.create_model(name).eval().to(images)
        medians = compare(
            model,
            images,
            arguments.rounds,
            arguments.repeats,
            health=arguments.health,
        )
        print(
            f"{name}, batch {arguments.batch}: a recorded forward takes "
            f"{statistics.median(medians):.3f} times as long as a plain one ({min(medians):.3f} to "
            f"{max(medians):.3f} in {len(medians)} repeats)"
        )


if __name__ == "__main__":
    main()
