"""timm's ConViT layers, as they are.

Their positional logits are ``w_0 dx + w_1 dy + w_2 (dx^2 + dy^2) + b`` with (w_0, w_1, w_2) the rows of ``pos_proj``.
That is ``-alpha ||delta - Delta||^2`` up to a constant, with ``alpha = -w_2`` and ``Delta = -(w_1, w_0) / (2 w_2)``
(ConViT, Eqs. 5-7).
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.models.convit import GPSA as ConViTLayer
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.gpsa.convit import convit_attention
from tcnn_model.gpsa.statistics import apply_and_measure
from tcnn_probe.probes.gated import VARIABLES, maps_of, numbers_of
from tcnn_probe.probes.probe import ForwardCall, Probe

__all__ = ["CONVIT"]


def _facts(layer: ConViTLayer) -> dict[str, Any]:
    return {"heads": layer.num_heads}


def _state(layer: ConViTLayer) -> dict[str, Tensor]:
    weight = layer.pos_proj.weight
    alpha = -weight[:, 2]
    return {
        "gate": torch.sigmoid(layer.gating_param),
        "locality_strength": alpha,
        "attention_span": 1 / alpha,
        "center_y": weight[:, 1] / (2 * alpha),
        "center_x": weight[:, 0] / (2 * alpha),
    }


def _attention(layer: ConViTLayer, x: Tensor) -> GatedAttention:
    # Not layer.qk(x): hooks that others have on it would run twice.
    return convit_attention(layer, layer.qk.forward(x))


def _measure(call: ForwardCall) -> dict[str, Tensor]:
    return numbers_of(_attention(call.module, call.inputs[0]))


def _maps(call: ForwardCall, which: Sequence[int]) -> dict[str, Tensor]:
    return maps_of(_attention(call.module, call.inputs[0]), which)


def _rebuild(call: ForwardCall) -> Tensor | None:
    layer, x = call.module, call.inputs[0][:1]
    if layer.training and (layer.attn_drop.p > 0 or layer.proj_drop.p > 0):
        return None
    values = layer.v.forward(x).unflatten(2, (layer.num_heads, -1)).transpose(1, 2)
    gathered, _ = apply_and_measure(_attention(layer, x), values)
    return layer.proj.forward(gathered.transpose(1, 2).flatten(2))


CONVIT = Probe(
    "convit-gpsa",
    VARIABLES,
    ConViTLayer,
    group="",
    facts=_facts,
    state=_state,
    measure=_measure,
    maps=_maps,
    rebuild=_rebuild,
)
