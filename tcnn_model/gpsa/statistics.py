"""Exact statistics of exact attention, one block of queries at a time, in the pass that applies it if asked for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tcnn_model.gpsa.attention import GatedAttention
from tcnn_model.gpsa.blocks import blocks_of_queries
from tcnn_model.gpsa.precision import at_least_float32, without_autocast

__all__ = ["AttentionStatistics", "apply_and_measure", "measure"]


@dataclass(frozen=True)
class AttentionStatistics:
    """Entropies, distances and sums of a gated attention, for every query.

    In float32, or float64 where the attention is in float64, and without gradients.
    A is the whole attention, C its content and P its positional part. A and P are distributions over the real pixels
    and the zero padding, C over real pixels only. Entropies are in nats, distances in input pixels of the layer.

    Args:
        log_sum_exp: of the content logits q k^T / sqrt(d), shape (B, heads, N_query).
        entropy: -sum_j A_ij log A_ij, shape (B, heads, N_query).
        content_entropy: the same of C, shape (B, heads, N_query).
        positional_entropy: the same of P, which no image changes, shape (heads, N_query).
        attention_distance: sum_j A_ij ||delta_ij||, ConViT's non-locality, shape (B, heads, N_query).
        received: sum_i A_ij, how much each real pixel is looked at, shape (B, heads, H * W).
    """

    log_sum_exp: Tensor
    entropy: Tensor
    content_entropy: Tensor
    positional_entropy: Tensor
    attention_distance: Tensor
    received: Tensor


def measure(attention: GatedAttention) -> AttentionStatistics:
    """Statistics of an attention, without an N x N tensor."""
    return _measure(attention, None)[1]


def apply_and_measure(attention: GatedAttention, values: Tensor) -> tuple[Tensor, AttentionStatistics]:
    """The attention times the values, and its statistics, in one pass without gradients.

    Args:
        attention: of a batch of B images.
        values: shape (B, 1, H * W, C), shared by the heads, or (B, heads, H * W, C).

    Returns:
        the output, (B, heads, N_query, C), and the statistics.
    """
    output, statistics = _measure(attention, values)
    assert output is not None
    return output, statistics


@torch.no_grad()
def _measure(attention: GatedAttention, values: Tensor | None) -> tuple[Tensor | None, AttentionStatistics]:
    with without_autocast(attention.query):
        return _in_blocks(attention, values)


def _in_blocks(attention: GatedAttention, values: Tensor | None) -> tuple[Tensor | None, AttentionStatistics]:
    wide = at_least_float32(attention.query.dtype)
    query, key = attention.query.to(wide) * attention.scale, attention.key.to(wide)
    rows, cols = attention.factors()
    batch, heads, queries, _ = query.shape
    results = {name: query.new_empty(batch, heads, queries) for name in ("lse", "entropy", "content", "distance")}
    received = query.new_zeros(batch, heads, key.shape[2])
    output = None if values is None else values.new_empty(batch, heads, queries, values.shape[3])
    for at in blocks_of_queries(query, key):
        image, which, block = at
        if image == 0:  # the same for all images
            positions = _positional_block(attention, rows, cols, which, block, wide)
        logits = query[at] @ key[image, which].transpose(1, 2)
        content = torch.softmax(logits, -1)
        top, log_share = logits.amax(-1, keepdim=True), content.amax(-1).log()  # of the key most attended to
        results["lse"][at] = top[..., 0] - log_share
        # -sum C log C with log C = (logits - top) + log_share
        results["content"][at] = -log_share - content.mul(logits.sub_(top)).sum(-1)
        mixed = content.lerp_(positions.positional, positions.gate)
        if output is not None and values is not None:
            output[at] = mixed.to(values.dtype) @ values[image, which if values.shape[1] > 1 else slice(None)]
        results["entropy"][at] = _entropy(mixed) + positions.entropy_on_padding
        results["distance"][at] = (mixed * positions.distance).sum(-1) + positions.distance_on_padding
        received[image, which] += mixed.sum(1)
    along_y, along_x = _entropy(rows).to(wide), _entropy(cols).to(wide)  # the entropy of a product is the sum of theirs
    statistics = AttentionStatistics(
        log_sum_exp=results["lse"],
        entropy=results["entropy"],
        content_entropy=results["content"],
        positional_entropy=(along_y[:, :, None] + along_x[:, None, :]).flatten(1),
        attention_distance=results["distance"],
        received=received,
    )
    return output, statistics


@dataclass(frozen=True)
class _PositionalBlock:
    """Positional attention of a block of queries: the same for all images."""

    positional: Tensor  # P at the real pixels, (heads, queries, H * W)
    distance: Tensor  # from each query to each real pixel, (queries, H * W)
    entropy_on_padding: Tensor  # what the padding contributes, (heads, queries)
    distance_on_padding: Tensor
    gate: Tensor  # (heads, 1, 1)


def _positional_block(
    attention: GatedAttention, rows: Tensor, cols: Tensor, heads: slice, queries: slice, dtype: torch.dtype
) -> _PositionalBlock:
    y, x, gate = attention.y, attention.x, attention.gate[heads, None, None].to(dtype)
    index = torch.arange(y.queries * x.queries, device=rows.device)[queries]
    at_row, at_col = index // x.queries, index % x.queries
    positional = (rows[heads][:, at_row, :, None] * cols[heads][:, at_col, None, :]).to(dtype)  # with padding
    offset_y = y.key_positions(rows) - y.query_positions(rows)[at_row, None]
    offset_x = x.key_positions(cols) - x.query_positions(cols)[at_col, None]
    distance = torch.hypot(offset_y[:, :, None], offset_x[:, None, :]).to(dtype)
    real = (..., slice(y.before, y.before + y.length), slice(x.before, x.before + x.length))
    beyond = gate[..., None] * positional
    beyond[real] = 0
    return _PositionalBlock(
        positional=positional[real].flatten(2),
        distance=distance[real].flatten(1),
        entropy_on_padding=_entropy(beyond.flatten(2)),
        distance_on_padding=(beyond * distance).sum((2, 3)),
        gate=gate,
    )


def _entropy(attention: Tensor) -> Tensor:
    """-sum A log A over the last dimension, with 0 log 0 = 0: several times faster than torch.special.entr."""
    return -attention.clamp_min(torch.finfo(attention.dtype).tiny).log_().mul_(attention).sum(-1)
