"""Statistics of softmax attention from torch's fused attention,
without a custom kernel and without an N x N tensor.

Fused attention gives sum_j A_ij V_j for any V, and the log-sum-exp of each row. This suffices for

- the entropy H_i = lse_i - scale q_i . (A K)_i, with V = K;
- the marginals of A over the rows and columns of the grid, with one-hot V, and therefore the
  distances that are sums over the axes: the squared and the Manhattan distance;
- the attention that each key receives, with queries and keys exchanged and -lse_i as an additional
  channel.

It does not suffice for attention with an additive bias, the Euclidean distance or the largest
logit. The functions run wherever torch has a fused attention, and are an independent check of the
kernel.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnn_model.kernels.softmax import TokenGrid
from tcnn_model.precision import at_least_float32

__all__ = ["FusedStatistics", "fused_statistics"]

# Every fused attention takes heads whose number of channels is a multiple of this.
_CHANNELS = 8


class FusedStatistics(NamedTuple):
    """Statistics of softmax attention A, in float32,
    or float64 for float64, shape (rows, heads, N_query) each.

    Args:
        log_sum_exp: log sum_j exp(s_ij).
        entropy: -sum_j A_ij log A_ij in nats.
        prefix: Sum of A_ij over the class and register tokens.
        squared_distance: Mean of the squared distance to the keys on the grid, weighted by A
            renormalised over them.
        manhattan_distance: Mean of |dy| + |dx| with the same weights.
        received: sum_i A_ij, shape (rows, heads, N_key).
    """

    log_sum_exp: Tensor
    entropy: Tensor
    prefix: Tensor
    squared_distance: Tensor
    manhattan_distance: Tensor
    received: Tensor


def fused_statistics(
    q: Tensor, k: Tensor, scale: float, *, queries: TokenGrid, keys: TokenGrid
) -> FusedStatistics:
    """Measure softmax attention with logits ``scale * q k^T``.

    The fused kernels round A to the dtype of the queries. In half precision, the rounding errors of
    entropy and distances are therefore far above that of the log-sum-exp.

    Args:
        q: Queries, shape (rows, heads, N_query, d).
        k: Keys, shape (rows, heads, N_key, d).
        scale: Factor of the products.
        queries, keys: Positions of the tokens.
    """
    dtype = at_least_float32(q.dtype)
    wide_q = q.to(dtype)
    wide_k = k.to(dtype)
    # Subtracting the mean key from all keys does not change A, and then H is not a difference of
    # large numbers.
    common = wide_k.mean(-2, keepdim=True)
    centred = (wide_k - common).to(k.dtype)

    # Values whose sums weighted by A are the mean key and the attention to each row, each column
    # and the prefix.
    rows, columns, before = _one_hot(keys, k)
    places = (rows, columns, before)
    by_head = [place.expand(*k.shape[:3], -1) for place in places]
    values = [centred, *by_head]
    widths = [value.shape[-1] for value in values]
    output, lse = _attend(q, centred, torch.cat(values, -1), scale)
    mean_key, by_row, by_column, by_token = output.to(dtype).split(widths, -1)
    # H = lse - E[s].
    expected_logit = scale * (wide_q * mean_key).sum(-1)
    entropy = lse - expected_logit

    # Distances from each query to the rows and the columns of the grid.
    query_y, query_x = queries.positions(q.shape[2], dtype, q.device)
    row_y = _axis(rows.shape[-1], keys, 0, dtype, q.device)
    column_x = _axis(columns.shape[-1], keys, 1, dtype, q.device)
    dy = row_y - query_y[:, None]
    dx = column_x - query_x[:, None]
    on_grid = by_row.sum(-1)
    squared_y = (by_row * dy.square()).sum(-1)
    squared_x = (by_column * dx.square()).sum(-1)
    absolute_y = (by_row * dy.abs()).sum(-1)
    absolute_x = (by_column * dx.abs()).sum(-1)

    # Queries and keys exchange their roles: the softmax over queries of s_ij - lse_i has the
    # normaliser sum_i A_ij.
    unit = torch.ones_like(wide_k[..., :1])
    keys_as_queries = torch.cat([wide_k, unit], -1)
    common_logit = scale * (wide_q * common).sum(-1)
    whole_lse = lse + common_logit
    # The products of the additional channel are multiplied by the scale, too, so the offsets are
    # divided by it.
    offsets = -whole_lse[..., None] / scale
    queries_as_keys = torch.cat([wide_q, offsets], -1)
    _, log_received = _attend(keys_as_queries, queries_as_keys, queries_as_keys[..., :1], scale)
    return FusedStatistics(
        log_sum_exp=whole_lse,
        entropy=entropy,
        prefix=by_token.sum(-1),
        squared_distance=(squared_y + squared_x) / on_grid,
        manhattan_distance=(absolute_y + absolute_x) / on_grid,
        received=log_received.exp(),
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return A v and the log-sum-exp of the rows of A.

    Some fused kernels need as many channels in v as in q and k, so v is split into parts of this
    width.
    """
    dim = q.shape[-1]
    padding = -dim % _CHANNELS
    width = dim + padding
    # Zero channels do not change the logits.
    q = F.pad(q, (0, padding))
    k = F.pad(k, (0, padding))
    parts = []
    for part in v.split(width, -1):
        padded = F.pad(part, (0, width - part.shape[-1]))
        if q.device.type == "cpu":
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, padded, scale=scale
            )
        else:
            # This branch was not run on a GPU yet. Its log-sum-exp is padded to whole blocks of
            # queries.
            output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, padded, None, True, scale=scale
            )
            lse = lse[..., : q.shape[2]]
        parts.append(output[..., : part.shape[-1]])
    return torch.cat(parts, -1), lse


def _one_hot(tokens: TokenGrid, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return one-hot rows and columns of the keys,
    and whether keys are before the grid: (N_key, n) each, 0 or 1.
    """
    index = torch.arange(like.shape[2], device=like.device)
    cell = index[tokens.prefix :] - tokens.prefix
    # Class and register tokens have no row and no column.
    prefix = (0, 0, tokens.prefix, 0)
    rows = F.pad(F.one_hot(cell // tokens.width), prefix).to(like.dtype)
    columns = F.pad(F.one_hot(cell % tokens.width), prefix).to(like.dtype)
    before = (index < tokens.prefix).to(like.dtype)
    return rows, columns, before[:, None]


def _axis(
    count: int, tokens: TokenGrid, axis: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the positions of the rows (axis 0) or columns (axis 1) of a grid."""
    index = torch.arange(count, dtype=dtype, device=device)
    return index * tokens.spacing[axis] + tokens.origin[axis]
