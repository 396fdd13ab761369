"""Attention of layers in which :func:`tcnn_model.convolve` has made some heads convolutions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.convolved.attention import ConvolvedAttention
from tcnn_model.convolved.gpsa import ConvolvedGPSA
from tcnn_model.gpsa.attention import GatedAttention
from tcnn_model.precision import widen
from tcnn_probe.attention.attention import WholeLayers
from tcnn_probe.attention.gated import grids_of_axes
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.logits import GivenLogits, Logits, ProductLogits
from tcnn_probe.attention.reconstruction import relative_difference, tolerance
from tcnn_probe.attention.residual_stream import residual_tokens
from tcnn_probe.attention.softmax import SoftmaxAttention
from tcnn_probe.attention.token_grid import find_windows
from tcnn_probe.hooks.forwards import ModuleCall, Running

__all__ = ["CONVOLVED", "PartlyConvolved"]


@dataclass(frozen=True, kw_only=True)
class PartlyConvolved(SoftmaxAttention):
    """Attention of all heads of a layer: of convolutions,
    the softmax of theta(offset), and of the others their own.

    Args:
        output_of: Function that returns the layer's output for the first row, from its attention
            (1, heads, N_query, N_key).
    """

    output_of: Callable[[Tensor], Tensor]

    def discrepancy(self, output: Any = None) -> tuple[Tensor, float] | None:
        """Compare the layer's output for the first row
        with the output computed from A and the values.
        """
        if self.module.training:
            return None  # under dropout
        rebuilt = self.output_of(self.logits.weights(slice(1)))
        return relative_difference(rebuilt, output[:1]), tolerance(output.dtype)


def _describe(
    layer: ConvolvedAttention | ConvolvedGPSA,
    x: Tensor,
    formed: Mapping[str, Sequence[Any]] | None = None,
    name: str = "",
    running: Running = (),
) -> PartlyConvolved:
    """Describe the attention of a layer for an input, see :class:`WholeLayers`."""
    around = [*running, ModuleCall(layer, [x])]
    if isinstance(layer, ConvolvedGPSA):
        return _of_gpsa(layer, x, name, around)
    parts = {role: outputs[-1] for role, outputs in (formed or {}).items()}
    return _of_tokens(layer, x, parts, name, around)


def _of_tokens(
    layer: ConvolvedAttention, x: Tensor, parts: Mapping[str, Any], name: str, running: Running
) -> PartlyConvolved:
    values = layer.values_by_head(parts["value"])
    y, across = layer.axes(x.shape[1])
    tokens = Tokens(layer.prefix_tokens, y.length, across.length)
    cut = find_windows(running) if layer.in_windows else None
    windows = 1
    if cut is not None:
        windows = prod(-(-side // step) for side, step in zip(cut.grid, cut.window, strict=True))
        cut = None if cut.grid == cut.window else cut

    def output_of(attention: Tensor) -> Tensor:
        heads = attention.to(values.dtype) @ values[:1]
        return layer.project(heads.transpose(1, 2), x[:1])

    return PartlyConvolved(
        module=layer,
        name=name,
        images=len(x) // windows,
        windows=windows,
        layout=Layout(tokens, tokens, cut=cut, query_cut=cut),
        logits=_logits_of(layer, x, parts),
        find_values=lambda: values,
        residual=partial(residual_tokens, running, len(x) // windows, x.shape[1] * windows),
        output_of=output_of,
    )


def _logits_of(layer: ConvolvedAttention, x: Tensor, parts: Mapping[str, Any]) -> Logits:
    """Return the logits of all heads, in their original order, from what the layer has formed.

    Args:
        layer: The layer.
        x: Its input.
        parts: Outputs of the submodules that :func:`_seams_of` names, by role.
    """
    (rows, tokens), first = x.shape[:2], layer.prefix_tokens
    convolved, attending = [*layer.convolved], [*layer.attending]
    others: Any = parts.get("logits")
    softmax = parts.get("softmax")
    logarithms = None if softmax is None else _logarithm(softmax)
    if layer.in_windows:
        # (windows or 1, heads, N, N)
        theta = logarithms
    else:
        theta = widen(layer.convolution.logits(*layer.axes(tokens)))[None]
    assert theta is not None
    if isinstance(others, GatedAttention):
        dense = theta.new_empty(rows, layer.num_heads, tokens, tokens)
        dense[:, convolved] = theta
        dense[:, attending] = _logarithm(others.dense()).to(theta)
        return GivenLogits(dense)
    biases = None if others is None else others.bias
    alike = rows if len(theta) > 1 or (biases is not None and biases.ndim > 3) else 1
    bias = theta.new_zeros(alike, layer.num_heads, tokens, tokens)
    bias[:, convolved, first:] = theta.repeat(max(1, alike // len(theta)), 1, 1, 1)
    if biases is not None:
        bias[:, attending] = biases.to(bias)
    width = max(layer.head_dim, first)
    query, key = (theta.new_zeros(rows, layer.num_heads, tokens, width) for _ in range(2))
    if layer.logits is not None:
        for whole, part in ((query, layer.logits.scale * others.query), (key, others.key)):
            whole[:, attending, :, : layer.head_dim] = part.to(whole)
    if first and logarithms is not None:
        # A class or register token asks channel i, where all keys have their logits for it.
        query[:, convolved, :first, :first] = torch.eye(first).to(query)
        key[:, convolved, :, :first] = logarithms.mT
    return ProductLogits(query, key, 1.0, bias)


def _logarithm(weights: Tensor) -> Tensor:
    """Return the logits of a softmax, of which weights that round to zero are no mask."""
    wide = widen(weights)
    return wide.clamp_min(torch.finfo(wide.dtype).tiny).log()


def _seams_of(layer: ConvolvedAttention | ConvolvedGPSA) -> dict[nn.Module, str]:
    """Return the submodules of a layer whose outputs the description uses, with their roles."""
    if isinstance(layer, ConvolvedGPSA):
        return {}
    seams: dict[nn.Module, str] = {layer.value: "value", layer.softmax: "softmax"}
    return seams if layer.logits is None else {**seams, layer.logits: "logits"}


def _of_gpsa(layer: ConvolvedGPSA, x: Tensor, name: str, running: Running) -> PartlyConvolved:
    y, across = layer.gpsa.axes(x.shape[2], x.shape[3])
    attention = layer.attention(x)

    def output_of(attention: Tensor) -> Tensor:
        on_grid = attention.unflatten(-1, (y.keys, across.keys))
        pixels = on_grid[..., y.before :, across.before :]
        pixels = pixels[..., : y.length, : across.length].flatten(-2)
        heads = pixels.to(x.dtype) @ layer.gpsa.values(x[:1])
        return layer.project(heads, y, across)

    return PartlyConvolved(
        module=layer,
        name=name,
        images=len(x),
        layout=Layout(*grids_of_axes(y, across)),
        logits=GivenLogits(_logarithm(attention)),
        residual=partial(residual_tokens, running, len(x), y.length * across.length),
        output_of=output_of,
    )


CONVOLVED = WholeLayers((ConvolvedAttention, ConvolvedGPSA), _describe, _seams_of)
"""Layers of :func:`tcnn_model.convolve`."""
