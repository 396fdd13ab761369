"""Statistics of softmax attention computed only with torch's fused attention, without an N x N tensor.

Fused attention gives sum_j A_ij V_j for any V, and the log-sum-exp of each row. So

- with V = K, the entropy H_i = lse_i - scale q_i . (A K)_i;
- with the rows and columns of the grid as one-hot V, the marginals of A over the grid, from which distances follow that
  are sums over the axes: squared and Manhattan distance;
- with queries and keys exchanged, and -lse_i as a further channel, what each key receives.

Not to be had so: attention with an additive bias, the Euclidean distance, the largest logit. It runs wherever torch has
a fused attention, and checks the kernel independently.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnn_model.kernels.softmax import TokenGrid
from tcnn_model.precision import at_least_float32

__all__ = ["FusedStatistics", "fused_statistics"]

# The number of channels of a head must be a multiple of this for any fused attention.
_CHANNELS = 8


class FusedStatistics(NamedTuple):
    """Statistics of softmax attention A, in float32, or float64 for float64, shape (rows, heads, N_query) each.

    Args:
        log_sum_exp: log sum_j exp(s_ij).
        entropy: -sum_j A_ij log A_ij in nats.
        prefix: Sum of A_ij over the class and register tokens.
        squared_distance: Mean of the squared distance to the keys on the grid, weighted by A, renormalised over these.
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

    Entropy and distances have the rounding of A in the dtype of the queries, as the fused kernels round it: in
    half precision it is far above that of the log-sum-exp.

    Args:
        q: Queries, shape (rows, heads, N_query, d).
        k: Keys, shape (rows, heads, N_key, d).
        scale: Factor of the products.
        queries, keys: Places of the tokens.
    """
    dtype = at_least_float32(q.dtype)
    wide_q = q.to(dtype)
    wide_k = k.to(dtype)
    # Subtracting the mean key changes no attention, but H is then no longer a difference of large numbers.
    common = wide_k.mean(-2, keepdim=True)
    centred = (wide_k - common).to(k.dtype)

    # Values whose weighted sums are the mean key, and the attention to each row, to each column and before the grid.
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

    # Keys ask queries: the softmax over queries of s_ij - lse_i has sum_i A_ij for its normaliser.
    unit = torch.ones_like(wide_k[..., :1])
    asking = torch.cat([wide_k, unit], -1)
    common_logit = scale * (wide_q * common).sum(-1)
    whole_lse = lse + common_logit
    # The further channel is multiplied by the scale as the others are.
    offsets = -whole_lse[..., None] / scale
    answering = torch.cat([wide_q, offsets], -1)
    _, log_received = _attend(asking, answering, answering[..., :1], scale)
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

    Fused kernels want as many channels of v as of q and k: v goes through in parts of this width.
    """
    dim = q.shape[-1]
    further = -dim % _CHANNELS
    width = dim + further
    # Channels of zeros change no logit.
    q = F.pad(q, (0, further))
    k = F.pad(k, (0, further))
    parts = []
    for part in v.split(width, -1):
        padded = F.pad(part, (0, width - part.shape[-1]))
        if q.device.type == "cpu":
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, padded, scale=scale
            )
        else:
            # Not run on a GPU yet. Its log-sum-exp is padded to whole blocks of queries.
            output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, padded, None, True, scale=scale
            )
            lse = lse[..., : q.shape[2]]
        parts.append(output[..., : part.shape[-1]])
    return torch.cat(parts, -1), lse


def _one_hot(tokens: TokenGrid, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether each key lies in each row, in each column, and before the grid: (N_key, n) each, 0 or 1."""
    index = torch.arange(like.shape[2], device=like.device)
    cell = index[tokens.prefix :] - tokens.prefix
    # Class and register tokens lie in no row and no column.
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
