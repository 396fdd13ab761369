"""Gated positional self-attention: our own GPSA layers, and timm's ConViT layers as they are.

ConViT's positional logits are ``w_0 dx + w_1 dy + w_2 (dx^2 + dy^2) + b``, (w_0, w_1, w_2) being rows of ``pos_proj``.
That is ``-alpha ||delta - Delta||^2`` up to a constant, with ``alpha = -w_2`` and ``Delta = -(w_1, w_0) / (2 w_2)``
(ConViT, Eqs. 5-7).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from timm.models.convit import GPSA as ConViTLayer
from torch import Tensor

from tcnn_model import GPSA as GPSALayer
from tcnn_model import GatedAttention
from tcnn_model.gpsa.convit import convit_attention
from tcnn_model.gpsa.statistics import apply_and_measure, measure
from tcnn_probe.architectures.lookup import head_count
from tcnn_probe.attention.gated import gated_attention, gated_values
from tcnn_probe.attention.patterns import Pattern, gated_patterns
from tcnn_probe.attention.statistics import gated_attention_statistics
from tcnn_probe.attention.uniform import uniform_gated_attention
from tcnn_probe.probes.probe import ForwardCall, Probe
from tcnn_probe.probes.variables import CONTENT, DISTANCE, ENTROPY, HEAD, MAPS, MEAN, UNIFORM, content_information
from tcnn_probe.schema import Variable

__all__ = ["CONVIT", "GPSA", "PARTS", "attention_of"]

PARTS = ("head_queries", "head_keys", "qk")
"""The submodules whose outputs are queries and keys: the first two of GPSA, the last of ConViT."""

_VARIABLES: Mapping[str, Variable] = {
    "gate": Variable(HEAD, "1", "gate", "sigma(lambda), share of positional attention (T-CNN Eq. 7), as marked."),
    "locality_strength": Variable(
        HEAD, "pixel-2", "locality strength", "alpha of the positional attention (T-CNN Eq. 4), as marked."
    ),
    "attention_span": Variable(HEAD, "pixel2", "attention span", "1 / alpha (T-CNN Fig. 4B), as marked."),
    "center_y": Variable(
        HEAD, "pixel", "centre of attention, y", "Delta_y, relative to the query (T-CNN Eq. 4), as marked."
    ),
    "center_x": Variable(
        HEAD, "pixel", "centre of attention, x", "Delta_x, relative to the query (T-CNN Eq. 4), as marked."
    ),
    "entropy": ENTROPY,
    "content_entropy": Variable(
        HEAD, "nat", "entropy of content attention", f"Entropy of softmax(q k / sqrt(d)) over real pixels. {MEAN}"
    ),
    "positional_entropy": Variable(
        HEAD,
        "nat",
        "entropy of positional attention",
        f"Entropy of softmax(-alpha ||delta - Delta||^2) over real and padding pixels. {MEAN}",
    ),
    "attention_distance": DISTANCE,
    **CONTENT,
    "content_part_information": content_information("of the content part of attention, C"),
    **UNIFORM,
    "uniform_content_entropy": Variable(
        ("layer",),
        "nat",
        "entropy of uniform content attention",
        "log N of the layer's N real pixels: what content_entropy would be if every query attended to all alike.",
    ),
    **MAPS,
}


def attention_of(call: ForwardCall, images: slice | Tensor = slice(None)) -> GatedAttention:
    """The attention of a call of a gated layer, of the queries and keys that it formed.

    Args:
        call: with :data:`PARTS`; if these did not run just once in it, queries and keys are formed anew.
        images: which of them.
    """
    layer, x = call.module, call.inputs[0]
    formed = {name: part.output[images] for name, part in call.parts.items() if part.times == 1}
    if "qk" in formed:
        return convit_attention(layer, formed["qk"])
    if "head_queries" in formed and "head_keys" in formed:
        return layer.attention_between(formed["head_queries"], formed["head_keys"], x.shape[2:])
    return gated_attention(layer, x[images])


def _measure(call: ForwardCall) -> dict[str, Tensor | Pattern]:
    """Numbers of every image: (B, heads) each, (B,) of uniform attention; and sums over images."""
    attention = attention_of(call)
    whole, part = gated_patterns(attention, call.limit)
    numbers = {**gated_attention_statistics(attention), **uniform_gated_attention(attention)}
    return {**numbers, "content_information": whole, "content_part_information": part}


def _maps(call: ForwardCall, which: Sequence[int]) -> dict[str, Tensor]:
    """Maps over the real pixels of some images: (images, 1, heads, H, W) each."""
    some = attention_of(call, torch.as_tensor(which, device=call.inputs[0].device))
    y, x = some.y, some.x
    received = measure(some).received / some.query.shape[2]
    middle = y.queries // 2 * x.queries + x.queries // 2
    center = some.on_pixels(torch.tensor([middle], device=received.device))[:, :, 0]
    maps = {"attention_received": received, "center_attention": center}
    return {name: value.unflatten(-1, (y.length, x.length)).unsqueeze(1) for name, value in maps.items()}


def _state_of_gpsa(layer: GPSALayer) -> dict[str, Tensor]:
    alpha, center = layer.locality_strength, layer.center
    return _state(layer.gate, alpha, center[:, 0], center[:, 1])


def _state_of_convit(layer: ConViTLayer) -> dict[str, Tensor]:
    weight = layer.pos_proj.weight
    alpha = -weight[:, 2]
    return _state(torch.sigmoid(layer.gating_param), alpha, weight[:, 1] / (2 * alpha), weight[:, 0] / (2 * alpha))


def _state(gate: Tensor, alpha: Tensor, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    return {"gate": gate, "locality_strength": alpha, "attention_span": 1 / alpha, "center_y": y, "center_x": x}


def _rebuild(call: ForwardCall) -> Tensor | None:
    layer, x = call.module, call.inputs[0][:1]
    of_convit = isinstance(layer, ConViTLayer)
    if of_convit and layer.training and (layer.attn_drop.p > 0 or layer.proj_drop.p > 0):
        return None
    attention = attention_of(call, slice(1))
    gathered, _ = apply_and_measure(attention, gated_values(layer, x))
    return layer.proj.forward(gathered.transpose(1, 2).flatten(2)) if of_convit else layer.combine(gathered, attention)


GPSA = Probe(
    "gpsa",
    _VARIABLES,
    GPSALayer,
    group="",
    facts=lambda layer: {"heads": head_count(layer)},
    state=_state_of_gpsa,
    measure=_measure,
    maps=_maps,
    rebuild=_rebuild,
    parts=PARTS,
)
CONVIT = replace(GPSA, kind="convit-gpsa", module_type=ConViTLayer, state=_state_of_convit)
