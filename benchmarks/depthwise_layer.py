"""A depthwise GPSA layer, whose W_out weights the values
before attention gathers them, against the other order.

python benchmarks/depthwise_layer.py       about 3 minutes on one core

"Products" is a lower bound: the matrix products that every order needs, and nothing else. They are
those of queries, keys and values, and of attention with the values of each head, with their
gradients.
"""

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

import contest
from tcnn_model import GPSA
from tcnn_model.gpsa.functional import Backend

# Channels, kernel and side of the layers of EfficientNet-Lite0, ConvNeXt and MobileNets.
SHAPES = {
    "1,152 channels, 5 x 5, 8 x 8 tokens": (1152, 5, 8),
    "672 channels, 5 x 5, 8 x 8 tokens": (672, 5, 8),
    "768 channels, 7 x 7, 7 x 7 tokens": (768, 7, 7),
    "192 channels, 3 x 3, 14 x 14 tokens": (192, 3, 14),
}


def _contest(
    arguments: argparse.Namespace, channels: int, kernel: int, side: int
) -> contest.Contest:
    torch.manual_seed(0)
    kind = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    layer = GPSA(channels, channels, kernel, padding=kernel // 2, groups=channels, **kind)
    x = torch.randn(arguments.batch, channels, side, side, **kind).requires_grad_()

    def step(backend: Backend) -> contest.Step:
        def forward(*leaves: Tensor) -> Tensor:
            layer.backend = (
                backend  # the contestants share the layer, and set its backend in their turn
            )
            return layer(x)

        return contest.training_step(forward, x, *layer.parameters())

    def products() -> contest.Step:
        tokens = side * side
        pixels = torch.randn(arguments.batch * tokens, channels, **kind)
        weights = [layer.query.detach(), layer.key.detach(), layer.value.detach()]
        gathered = torch.randn(tokens, layer.heads * tokens, **kind)
        values = torch.randn(layer.heads * tokens, channels, **kind)
        upstream = torch.randn(tokens, channels, **kind)

        def step() -> None:
            for weight in weights:
                output = pixels @ weight.T
                _ = output @ weight, output.T @ pixels
            for _ in range(arguments.batch):
                _ = gathered @ values, upstream @ values.T, gathered.T @ upstream

        return step

    return {
        "gathered first, dense": lambda: step("dense"),
        "gathered first, blocks": lambda: step("blocks"),
        "weighted first (auto)": lambda: step("auto"),
        "products alone": products,
    }


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests."""
    return {name: _contest(arguments, *shape) for name, shape in SHAPES.items()}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--batch", type=int, default=8)
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests)
