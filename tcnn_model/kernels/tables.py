"""Table of the positional attention of each query, and its statistics on the padding (Triton).

Neither depends on the image. ``reference.py`` has the same functions in PyTorch.
"""

# ruff: noqa: N803 (Triton's compile-time constants are upper case)
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcnn_model.kernels import launch
from tcnn_model.kernels.grid import Grid
from tcnn_model.kernels.tiles import (
    CURVATURE,
    ENTROPY,
    LOG2E,
    MEAN_X,
    MEAN_Y,
    NORMALISER,
    OFFSET_X,
    OFFSET_Y,
    REFERENCE_X,
    REFERENCE_Y,
    SLOPE_X,
    SLOPE_Y,
    TABLE,
    VARIANCE,
    key_pixels,
    log2_of,
    position_logits,
    query_tables,
)

__all__ = ["padding_statistics", "positional_table"]

_QUERIES = 32  # per program
_KEYS = 32  # at a time


@triton.jit
def _line(
    curvature, slope, query,
    before, keys,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Measure an axis in float64: reference pixel, its slope,
    log2 normaliser, mean and variance of t, entropy.
    """
    # The reference is the key with the highest logit. Logits relative to it have no exponential
    # that overflows.
    best = tl.full((QUERIES,), float("-inf"), tl.float64)
    reference = tl.zeros((QUERIES,), tl.float64)
    for start in range(0, keys, KEYS):
        n = tl.minimum(start + tl.arange(0, KEYS), keys - 1)
        key = (n - before).to(tl.float64)
        delta = key[None, :] - query[:, None]
        logit = delta * (curvature * delta + slope)
        highest = tl.max(logit, 1)
        # Of several keys with the highest logit the first is taken, as by torch.argmax.
        is_highest = logit == highest[:, None]
        first_key = tl.min(tl.where(is_highest, key[None, :], float("inf")), 1)
        reference = tl.where(highest > best, first_key, reference)
        best = tl.maximum(best, highest)
    reference_slope = 2 * curvature * (reference - query) + slope
    # Sums over the keys of 2^logit, and of 2^logit times t, t^2 and the logit.
    total = tl.zeros((QUERIES,), tl.float64)
    first = tl.zeros((QUERIES,), tl.float64)
    second = tl.zeros((QUERIES,), tl.float64)
    logits = tl.zeros((QUERIES,), tl.float64)
    for start in range(0, keys, KEYS):
        n = start + tl.arange(0, KEYS)
        key = (n - before).to(tl.float64)
        t = key[None, :] - reference[:, None]
        logit = t * (curvature * t + reference_slope[:, None])
        logit = tl.where((n < keys)[None, :], logit, -1e9)
        weight = tl.exp2(logit)
        total += tl.sum(weight, 1)
        first += tl.sum(weight * t, 1)
        second += tl.sum(weight * t * t, 1)
        logits += tl.sum(weight * logit, 1)
    normaliser = tl.log2(total)
    mean = first / total
    variance = second / total - mean * mean
    entropy = normaliser - logits / total
    return reference, reference_slope, normaliser, mean, variance, entropy


@triton.jit
def _table(
    position, table,
    n_q, queries_x,
    stride_y, first_y, before_y, keys_y,
    stride_x, first_x, before_x, keys_x,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # The table has one row per parameter of a query's positional attention, in the order of the
    # constants in tiles.py.
    h = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    position += 3 * h
    curvature = tl.load(position).to(tl.float64) * LOG2E
    slope_y = tl.load(position + 1).to(tl.float64) * LOG2E
    slope_x = tl.load(position + 2).to(tl.float64) * LOG2E
    # The pixel of each query.
    row = m // queries_x
    column = m % queries_x
    query_y = (row * stride_y + first_y).to(tl.float64)
    query_x = (column * stride_x + first_x).to(tl.float64)
    # Positional attention is a product of two factors, one per axis.
    ref_y, slope_at_ref_y, norm_y, mean_y, variance_y, entropy_y = _line(
        curvature, slope_y, query_y, before_y, keys_y, QUERIES, KEYS
    )
    ref_x, slope_at_ref_x, norm_x, mean_x, variance_x, entropy_x = _line(
        curvature, slope_x, query_x, before_x, keys_x, QUERIES, KEYS
    )
    out = table + h * TABLE * n_q + m
    valid = m < n_q
    tl.store(out + REFERENCE_Y * n_q, ref_y, mask=valid)
    tl.store(out + REFERENCE_X * n_q, ref_x, mask=valid)
    tl.store(out + SLOPE_Y * n_q, slope_at_ref_y, mask=valid)
    tl.store(out + SLOPE_X * n_q, slope_at_ref_x, mask=valid)
    curvatures = tl.zeros((QUERIES,), tl.float64) + curvature
    tl.store(out + CURVATURE * n_q, curvatures, mask=valid)
    tl.store(out + NORMALISER * n_q, -norm_y - norm_x, mask=valid)
    tl.store(out + MEAN_Y * n_q, mean_y, mask=valid)
    tl.store(out + MEAN_X * n_q, mean_x, mask=valid)
    tl.store(out + VARIANCE * n_q, variance_y + variance_x, mask=valid)
    tl.store(out + OFFSET_Y * n_q, ref_y - query_y, mask=valid)
    tl.store(out + OFFSET_X * n_q, ref_x - query_x, mask=valid)
    tl.store(out + ENTROPY * n_q, entropy_y + entropy_x, mask=valid)


@triton.jit
def _padding(
    table, gate,
    entropy, distance,
    n_q,
    height, width,
    before_y, before_x,
    keys_x, extended,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    clamped = tl.minimum(m, n_q - 1)
    table += h * TABLE * n_q
    ref_y, ref_x, slope_y, slope_x, curvature, normaliser = query_tables(table, clamped, n_q)
    offset_y = tl.load(table + OFFSET_Y * n_q + clamped)
    offset_x = tl.load(table + OFFSET_X * n_q + clamped)
    log_gate = log2_of(tl.load(gate + h).to(ACC))
    bits = tl.zeros((QUERIES,), ACC)
    far = tl.zeros((QUERIES,), ACC)
    for start in range(0, extended, KEYS):
        y, x = key_pixels(start, extended - 1, keys_x, KEYS, ACC)
        y -= before_y
        x -= before_x
        n = start + tl.arange(0, KEYS)
        outside_y = (y < 0) | (y >= height)
        outside_x = (x < 0) | (x >= width)
        outside = (outside_y | outside_x) & (n < extended)
        ty = y[None, :] - ref_y[:, None]
        tx = x[None, :] - ref_x[:, None]
        logit = position_logits(
            ty, tx, slope_y[:, None], slope_x[:, None], curvature, normaliser[:, None]
        )
        logit = tl.where(outside[None, :], logit + log_gate, -1e9)
        # The logarithm of a gate of 0 is -inf, whose product with a weight of 0 would be NaN.
        logit = tl.maximum(logit, -1e9)
        weight = tl.exp2(logit)
        bits -= tl.sum(weight * logit, 1)
        dy = ty + offset_y[:, None]
        dx = tx + offset_x[:, None]
        lengths = tl.sqrt(dy * dy + dx * dx)
        far += tl.sum(weight * lengths, 1)
    at = h * n_q + m
    nats = bits / LOG2E
    tl.store(entropy + at, nats, mask=m < n_q)
    tl.store(distance + at, far, mask=m < n_q)


def positional_table(position: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Compute the part of positional attention that does not depend on the key, in float64.

    Args:
        position: The papers' v_pos, shape (heads, 3).
        grid: Both axes.
        dtype: Dtype of the table.

    Returns:
        Table of shape (heads, 12, N_q), rows as named in tiles.py.
    """
    table = launch.empty(len(position), TABLE.value, grid.queries, like=position, dtype=dtype)
    programs = (triton.cdiv(grid.queries, _QUERIES), len(position))
    y, x = grid
    _table[programs](
        position.contiguous(), table,
        grid.queries, x.queries,
        y.stride, y.first_query, y.before, y.keys,
        x.stride, x.first_query, x.before, x.keys,
        QUERIES=_QUERIES, KEYS=_KEYS,
    )  # fmt: skip
    return table


def padding_statistics(gate: Tensor, table: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Compute the entropy (nats) and attention distance on the padding, the same for every image.

    Args:
        gate: Share of positional attention, shape (heads,).
        table: Result of :func:`positional_table`.
        grid: Both axes.

    Returns:
        Two tensors of shape (heads, N_q).
    """
    entropy, distance = (launch.empty(len(gate), grid.queries, like=table) for _ in range(2))
    programs = (triton.cdiv(grid.queries, _QUERIES), len(gate))
    y, x = grid
    # Without padding the kernel need not loop over any keys.
    extended = grid.extended if grid.extended > grid.pixels else 0
    _padding[programs](
        table, gate,
        entropy, distance,
        grid.queries,
        y.length, x.length,
        y.before, x.before,
        x.keys, extended,
        QUERIES=_QUERIES, KEYS=_KEYS, ACC=launch.triton_dtype(table.dtype),
    )  # fmt: skip
    return entropy, distance
