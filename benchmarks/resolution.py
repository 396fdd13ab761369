"""(d) A GPSA layer at growing resolution, 3 x 3 and 64 channels,
forward and backward: memory linear in the tokens.

    # 14, 28, 56 and 112 squared tokens; about 4 minutes on one core
    python benchmarks/resolution.py

Dense attention is measured too as long as its N x N matrices fit, up to 56 squared tokens.
"""

import argparse
from collections.abc import Mapping

import torch

import contest
from tcnn_model import GPSA


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests."""
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    kind = {"device": arguments.device, "dtype": dtype}
    layer = GPSA(64, 64, 3, padding=1, **kind)
    dense = GPSA(64, 64, 3, padding=1, backend="dense", **kind)
    dense.load_state_dict(layer.state_dict())

    def at(side: int) -> contest.Contest:
        x = torch.randn(1, 64, side, side, requires_grad=True, **kind)
        auto = {"auto": lambda: contest.training_step(layer, x)}
        # At 112 x 112 tokens the attention of a dense layer, nine matrices, takes 5.7 GB in
        # float32.
        return {"dense": lambda: contest.training_step(dense, x), **auto} if side <= 56 else auto

    return {f"{side} x {side} = {side * side} tokens": at(side) for side in arguments.sides}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[14, 28, 56, 112])
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests)
