"""Gated positional self-attention of our own layers, and of timm's ConViT as it is."""

from timm.models.convit import GPSA as ConViTLayer
from torch import Tensor

from tcnn_model import GPSA as GPSALayer
from tcnn_model import GatedAttention
from tcnn_model.gpsa.convit import convit_attention

__all__ = ["GATED_LAYERS", "gated_attention", "gated_values"]

GATED_LAYERS = (GPSALayer, ConViTLayer)


def gated_attention(layer: GPSALayer | ConViTLayer, x: Tensor) -> GatedAttention:
    """The attention of a layer, given its input."""
    if isinstance(layer, GPSALayer):
        return layer.gated_attention(x)
    return convit_attention(layer, layer.qk.forward(x))  # not layer.qk(x): hooks that others have on it would run twice


def gated_values(layer: GPSALayer | ConViTLayer, x: Tensor) -> Tensor:
    """Its values, shape (B, heads or 1, N_key, d)."""
    if isinstance(layer, GPSALayer):
        return layer.values(x)
    return layer.v.forward(x).unflatten(2, (layer.num_heads, -1)).transpose(1, 2)
