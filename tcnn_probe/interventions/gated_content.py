"""The content part of gated layers, our GPSA and timm's ConViT: read, and exchanged for a given one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tcnn_model.gpsa.positional import apply_separable
from tcnn_model.gpsa.precision import without_autocast
from tcnn_probe.attention.gated import gated_attention, gated_values
from tcnn_probe.hooks.edits import edited
from tcnn_probe.interventions.given_attention import weigh

__all__ = ["content_of", "with_content"]


def content_of(layer: nn.Module, x: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) of a layer for an input: shape (B, heads, N_query, H * W)."""
    with edited(layer):
        return gated_attention(layer, x).content()


def with_content(layer: nn.Module, x: Tensor, heads: Sequence[int], content: Callable[[int], Tensor]) -> Tensor:
    """Outputs of some heads, ((1 - g) C + g P) v of Eq. (7) with a given C; gates as other ablations have them.

    Args:
        layer: a gated layer.
        x: its input, of B images.
        heads: indices.
        content: gives C for so many keys, shape (B or 1, 1, len(heads), N_query, H * W).

    Returns:
        shape (B, len(heads), N_query, d).
    """
    which = list(heads)
    with edited(layer):
        attention, values = gated_attention(layer, x), gated_values(layer, x)
        values = values if values.shape[1] == 1 else values[:, which]
        with without_autocast(values):
            rows, cols = (factor[which] for factor in attention.factors_on_pixels(values.dtype))
            on_grid = values.unflatten(2, (attention.y.length, attention.x.length))
            positional = apply_separable(rows, cols, on_grid).flatten(2, 3)
            given = weigh(content(attention.key.shape[2]), values)
            return torch.lerp(given, positional, attention.gate[which, None, None].to(values.dtype))
