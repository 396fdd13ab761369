"""Gradient norm of each attention head,
which shows how strongly the head's own parameters are trained.

The order of queries, keys and values of the heads in a matrix differs between similar layers (LeViT
interleaves them head by head; Nest interleaves the heads in each channel). Parameters are therefore
assigned to heads by the class of a layer, whose source was read. Unknown classes are left out and
named in ``recorder.missing``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.precision import at_least_float32
from tcnn_probe.architectures.lookup import head_count, known, looks_like_attention
from tcnn_probe.architectures.record import HeadParameters
from tcnn_probe.probes.probe import GradientNorms, NotMeasuredError, Probe
from tcnn_probe.probes.shared_variables import HEAD
from tcnn_probe.schema import Variable

__all__ = ["GRADIENT"]

Parameters = Iterator[tuple[Tensor | None, int]]
"""Parameters, each with the number of blocks of (heads, ...) that it consists of."""


def _by_head(gradient: Tensor, blocks: int, heads: int) -> Tensor:
    """Return the sum of squares of each head:
    shape (blocks * heads * d, ...) or (blocks, heads * d) -> (heads,).
    """
    by_head = gradient.reshape(blocks, heads, -1)
    # Squares of half-precision gradients would underflow, so they are computed in float32 at least.
    return torch.linalg.vector_norm(
        by_head, dim=(0, 2), dtype=at_least_float32(gradient.dtype)
    ).square()


def _parameters(layer: nn.Module, record: HeadParameters, heads: int) -> Parameters:
    """Yield the parameters of single heads as the layer's record names them."""
    output = getattr(layer, record.output, None) if record.output else None
    # A LoRA adapter or a quantised layer has other parameters, whose rows need not be heads.
    if output is not None and not isinstance(output, (nn.Linear, nn.Identity)):
        raise NotMeasuredError(
            f"its output projection is {type(output).__name__}, not an nn.Linear"
        )
    for name, blocks in record.rows.items():
        part = getattr(layer, name, None)
        # Buffers, such as the biases of keys of BEiT, are not trained.
        if part is None or isinstance(part, nn.Identity) or name in layer._buffers:
            continue
        if isinstance(part, Tensor):
            yield part, blocks
        else:
            yield from _rows(part, name, blocks, heads, output)
    if isinstance(output, nn.Linear):
        yield from _columns(output, heads)
    if record.taps:
        weight = getattr(layer, record.taps)
        # (C_out, C_in, k_h, k_w) has C_out * C_in blocks of heads, because each tap belongs to a
        # head.
        yield weight, weight.shape[:2].numel()


def _rows(part: Any, name: str, blocks: int, heads: int, output: Any) -> Parameters:
    if not isinstance(part, nn.Linear):
        raise NotMeasuredError(f"{name} is {type(part).__name__}, not an nn.Linear")
    rows = part.out_features
    # The rows of a single matrix qkv follow from the output projection; separate queries and keys
    # may have other sizes.
    if rows % (blocks * heads) or (
        blocks == 3 and isinstance(output, nn.Linear) and rows != 3 * output.in_features
    ):
        raise NotMeasuredError(
            f"{rows} rows of {name} are not {blocks} x {heads} heads of one size"
        )
    yield part.weight, blocks
    yield part.bias, blocks


def _columns(layer: nn.Linear, heads: int) -> Parameters:
    if layer.in_features % heads:
        raise NotMeasuredError(
            f"{layer.in_features} columns of the output projection do not divide into {heads} heads"
        )
    # (out, heads * d): each output channel is a block of heads.
    yield layer.weight, layer.out_features


# Layers that cannot be measured are included, so that an unknown kind of attention is reported as
# missing.
def _is_expected(layer: nn.Module) -> bool:
    """Return whether the layer is known, or has heads and looks like attention."""
    if known(layer).head_parameters is not None:
        return True
    return head_count(layer) is not None and looks_like_attention(layer)


class GradientProbe(Probe):
    """Gradient norms of the heads of layers whose parameters are known head by head."""

    def gradients(self, module: nn.Module) -> GradientNorms:
        """Return the parameters that belong to single heads,
        with functions that sum squares by head.
        """
        record = known(module).head_parameters
        if record is None:
            raise NotMeasuredError(
                f"how the heads of {type(module).__name__} share its parameters is not known"
            )
        heads: Any = head_count(module)  # known for every such layer
        by_parameter: list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]] = []
        for parameter, blocks in _parameters(module, record, heads):
            if isinstance(parameter, nn.Parameter):
                by_parameter.append((parameter, partial(_by_head, blocks=blocks, heads=heads)))
            # A tensor that is not a parameter, as under torch's parametrizations, accumulates no
            # gradient.
            elif parameter is not None:
                raise NotMeasuredError("a weight is computed from other parameters")
        return {"gradient_norm": by_parameter}


GRADIENT = GradientProbe(
    "gradient",
    {
        "gradient_norm": Variable(
            HEAD,
            "1",
            "gradient norm of the head",
            "Euclidean norm of the gradient of the parameters that are the head's own: weights and "
            "biases of its queries, keys and values, its columns of the output projection; of GPSA "
            "its tap of the weight in place of these columns, its locality strength (before the "
            "softplus), centre and gate; of ConViT its position weights and gate. Root mean square "
            "over the backward passes since the previous mark, of the gradient that each pass "
            "added, in each process separately, and with the factor of a loss scaler if there is "
            "one.",
        )
    },
    _is_expected,
    facts=lambda layer: {"heads": head_count(layer)},
)
