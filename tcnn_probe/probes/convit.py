"""timm's ConViT layers, as they are.

Their positional logits are ``w_0 dx + w_1 dy + w_2 (dx^2 + dy^2) + b`` with (w_0, w_1, w_2) the rows of ``pos_proj``.
That is ``-alpha ||delta - Delta||^2`` up to a constant, with ``alpha = -w_2`` and ``Delta = -(w_1, w_0) / (2 w_2)``
(ConViT, Eqs. 5-7), and for any weights a sum over the two axes, so that it factorises as ours does.
"""

import math

import torch
from timm.models.convit import GPSA as ConViTLayer
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.positional import Axis
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


def _gated_attention(layer: ConViTLayer, x: Tensor) -> GatedAttention:
    """Attention for tokens ``x`` (B, N, C) on the square grid that the layer itself takes them to lie on."""
    batch, tokens, channels = x.shape
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ValueError(f"ConViT's positional attention needs a square grid of tokens, got {tokens} tokens")
    # Not layer.qk(x): hooks that others have on it would run twice.
    qk = (
        layer.qk.forward(x)
        .reshape(batch, tokens, 2, layer.num_heads, channels // layer.num_heads)
        .permute(2, 0, 3, 1, 4)
    )
    axis = Axis(side)
    weight = layer.pos_proj.weight.float() if layer.pos_proj.weight.dtype.itemsize < 4 else layer.pos_proj.weight
    offset = axis.key_positions(weight)[None, :] - axis.query_positions(weight)[:, None]

    def along(linear: Tensor) -> Tensor:
        return torch.softmax(linear[:, None, None] * offset + weight[:, 2, None, None] * offset**2, dim=-1)

    gate = torch.sigmoid(layer.gating_param)
    return GatedAttention(qk[0], qk[1], along(weight[:, 1]), along(weight[:, 0]), gate, axis, axis)


def _measure(layer: ConViTLayer, x: Tensor) -> dict[str, Tensor]:
    return gated_attention_statistics(_gated_attention(layer, x))


CONVIT = Probe("convit-gpsa", ConViTLayer, lambda layer: layer.num_heads, _state, _measure)
