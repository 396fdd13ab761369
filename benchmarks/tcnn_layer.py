"""(b) A T-CNN's layer, 3 x 3 and 512 channels,
against a literal form of Eq. (7), with and without torch.compile.

    # 196 and 400 tokens, the papers' sizes; about 2 minutes on one core
    python benchmarks/tcnn_layer.py

The literal form is that of the paper and of ConViT's code: positional logits v_pos . r over an (N,
N, 3) tensor kept from call to call, two softmaxes, a mixture, and a product with the values.
"""

import argparse
import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contest
from tcnn_model import GPSA


class Literal(nn.Module):
    """Function of a 3 x 3, stride 1, ungrouped GPSA layer, by dense matrices."""

    def __init__(self, layer: GPSA, side: int) -> None:
        super().__init__()
        self.layer = layer
        pixels = torch.arange(-1, side + 1)
        keys = torch.cartesian_prod(pixels, pixels)
        real = ((keys >= 0) & (keys < side)).all(1)
        # Queries are the pixels of the image; keys include the pixels of its padding.
        delta = (keys[None] - keys[real][:, None]).to(layer.weight)
        # (N, (side + 2)^2, 3)
        self.register_buffer("r", torch.cat([delta.square().sum(-1, keepdim=True), delta], -1))
        self.register_buffer("real", real.nonzero()[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        """Apply Eqs. (5) and (7): (B, C, side, side) -> (B, C_out, side, side)."""
        layer = self.layer
        tokens = x.flatten(2).transpose(1, 2)
        q, k = (
            F.linear(tokens, w).unflatten(2, (9, -1)).transpose(1, 2)
            for w in (layer.query, layer.key)
        )
        content = torch.softmax(q @ k.transpose(2, 3) * layer.qk_dim**-0.5, -1)
        positional = torch.softmax(
            torch.einsum("qkr,hr->hqk", self.r, layer.position.to(x.dtype)), -1
        )
        gate = layer.gate.to(x.dtype)[:, None, None]
        # Keys in the padding have a share of the softmax but values of 0, so that they drop out of
        # the product.
        attention = (1 - gate) * content + gate * positional[..., self.real]
        values = F.linear(tokens, layer.value)[:, None]
        gathered = (attention @ values).transpose(1, 2).flatten(2)  # (B, N, heads * C)
        output = F.linear(gathered, layer.weight.permute(0, 2, 3, 1).flatten(1), layer.bias)
        return output.transpose(1, 2).unflatten(2, x.shape[2:])


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests."""
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    layer = GPSA(
        arguments.channels,
        arguments.channels,
        3,
        padding=1,
        device=arguments.device,
        dtype=dtype,
    )
    kernels = copy.deepcopy(layer)
    kernels.backend = "triton"

    def at(side: int) -> contest.Contest:
        shape = (arguments.batch, arguments.channels, side, side)
        x = torch.randn(shape, device=arguments.device, dtype=dtype, requires_grad=True)
        literal = Literal(layer, side).to(arguments.device)
        if not arguments.child:  # a child process measures memory only
            with torch.no_grad():
                error = float((layer(x) - literal(x)).abs().max() / literal(x).abs().max())
            print(
                f"{side} x {side}: largest difference of outputs {error:.1e} of the largest output"
            )
        ways = {
            "literal Eq. (7)": lambda: contest.training_step(literal, x),
            "literal, torch.compile": lambda: contest.training_step(
                torch.compile(literal, dynamic=False), x
            ),
            "tcnn_model.GPSA": lambda: contest.training_step(layer, x),
        }
        if arguments.device == "cuda":
            ways["tcnn_model.GPSA, kernels"] = lambda: contest.training_step(kernels, x)
        return ways

    return {f"{side * side} tokens": at(side) for side in arguments.sides}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[14, 20])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--channels", type=int, default=512)
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests)
