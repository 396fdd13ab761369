"""Attention heads: softmax attention of any model, GPSA layers of our own, and timm's ConViT layers as they are.

ConViT's positional logits are ``w_0 dx + w_1 dy + w_2 (dx^2 + dy^2) + b``, (w_0, w_1, w_2) being rows of ``pos_proj``.
That is ``-alpha ||delta - Delta||^2`` up to a constant, with ``alpha = -w_2`` and ``Delta = -(w_1, w_0) / (2 w_2)``
(ConViT, Eqs. 5-7).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.models.convit import GPSA as ConViTLayer
from torch import Tensor

from tcnn_model import GPSA as GPSALayer
from tcnn_probe.architectures.lookup import head_count
from tcnn_probe.attention.attention import Attention
from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.variables import (
    CONTENT,
    DISTANCE,
    ENTROPY,
    HEAD,
    LOGIT,
    MAPS,
    MEAN,
    UNIFORM,
    content_information,
)
from tcnn_probe.schema import Variable

__all__ = ["CONVIT", "GPSA", "SOFTMAX"]


def _statistics(attention: Attention) -> Mapping[str, Any]:
    return attention.statistics()


def _statistics_of_softmax(attention: Attention) -> Mapping[str, Any]:
    if attention.gate is not None:  # gated layers have probes of their own
        return {}
    return attention.statistics()


def _maps(attention: Attention, images: Sequence[int]) -> dict[str, Tensor]:
    """Return maps over the grid of keys of some images: (images, windows, heads, height, width)."""
    queries = attention.layout.queries
    # Without a grid of keys there is no place to draw attention at.
    if attention.map_size is None:
        return {}
    maps = {"attention_received": attention.on_grid(attention.received(images))}
    if queries is not None:
        # The first row and column after the middle, where their number is even.
        center = (
            queries.prefix + queries.height // 2 * queries.width + queries.width // 2
        )
        maps["center_attention"] = attention.on_grid(attention.row(center, images))
    return maps


SOFTMAX = Probe(
    "softmax",
    {
        "entropy": ENTROPY,
        "attention_distance": DISTANCE,
        "prefix_attention": Variable(
            HEAD,
            "1",
            "attention to class and register tokens",
            f"What queries on the grid spend on the class and register tokens before it. {MEAN}",
        ),
        "max_logit": LOGIT,
        **CONTENT,
        **UNIFORM,
        **MAPS,
    },
    group="",
    attention=_statistics_of_softmax,
    maps=_maps,
)


_GATED_VARIABLES: Mapping[str, Variable] = {
    "gate": Variable(
        HEAD,
        "1",
        "gate",
        "sigma(lambda), share of positional attention (T-CNN Eq. 7), as marked.",
    ),
    "locality_strength": Variable(
        HEAD,
        "pixel-2",
        "locality strength",
        "alpha of the positional attention (T-CNN Eq. 4), as marked.",
    ),
    "attention_span": Variable(
        HEAD, "pixel2", "attention span", "1 / alpha (T-CNN Fig. 4B), as marked."
    ),
    "center_y": Variable(
        HEAD,
        "pixel",
        "centre of attention, y",
        "Delta_y, relative to the query (T-CNN Eq. 4), as marked.",
    ),
    "center_x": Variable(
        HEAD,
        "pixel",
        "centre of attention, x",
        "Delta_x, relative to the query (T-CNN Eq. 4), as marked.",
    ),
    "entropy": ENTROPY,
    "content_entropy": Variable(
        HEAD,
        "nat",
        "entropy of content attention",
        f"Entropy of softmax(q k / sqrt(d)) over real pixels. {MEAN}",
    ),
    "positional_entropy": Variable(
        HEAD,
        "nat",
        "entropy of positional attention",
        f"Entropy of softmax(-alpha ||delta - Delta||^2) over real and padding pixels. {MEAN}",
    ),
    "attention_distance": DISTANCE,
    "max_logit": LOGIT,
    **CONTENT,
    "content_part_information": content_information(
        "of the content part of attention, C"
    ),
    **UNIFORM,
    "uniform_content_entropy": Variable(
        ("layer",),
        "nat",
        "entropy of uniform content attention",
        "log N of the layer's N real pixels: what content_entropy would be if every query attended to all alike.",
    ),
    **MAPS,
}


def _state_of_gpsa(layer: GPSALayer) -> dict[str, Tensor]:
    alpha, center = layer.locality_strength, layer.center
    return _state(layer.gate, alpha, center[:, 0], center[:, 1])


def _state_of_convit(layer: ConViTLayer) -> dict[str, Tensor]:
    weight = layer.pos_proj.weight
    # Rows are (dx, dy, dx^2 + dy^2): w_2 = -alpha and (w_0, w_1) = 2 alpha (Delta_x, Delta_y).
    alpha = -weight[:, 2]
    return _state(
        torch.sigmoid(layer.gating_param),
        alpha,
        weight[:, 1] / (2 * alpha),
        weight[:, 0] / (2 * alpha),
    )


def _state(gate: Tensor, alpha: Tensor, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    return {
        "gate": gate,
        "locality_strength": alpha,
        "attention_span": 1 / alpha,
        "center_y": y,
        "center_x": x,
    }


GPSA = Probe(
    "gpsa",
    _GATED_VARIABLES,
    GPSALayer,
    group="",
    facts=lambda layer: {"heads": head_count(layer)},
    state=_state_of_gpsa,
    attention=_statistics,
    maps=_maps,
)
# timm's layer has the same gate, strength and centre in other parameters.
CONVIT = replace(
    GPSA, kind="convit-gpsa", module_type=ConViTLayer, state=_state_of_convit
)
