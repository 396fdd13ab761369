"""The fastest backend of attention at each size: the measurement behind ``backend="auto"``.

python benchmarks/backends.py              about 3 minutes on one core
"""

import argparse
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

import contest
from tcnn_model import gpsa
from tcnn_model.gpsa.functional import Backend
from tcnn_model.gpsa.positional import Axis, gaussian_position

# A 3 x 3 kernel gives nine heads.
_HEADS = 9


def _contest(
    arguments: argparse.Namespace,
    side: int,
    channels: int,
    values: Literal["shared", "per head"],
) -> contest.Contest:
    torch.manual_seed(0)
    # Stride 1, padding 1 and kernel 3: the output has the size of the input.
    axis = Axis(side, 1, 1, 3)
    batch = arguments.batch
    width = channels // _HEADS

    def leaf(*shape: int) -> Tensor:
        return torch.randn(
            shape,
            device=arguments.device,
            dtype=getattr(torch, arguments.dtype),
            requires_grad=True,
        )

    query, key = (leaf(batch, _HEADS, side * side, width) for _ in range(2))
    v = (
        leaf(batch, 1, side * side, channels)
        # A converted convolution shares its values between the heads; a transformer's layer gives
        # each head a slice.
        if values == "shared"
        else leaf(batch, _HEADS, side * side, width)
    )
    alpha = torch.ones(_HEADS, dtype=torch.float64, device=arguments.device)
    position = gaussian_position(
        alpha, torch.randn(_HEADS, 2, dtype=torch.float64, device=arguments.device)
    )
    # The gate lies between 0 and 1, so that content and position both take part.
    gate = torch.full((_HEADS,), 0.7, device=arguments.device, requires_grad=True)
    leaves = (query, key, v, position.requires_grad_(), gate)

    def step(backend: Backend) -> contest.Step:
        return contest.training_step(
            lambda *tensors: gpsa(*tensors, y=axis, x=axis, backend=backend), *leaves
        )

    backends: list[Backend] = ["dense", "blocks"]
    if values == "per head":
        backends.append("fused")
    if arguments.device == "cuda":
        # The kernels need a GPU.
        backends.append("triton")
    return {backend: lambda backend=backend: step(backend) for backend in backends}


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests."""
    shared = {
        f"{side} x {side} tokens, {channels} channels shared": _contest(
            arguments, side, channels, "shared"
        )
        for channels in (64, 512)
        for side in (7, 10, 14, 20, 28)
    }
    per_head = {
        f"{side} x {side} tokens, 144 channels, 16 a head": _contest(
            arguments, side, 144, "per head"
        )
        for side in (7, 14, 28)
    }
    return shared | per_head


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--batch", type=int, default=4)
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests)
