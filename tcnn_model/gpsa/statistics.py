"""Exact statistics of exact attention, one block of queries at a time,
optionally in the pass that applies it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tcnn_model.gpsa.attention import GatedAttention
from tcnn_model.gpsa.blocks import blocks_of_queries
from tcnn_model.precision import at_least_float32, without_autocast

__all__ = ["AttentionStatistics", "apply_and_measure", "measure"]


@dataclass(frozen=True)
class AttentionStatistics:
    """Entropies, distances and sums of a gated attention, for every query.

    All are in float32, or in float64 if the attention is, and have no gradients. A is the whole
    attention, C its content part and P its positional part. A and P are distributions over the real
    pixels and the zero padding, C over real pixels only. Entropies are in nats, distances in input
    pixels of the layer.

    Args:
        log_sum_exp: Log-sum-exp over keys of the content logits q k^T / sqrt(d), shape (B, heads,
            N_query).
        entropy: -sum_j A_ij log A_ij, shape (B, heads, N_query).
        content_entropy: -sum_j C_ij log C_ij, shape (B, heads, N_query).
        positional_entropy: -sum_j P_ij log P_ij, which does not depend on the image, shape (heads,
            N_query).
        attention_distance: sum_j A_ij ||delta_ij||, ConViT's non-locality, shape (B, heads,
            N_query).
        received: sum_i A_ij, the attention that each real pixel receives, shape (B, heads, H * W).
        largest_logit: Largest content logit of each query, shape (B, heads, N_query); None if the
            Triton kernels computed the statistics.
        content_received: sum_i C_ij, shape (B, heads, H * W); None unless requested.
    """

    log_sum_exp: Tensor
    entropy: Tensor
    content_entropy: Tensor
    positional_entropy: Tensor
    attention_distance: Tensor
    received: Tensor
    largest_logit: Tensor | None = None
    content_received: Tensor | None = None


def measure(attention: GatedAttention, *, content_received: bool = False) -> AttentionStatistics:
    """Measure an attention without forming an N x N tensor.

    Args:
        attention: Attention of a batch of B images.
        content_received: Whether to compute the content attention that each pixel receives, too.
    """
    return _measure(attention, None, content_received)[1]


def apply_and_measure(
    attention: GatedAttention, values: Tensor
) -> tuple[Tensor, AttentionStatistics]:
    """Apply an attention to values and measure it, in one pass without gradients.

    Args:
        attention: Attention of a batch of B images.
        values: Values, shape (B, 1, H * W, C), shared by the heads, or (B, heads, H * W, C).

    Returns:
        The output, (B, heads, N_query, C), and the statistics.
    """
    output, statistics = _measure(attention, values)
    assert output is not None
    return output, statistics


@torch.no_grad()
def _measure(
    attention: GatedAttention, values: Tensor | None, content_received: bool = False
) -> tuple[Tensor | None, AttentionStatistics]:
    with without_autocast(attention.query):
        return _measure_in_blocks(attention, values, content_received)


def _measure_in_blocks(
    attention: GatedAttention, values: Tensor | None, content_received: bool
) -> tuple[Tensor | None, AttentionStatistics]:
    dtype = at_least_float32(attention.query.dtype)
    query = attention.query.to(dtype) * attention.scale
    key = attention.key.to(dtype)
    rows, cols = attention.factors()
    per_query = query.shape[:3]
    log_sum_exp, entropy, content_entropy, distance, largest_logit = (
        query.new_empty(per_query) for _ in range(5)
    )
    received = query.new_zeros(*per_query[:2], key.shape[2])
    content_sums = torch.zeros_like(received) if content_received else None
    output = None if values is None else values.new_empty(*per_query, values.shape[3])
    for block in blocks_of_queries(query, key):
        images, heads, queries = block
        if images.start == 0:
            position = _positional_block(attention, rows, cols, heads, queries, dtype)
        logits = query[block] @ key[images, heads].mT
        content = torch.softmax(logits, -1)
        # log C = logit - highest + log of the highest C, so the log-sum-exp needs no second pass
        # over the logits.
        highest = logits.amax(-1, keepdim=True)
        log_largest = content.amax(-1).log()
        largest_logit[block] = highest[..., 0]
        log_sum_exp[block] = highest[..., 0] - log_largest
        content_entropy[block] = -log_largest - content.mul(logits.sub_(highest)).sum(-1)
        if content_sums is not None:
            content_sums[images, heads] += content.sum(2)
        # C is not needed any more, so it can be overwritten.
        mixed = content.lerp_(position.attention, position.gate)
        if output is not None and values is not None:
            value_heads = heads if values.shape[1] > 1 else slice(None)
            output[block] = mixed.to(values.dtype) @ values[images, value_heads]
        # Entropies and distances are sums over real pixels and over the padding, whose part is the
        # same for all images.
        entropy[block] = _entropy(mixed) + position.entropy_on_padding
        distance[block] = (mixed * position.distance).sum(-1) + position.distance_on_padding
        received[images, heads] += mixed.sum(2)
    # The entropy of a product distribution is the sum of the entropies of its factors.
    along_y = _entropy(rows).to(dtype)[:, :, None]
    along_x = _entropy(cols).to(dtype)[:, None, :]
    statistics = AttentionStatistics(
        log_sum_exp=log_sum_exp,
        entropy=entropy,
        content_entropy=content_entropy,
        positional_entropy=(along_y + along_x).flatten(1),
        attention_distance=distance,
        received=received,
        largest_logit=largest_logit,
        content_received=content_sums,
    )
    return output, statistics


@dataclass(frozen=True)
class _PositionalBlock:
    """Positional attention of a block of queries, the same for all images."""

    attention: Tensor  # P at the real pixels, (heads, queries, H * W)
    distance: Tensor  # distance from each query to each real pixel, (queries, H * W)
    entropy_on_padding: Tensor  # contribution of the padding, (heads, queries)
    distance_on_padding: Tensor
    gate: Tensor  # (heads, 1, 1)


def _positional_block(
    attention: GatedAttention,
    rows: Tensor,
    cols: Tensor,
    heads: slice,
    queries: slice,
    dtype: torch.dtype,
) -> _PositionalBlock:
    y, x = attention.y, attention.x
    gate = attention.gate[heads, None, None].to(dtype)
    index = torch.arange(y.queries * x.queries, device=rows.device)[queries]
    row = index // x.queries
    col = index % x.queries
    # (heads, queries, y.keys, x.keys), with the padding.
    along_y = rows[heads][:, row, :, None]
    along_x = cols[heads][:, col, None, :]
    extended = (along_y * along_x).to(dtype)
    offset_y = y.key_positions(rows) - y.query_positions(rows)[row, None]
    offset_x = x.key_positions(cols) - x.query_positions(cols)[col, None]
    lengths = torch.hypot(offset_y[:, :, None], offset_x[:, None, :])
    distance = lengths.to(dtype)
    real = (
        ...,
        slice(y.before, y.before + y.length),
        slice(x.before, x.before + x.length),
    )
    # On the padding A = gate * P, because content attention is zero there.
    on_padding = gate[..., None] * extended
    on_padding[real] = 0
    return _PositionalBlock(
        attention=extended[real].flatten(2),
        distance=distance[real].flatten(1),
        entropy_on_padding=_entropy(on_padding.flatten(2)),
        distance_on_padding=(on_padding * distance).sum((2, 3)),
        gate=gate,
    )


def _entropy(attention: Tensor) -> Tensor:
    """Return -sum A log A over the last dimension, with 0 log 0 = 0."""
    # This is several times faster than torch.special.entr. Zeros are replaced by the smallest
    # normal number in the logarithm, which would not be finite otherwise.
    return -attention.clamp_min(torch.finfo(attention.dtype).tiny).log_().mul_(attention).sum(-1)
