"""timm's ConViT layers, as they are.

Their positional logits are ``w_0 dx + w_1 dy + w_2 (dx^2 + dy^2) + b`` with (w_0, w_1, w_2) the rows of ``pos_proj``.
That is ``-alpha ||delta - Delta||^2`` up to a constant, with ``alpha = -w_2`` and ``Delta = -(w_1, w_0) / (2 w_2)``
(ConViT, Eqs. 5-7).
"""

import torch
from timm.models.convit import GPSA as ConViTLayer
from torch import Tensor

from tcnn_model.convit import convit_attention
from tcnn_probe.probes.probe import Probe
from tcnn_probe.statistics import gated_attention_statistics

__all__ = ["CONVIT"]


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


def _measure(layer: ConViTLayer, x: Tensor) -> dict[str, Tensor]:
    # Not layer.qk(x): hooks that others have on it would run twice.
    return gated_attention_statistics(convit_attention(layer, layer.qk.forward(x)))


CONVIT = Probe("convit-gpsa", ConViTLayer, lambda layer: layer.num_heads, _state, _measure)
