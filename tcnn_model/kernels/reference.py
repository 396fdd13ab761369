"""The functions of the kernels in dense PyTorch, with the same signatures.

They are meant to be read beside the derivation, and to test the kernels against. Everything is
computed in the dtype of sums (float32, or float64 for float64), with N x N tensors.
"""

import math

import torch
from torch import Tensor

from tcnn_model.kernels.grid import Grid, Line
from tcnn_model.kernels.softmax import RowStatistics, TokenGrid
from tcnn_model.precision import at_least_float32

__all__ = [
    "attention_statistics",
    "backward_keys",
    "backward_queries",
    "backward_values",
    "content_normaliser",
    "mix",
    "padding_statistics",
    "positional_table",
]

_LOG2E = 1 / math.log(2)


def _line(curvature: Tensor, slope: Tensor, line: Line) -> tuple[Tensor, ...]:
    """Measure positional attention along an axis.

    Returns:
        Reference, slope at the reference, log2 normaliser, E[t], Var[t], reference - query and
        entropy, each of shape (heads, queries).
    """
    query = line.query_positions(curvature.device)
    key = line.key_positions(curvature.device)
    delta = key - query[:, None]
    curvature = curvature[:, None, None]
    slope = slope[:, None, None]
    logits = delta * (curvature * delta + slope)
    reference = key[logits.argmax(-1)]
    offset = reference - query

    # The same logits for keys t pixels from the reference, relative to the logit there.
    slope = (2 * curvature * offset[..., None] + slope).squeeze(-1)
    t = key - reference[..., None]
    logits = t * (curvature * t + slope[..., None])
    # Converted to nats and back, because torch has no logsumexp to base 2.
    normaliser = torch.logsumexp(logits / _LOG2E, -1) * _LOG2E
    p = torch.exp2(logits - normaliser[..., None])

    # Statistics of P along the axis.
    entropy = normaliser - (p * logits).sum(-1)
    mean = (p * t).sum(-1)
    u = t - mean[..., None]
    variance = (p * u**2).sum(-1)
    return reference, slope, normaliser, mean, variance, offset, entropy


