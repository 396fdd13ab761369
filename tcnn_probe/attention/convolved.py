"""Attention of layers in which :func:`tcnn_model.convolve` has made some heads convolutions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tcnn_model.convolved.attention import ConvolvedAttention
from tcnn_model.convolved.gpsa import ConvolvedGPSA
from tcnn_probe.attention.attention import WholeLayers
from tcnn_probe.attention.gated import grids_of_axes
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.reconstruction import relative_difference, tolerance
from tcnn_probe.attention.residual_stream import residual_tokens
from tcnn_probe.attention.softmax import GivenLogits, ProductLogits, SoftmaxAttention
from tcnn_probe.hooks.forwards import ModuleCall, Running

__all__ = ["CONVOLVED", "PartlyConvolved"]


@dataclass(frozen=True, kw_only=True)
class PartlyConvolved(SoftmaxAttention):
    """Attention of all heads of a layer: of convolutions,
    the softmax of theta(offset), and of the others their own.

    Args:
        output_of: Function that returns the layer's output for the first image, from its attention
            (1, heads, N_query, N_key).
    """

    output_of: Callable[[Tensor], Tensor]

    def discrepancy(self, output: Any = None) -> tuple[Tensor, float] | None:
        """Compare the layer's output for the first image
        with the output computed from A and the values.
        """
        if self.module.training:
            return None  # under dropout
        rebuilt = self.output_of(self.weights(image=0)[:, 0])
        return relative_difference(rebuilt, output[:1]), tolerance(output.dtype)


def _describe(
    layer: ConvolvedAttention | ConvolvedGPSA,
    x: Tensor,
    formed: Mapping[str, Sequence[Tensor]] | None = None,
    name: str = "",
    running: Running = (),
) -> PartlyConvolved:
    """Describe the attention of a layer for an input, see :class:`WholeLayers`."""
    around = [*running, ModuleCall(layer, [x])]
    if isinstance(layer, ConvolvedGPSA):
        return _of_gpsa(layer, x, name, around)
    return _of_tokens(layer, x, name, around)


def _of_tokens(
    layer: ConvolvedAttention, x: Tensor, name: str, running: Running
) -> PartlyConvolved:
    query, key, values, bias = layer.as_softmax(x)
    prefix = layer.prefix_tokens
    tokens = Tokens(prefix, *layer.size(x.shape[1] - prefix))

    def output_of(attention: Tensor) -> Tensor:
        heads = attention.to(values.dtype) @ values[:1]
        return layer.project(heads.transpose(1, 2), x[:1])

    return PartlyConvolved(
        module=layer,
        name=name,
        images=len(x),
        layout=Layout(tokens, tokens),
        logits=ProductLogits(query, key, layer.scale, bias),
        find_values=lambda: values,
        residual=partial(residual_tokens, running, len(x), x.shape[1]),
        output_of=output_of,
    )


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
        # Weights that round to zero, far from a head's centre, are no mask.
        logits=GivenLogits(attention.clamp_min(torch.finfo(attention.dtype).tiny).log()),
        residual=partial(residual_tokens, running, len(x), y.length * across.length),
        output_of=output_of,
    )


CONVOLVED = WholeLayers((ConvolvedAttention, ConvolvedGPSA), _describe)
"""Layers of :func:`tcnn_model.convolve`."""
