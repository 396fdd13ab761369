"""(a) timm's ConViT GPSA layer against itself accelerated:
same weights, 9 heads, 144 channels, forward and backward.

The lower bound is timm's plain attention of the same width, fused: a layer without positional
attention and gates.

python benchmarks/convit_layer.py          14, 28 and 56 squared tokens; about 3 minutes on one core
"""

import argparse
import copy
from collections.abc import Mapping

import torch
from timm.layers import Attention
from timm.models.convit import GPSA

import contest
from tcnn_model import accelerate


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests."""
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    # local_init() needs a square number of heads, one for each tap of the kernel.
    timm_layer = GPSA(144, num_heads=9).to(arguments.device, dtype)
    timm_layer.local_init()  # as ConViT starts, with heads on the nine neighbours
    accelerated = copy.deepcopy(timm_layer)
    accelerate(accelerated)
    plain = Attention(144, num_heads=9).to(arguments.device, dtype)

    def at(side: int) -> contest.Contest:
        x = torch.randn(
            arguments.batch,
            side * side,
            144,
            device=arguments.device,
            dtype=dtype,
            requires_grad=True,
        )
        if not arguments.child:  # a child process measures memory only
            with torch.no_grad():
                error = float(
                    (accelerated(x) - timm_layer(x)).abs().max() / timm_layer(x).abs().max()
                )
            print(
                f"{side} x {side}: largest difference of outputs {error:.1e} of the largest output"
            )
        return {
            "timm": lambda: contest.training_step(timm_layer, x),
            "tcnn_model.accelerate": lambda: contest.training_step(accelerated, x),
            "plain attention, fused": lambda: contest.training_step(plain, x),
        }

    return {f"{side} x {side} tokens": at(side) for side in arguments.sides}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[14, 28, 56])
    parser.add_argument("--batch", type=int, default=1)
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests)
