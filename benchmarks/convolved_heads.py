"""A vision transformer some of whose heads are convolutions (``tcnn_model.convolve``),
against all heads attending.

    python benchmarks/convolved_heads.py     about 10 minutes on one core

The model is DINOv2's ViT-S/14 (72 heads, one class token) with random weights, at 224 and 518
pixels (257 and 1,370 tokens). In each block as many of the six heads become convolutions. The first
table counts parameters and the multiply-adds of a forward; the second measures forwards without
gradients. In the network of studies/pretrained_heads.py (16 x 16 patches) five heads have 95 % of
their attention in 5 x 5 to 11 x 11 patches, and the others in 17 x 17 to 29 x 29.
"""

import argparse
from collections.abc import Callable, Mapping

import numpy as np
import timm
import torch
import xarray as xr
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import contest
import tcnn_model

CONTESTANTS = {
    "all attend": (0, 1),
    "1 in 6 heads 7 x 7": (1, 7),
    "3 in 6 heads 7 x 7": (3, 7),
    "5 in 6 heads 7 x 7": (5, 7),
    "6 in 6 heads 3 x 3": (6, 3),
    "6 in 6 heads 7 x 7": (6, 7),
    "6 in 6 heads 25 x 25": (6, 25),
}
"""Number of heads of each block that are convolutions, and the size of their kernels."""


def model(size: int, convolved: int, kernel: int) -> nn.Module:
    """Return the model for images of this size, with even kernels."""
    vit = timm.create_model("vit_small_patch14_dinov2", img_size=size).eval()
    if not convolved:
        return vit
    layers = [f"blocks.{block}.attn" for block in range(len(vit.blocks))]
    heads = vit.blocks[0].attn.num_heads
    offsets = np.arange(kernel) - kernel // 2
    weights = np.ones((len(layers), heads, kernel, kernel))
    weights[:, -(-convolved * heads // 6) :] = np.nan
    prefix = weights[..., 0, :1].copy()
    kernels = xr.Dataset(
        {
            "offset_kernel": (("layer", "head", "offset_y", "offset_x"), weights),
            "prefix_kernel": (("layer", "head", "prefix_token"), prefix),
        },
        {
            "layer": layers,
            "head": range(heads),
            "offset_y": offsets,
            "offset_x": offsets,
        },
    )
    return tcnn_model.convolve(vit, kernels, mass=1)


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests: an image size each."""

    def prepare(size: int, contestant: str) -> Callable[[], contest.Step]:
        return lambda: _step(size, contestant, arguments)

    return {
        f"{size} x {size}": {name: prepare(size, name) for name in CONTESTANTS}
        for size in arguments.sizes
    }


def _step(size: int, contestant: str, arguments: argparse.Namespace) -> contest.Step:
    kind = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    vit = model(size, *CONTESTANTS[contestant]).to(**kind)
    x = torch.randn(arguments.batch, 3, size, size, **kind)

    @torch.inference_mode()
    def forward() -> None:
        vit(x)

    return forward


def report(arguments: argparse.Namespace, contests: Mapping[str, contest.Contest]) -> None:
    """Print the counts, and then times and memory."""
    rows = []
    for name, (convolved, kernel) in CONTESTANTS.items():
        counts = []
        for size in arguments.sizes:
            vit = model(size, convolved, kernel)
            parameters = sum(p.numel() for p in vit.parameters())
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                vit(torch.zeros(1, 3, size, size))
            # The counter counts a multiply-add as two operations.
            counts += [
                f"{parameters / 1e6:.2f}",
                f"{counter.get_total_flops() / 2e9:.2f}",
            ]
        rows.append((name, *counts))
    header = [
        f"{what}, {size}"
        for size in arguments.sizes
        for what in ("10^6 parameters", "10^9 multiply-adds")
    ]
    contest.print_table(("", *header), rows)
    print()
    contest.compare(arguments, contests)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 518])
    parser.add_argument("--batch", type=int, default=1)
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests, report)