def positional_table(position: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Return the table of positional attention,
    shape (heads, 12, N_q), rows as named in tiles.py.
    """
    curvature, slope_y, slope_x = (position.double() * _LOG2E).unbind(-1)
    shape = (len(position), grid.y.queries, grid.x.queries)
    along_y = _line(curvature, slope_y, grid.y)
    along_x = _line(curvature, slope_x, grid.x)
    y = [column[:, :, None].expand(shape) for column in along_y]
    x = [column[:, None, :].expand(shape) for column in along_x]
    reference_y, steepness_y, normaliser_y, mean_y, variance_y, offset_y, entropy_y = y
    reference_x, steepness_x, normaliser_x, mean_x, variance_x, offset_x, entropy_x = x
    rows = [
        reference_y,
        reference_x,
        steepness_y,
        steepness_x,
        curvature[:, None, None].expand(shape),
        -normaliser_y - normaliser_x,
        mean_y,
        mean_x,
        variance_y + variance_x,
        offset_y,
        offset_x,
        entropy_y + entropy_x,
    ]
    return torch.stack(rows, 1).flatten(2).to(dtype)


def _keys(grid: Grid, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels y and x of the keys of the extended grid,
    row-major, and a mask of the real ones.
    """
    rows, cols = (line.key_positions(like.device).to(like.dtype) for line in grid)
    y = rows.repeat_interleave(len(cols))
    x = cols.repeat(len(rows))
    in_rows = (y >= 0) & (y < grid.y.length)
    in_columns = (x >= 0) & (x < grid.x.length)
    return y, x, in_rows & in_columns


def _positional(table: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return positional attention to the keys at (y, x),
    and t_y, t_x from the reference, (heads, N_q, keys) each.
    """
    columns = table[:, :6, :, None].unbind(1)
    reference_y, reference_x, slope_y, slope_x, curvature, normaliser = columns
    ty = y - reference_y
    tx = x - reference_x
    along_y = ty * (curvature * ty + slope_y)
    along_x = tx * (curvature * tx + slope_x)
    return torch.exp2(along_y + (along_x + normaliser)), ty, tx


def _measure(attention: Tensor, ty: Tensor, tx: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the contribution of keys to entropy and attention distance."""
    offset_y, offset_x = table[:, 9:11, :, None].unbind(1)
    distance = torch.hypot(ty + offset_y, tx + offset_x)
    entropy = -torch.xlogy(attention, attention).sum(-1)
    mean_distance = (attention * distance).sum(-1)
    return entropy, mean_distance


def padding_statistics(gate: Tensor, table: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the entropy (nats) and attention distance on the padding, (heads, N_q) each."""
    y, x, real = _keys(grid, table)
    p, ty, tx = _positional(table, y[~real], x[~real])
    share = gate[:, None, None].to(p.dtype)
    return _measure(share * p, ty, tx, table)


def _logits(q: Tensor, k: Tensor) -> Tensor:
    dtype = at_least_float32(q.dtype)
    # Logits are to base 2, because GPUs compute exponentials to base 2.
    scale = q.shape[-1] ** -0.5 * _LOG2E
    return q.to(dtype) @ k.to(dtype).mT * scale


def content_normaliser(
    q: Tensor, k: Tensor, *, statistics: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the highest logit and sum of 2^(logit - highest),
    (2, B, heads, N_q); and the entropy, (B, heads, N_q).
    """
    logits = _logits(q, k)
    highest = logits.amax(-1)
    total = torch.exp2(logits - highest[..., None]).sum(-1)
    normaliser = torch.stack((highest, total))
    if not statistics:
        return normaliser, None
    content = _content(q, k, normaliser)
    return normaliser, -torch.xlogy(content, content).sum(-1)


def _content(q: Tensor, k: Tensor, normaliser: Tensor) -> Tensor:
    highest, total = normaliser[..., None]
    return torch.exp2(_logits(q, k) - highest) / total


def _attention(
    q: Tensor, k: Tensor, normaliser: Tensor, gate: Tensor, table: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return A, C (B, heads, N_q, N_k); P, t_y, t_x (heads, N_q, N_k); all on real keys."""
    y, x, real = _keys(grid, table)
    p, ty, tx = _positional(table, y[real], x[real])
    c = _content(q, k, normaliser)
    # 1 - gate is computed in the gate's dtype, because a narrower one would lose its precision for
    # gates near 1.
    position_share = gate[:, None, None]
    content_share = 1 - position_share
    # Eq. (7).
    content_part = content_share.to(c.dtype) * c
    a = content_part + position_share.to(c.dtype) * p
    return a, c, p, ty, tx


def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    table: Tensor,
    grid: Grid,
    *,
    statistics: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Return the output (B, heads, N_q, C) and,
    with ``statistics``, entropy, distance and received.
    """
    a, _, _, ty, tx = _attention(q, k, normaliser, gate, table, grid)
    out = (a @ v.to(a.dtype)).to(v.dtype)
    if not statistics:
        return out, None
    entropy, distance = _measure(a, ty, tx, table)
    padding_entropy, padding_distance = padding_statistics(gate, table, grid)
    entropy = entropy + padding_entropy
    distance = distance + padding_distance
    received = a.sum(-2)
    return out, (entropy, distance, received)


def backward_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    table: Tensor,
    grid: Grid,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, position (heads, 3) and gate (heads,),
    and the mean of dA under C, (B, heads, N_q).
    """
    _, c, p, ty, tx = _attention(q, k, normaliser, gate, table, grid)
    # O = A v.
    da = grad.to(c.dtype) @ v.to(c.dtype).mT
    # C = softmax(s): dS = C (dA - sum_j C_j dA_j), up to the factor of content logits.
    mean = (c * da).sum(-1)
    ds = c * (da - mean[..., None])
    content_scale = _content_scale(q, gate, c.dtype)
    dq = content_scale * ds @ k.to(c.dtype)

    # P is a softmax of logits linear in position, so the gradient is the covariance under P of dA
    # with |delta|^2, delta_y and delta_x.
    mean_y, mean_x, variance, offset_y, offset_x = table[:, 6:11].unbind(1)
    uy = ty - mean_y[..., None]
    ux = tx - mean_x[..., None]
    weighted = p * da
    mass = weighted.sum(-1)
    cov_y = (weighted * uy).sum(-1)
    cov_x = (weighted * ux).sum(-1)
    centred = uy**2 + ux**2 - variance[..., None]
    # position multiplies |delta|^2, and delta = u + E[t] + offset.
    from_y = (offset_y + mean_y) * cov_y
    from_x = (offset_x + mean_x) * cov_x
    cov_square = (weighted * centred).sum(-1) + 2 * (from_y + from_x)
    by_query = torch.stack((cov_square, cov_y, cov_x), -1)
    sums = by_query.sum((0, 2), dtype=torch.float64)
    d_position = gate.double()[:, None] * sums
    d_gate = (mass - mean).sum((0, 2), dtype=torch.float64)
    return dq.to(q.dtype), d_position, d_gate, mean


def backward_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    grad: Tensor,
    content_mean: Tensor,
) -> Tensor:
    """Return the gradient of k, shape (B, heads, N_k, d)."""
    c = _content(q, k, normaliser)
    da = grad.to(c.dtype) @ v.to(c.dtype).mT
    ds = c * (da - content_mean[..., None])
    content_scale = _content_scale(q, gate, c.dtype)
    dk = content_scale * ds.mT @ q.to(c.dtype)
    return dk.to(k.dtype)


def _content_scale(q: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of content logits in the output,
    (1 - gate) / sqrt(d), shape (heads, 1, 1).
    """
    content_share = (1 - gate).to(dtype)[:, None, None]
    return content_share * q.shape[-1] ** -0.5


def backward_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    table: Tensor,
    grid: Grid,
    grad: Tensor,
) -> Tensor:
    """Return the gradient of v, in the shape of v: a sum over heads if they share the values."""
    a, *_ = _attention(q, k, normaliser, gate, table, grid)
    dv = a.mT @ grad.to(a.dtype)
    return dv.sum_to_size(v.shape).to(v.dtype)


def attention_statistics(
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    queries: TokenGrid | None = None,
    keys: TokenGrid | None = None,
    received: bool = False,
) -> RowStatistics:
    """Measure softmax attention as ``row_statistics.attention_statistics`` does."""
    dtype = at_least_float32(q.dtype)
    s = scale * q.to(dtype) @ k.to(dtype).mT
    if mask is not None and mask.dtype == torch.bool:
        s = s.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        s = s + mask.to(dtype)
    largest = s.amax(-1)
    hidden = largest == -torch.inf
    # Logits are relative to the largest, or to 0 if all keys are hidden.
    s = s - largest.masked_fill(hidden, 0)[..., None]
    log_sum_exp = s.logsumexp(-1).masked_fill(hidden, 0)
    a = torch.exp(s - log_sum_exp[..., None])
    # 0 times the -inf of a hidden key would be NaN.
    expected_logit = torch.where(a > 0, a * s, 0).sum(-1)
    prefix = keys.prefix if keys is not None else 0
    distance = None
    if queries is not None and keys is not None:
        query_y, query_x = queries.positions(q.shape[2], dtype, q.device)
        key_y, key_x = keys.positions(k.shape[2], dtype, q.device)
        dy = key_y - query_y[:, None]
        dx = key_x - query_x[:, None]
        lengths = torch.hypot(dy, dx)[:, prefix:]
        grid_logits = s[..., prefix:]
        # A query that sees no patch has a softmax of NaN.
        hidden_grid = grid_logits.amax(-1, keepdim=True) == -torch.inf
        over_grid = grid_logits.softmax(-1).masked_fill(hidden_grid, 0)
        distance = (over_grid * lengths).sum(-1)
    return RowStatistics(
        largest=largest,
        log_sum_exp=log_sum_exp,
        expected_logit=expected_logit,
        prefix=a[..., :prefix].sum(-1),
        distance=distance,
        received=a.sum(-2) if received else None,
    )
