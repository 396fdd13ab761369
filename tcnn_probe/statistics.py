"""Statistics of attention per image and head: plain tensors in, plain tensors out."""

import torch
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.statistics import measure

__all__ = ["gated_attention_statistics"]


@torch.no_grad()
def gated_attention_statistics(attention: GatedAttention) -> dict[str, Tensor]:
    """Entropies and mean distance of gated positional attention, exact, without an N x N tensor for large N.

    Means over the queries of each image of what :class:`~tcnn_model.AttentionStatistics` defines: ``entropy``,
    ``content_entropy``, ``positional_entropy`` (in nats) and ``attention_distance`` (in input pixels of the layer).

    Args:
        attention: of a batch of B images.

    Returns:
        for each name, the mean over queries for every image and head, shape (B, heads), in float32 (float64 if the
        attention is in float64).
    """
    measured = measure(attention)
    means = {
        name: getattr(measured, name).mean(-1)
        for name in ("entropy", "content_entropy", "positional_entropy", "attention_distance")
    }
    means["positional_entropy"] = means["positional_entropy"].expand_as(means["entropy"])
    return means
