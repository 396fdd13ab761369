"""(f) Peak memory against image size: Fig. 5 of the PatchConvNet paper, at inference.

    # 224 to 768 pixels squared, one image; some minutes on one core
    python benchmarks/resolution_memory.py

The first table shows the memory that a forward adds, at its peak, to the memory in use before it
(the weights), and the exponent with which it grows with the area of the image: 1 is linear, 2
quadratic. PatchConvNet should show 1. The second table shows it per area. The paper's ViTs predate
fused attention; torch's fused attention, also on the CPU, keeps no N x N matrix, so ViT-S is listed
twice. ``--training`` measures forward and backward, with the gradients of the weights, which do not
grow; ``--figure PATH`` draws the figure.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import timm
import torch
from torch import nn

import contest
import tcnn_model.models  # noqa: F401 (its models, for timm)

MODELS = {
    "PatchConvNet-S60": "patchconvnet_s60",
    "ResNet-50": "resnet50",
    "T-ResNet-50": "t_resnet50",
    "ViT-S": "vit_small_patch16_224",
    "ViT-S, not fused": "vit_small_patch16_224",
}


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests: the models, at each size."""

    def prepare(label: str, size: int) -> Callable[[], contest.Step]:
        return lambda: _step(label, size, arguments)

    return {
        str(size): {label: prepare(label, size) for label in MODELS} for size in arguments.sizes
    }


def _step(label: str, size: int, arguments: argparse.Namespace) -> contest.Step:
    # ViTs are built for one image size, the others take any.
    options = {"img_size": size} if label.startswith("ViT") else {}
    model: nn.Module = timm.create_model(MODELS[label], **options)
    for module in model.modules():
        if label.endswith("not fused") and hasattr(module, "fused_attn"):
            module.fused_attn = False
    x = torch.randn(
        arguments.batch,
        3,
        size,
        size,
        device=arguments.device,
        dtype=getattr(torch, arguments.dtype),
    )
    model.to(x).train(arguments.training)

    @torch.inference_mode()
    def forward() -> None:
        model(x)

    def train() -> None:
        model(x).square().sum().backward()
        model.zero_grad()

    return train if arguments.training else forward


def report(arguments: argparse.Namespace, contests: Mapping[str, contest.Contest]) -> None:
    """Print the tables, and draw the figure with ``--figure``."""
    peaks = contest.memory(contests)
    sizes = arguments.sizes
    curves = {label: [peaks[str(size)][label] / 2**20 for size in sizes] for label in MODELS}
    header = (
        "",
        *(f"{size} x {size}" for size in sizes),
        "exponent",
        "least - most",
        "R² of a line",
    )
    print("peak memory, MiB")
    rows = [
        (label, *(f"{mib:.0f}" for mib in curve), *_growth(sizes, curve))
        for label, curve in curves.items()
    ]
    contest.print_table(header, rows)
    print(f"\npeak memory per area, relative to that at {sizes[0]} x {sizes[0]}")
    rows = [
        (
            label,
            *(
                f"{mib / curve[0] * (sizes[0] / size) ** 2:.2f}"
                for mib, size in zip(curve, sizes, strict=True)
            ),
        )
        for label, curve in curves.items()
    ]
    contest.print_table(header[: len(sizes) + 1], rows)
    if arguments.figure:
        draw(sizes, curves, arguments.training).savefig(arguments.figure, dpi=150)


def _growth(sizes: list[int], curve: list[float]) -> tuple[str, str, str]:
    """Return the exponent of memory in the area,
    over all sizes and between neighbours, and R^2 of a line.
    """

    def exponent(first: int, last: int) -> float:
        return math.log(curve[last] / curve[first]) / math.log((sizes[last] / sizes[first]) ** 2)

    steps = [exponent(i, j) for i, j in pairwise(range(len(sizes)))]
    areas = torch.tensor(sizes, dtype=torch.float64) ** 2
    r2 = (
        float(torch.corrcoef(torch.stack([areas, torch.tensor(curve, dtype=torch.float64)]))[0, 1])
        ** 2
    )
    return f"{exponent(0, -1):.2f}", f"{min(steps):.2f} - {max(steps):.2f}", f"{r2:.4f}"


def draw(sizes: list[int], curves: Mapping[str, list[float]], training: bool) -> plt.Figure:
    """Draw peak memory in MiB against image size, a line per model."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for (label, curve), style in zip(curves.items(), ("o-", "s-", "d--", "^-", "v-"), strict=True):
        # T-ResNet-50 is dashed, as its line meets that of ResNet-50.
        axes.plot(sizes, curve, style, label=label)
    axes.set(
        xlabel="side of the image (pixels)",
        ylabel="peak memory (MiB)",
        xscale="log",
        yscale="log",
    )
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_title("One step of training" if training else "One forward, without the weights")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 288, 384, 512, 640, 768])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--figure", type=Path, help="file of the figure")
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests, report)
