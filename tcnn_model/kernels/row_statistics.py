"""Statistics of softmax attention in one pass over tiles
of its logits (Triton), without an N x N tensor.

Sums over columns need the normalised attention, so each program forms its tiles again once it knows
the sums of its queries. This takes twice the products, but a single kernel. Programs add to the
columns by atomic additions.
"""

# ruff: noqa: N803 (Triton's compile-time constants are upper case)
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcnn_model.kernels import launch
from tcnn_model.kernels.softmax import RowStatistics, TokenGrid
from tcnn_model.kernels.tiles import key_pixels, load_tile, place_of_program, product
from tcnn_model.precision import at_least_float32

__all__ = ["attention_statistics"]

# Replaces minus infinity, whose product with an attention of zero would be NaN.
_LOWEST = tl.constexpr(-1e30)
_HIDDEN = tl.constexpr(float("-inf"))

# The addresses of a mask's tile take two registers each, so that tiles of 64 keys spill registers
# at 128 channels (Triton 3.9, for compute capability 9.0).
_KEYS_WITH_MASK = 32

# Kinds of masks.
_ADDED = tl.constexpr(1)
_VISIBLE = tl.constexpr(2)


@triton.jit
def _logits(
    q_tile, k, mask_rows,
    start, last, k_n, mask_k,
    scale: tl.constexpr, dim: tl.constexpr, UNIT: tl.constexpr, MASK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return the logits of keys from ``start`` on: -inf for hidden keys and after the last key."""
    d = tl.arange(0, DIM)
    n = start + tl.arange(0, KEYS)
    k_tile = load_tile(k, start, last, k_n * UNIT, d, dim, KEYS)
    s = product(q_tile, k_tile, ACC, PRECISION, INTERPRETED) * scale
    if MASK:
        columns = tl.minimum(n, last).to(tl.int64) * mask_k
        masked = tl.load(mask_rows[:, None] + columns[None, :])
        if MASK == _VISIBLE:
            s = tl.where(masked != 0, s, _HIDDEN)
        else:
            s += masked.to(ACC)
    return tl.where((n <= last)[None, :], s, _HIDDEN)


@triton.jit
def _bounded(x):
    """Return x, but at least :data:`_LOWEST`;
    NaN stays NaN, which the hardware's maximum would ignore.
    """
    return tl.maximum(x, _LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _from_hidden(highest):
    """Return the number to subtract from logits: the highest,
    or 0 if all are hidden, because -inf - -inf is NaN.
    """
    return tl.where(highest == _HIDDEN, 0.0, highest)


@triton.jit
def _sums(
    q_tile, k, mask_rows,
    first, last, k_n, mask_k,
    query_y, query_x, width,
    grid_y: tl.constexpr, grid_x: tl.constexpr,
    first_y: tl.constexpr, first_x: tl.constexpr,
    DISTANCE: tl.constexpr,
    scale: tl.constexpr, dim: tl.constexpr, UNIT: tl.constexpr, MASK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return the highest logit of the keys ``first`` to ``last``, and three sums over these keys.

    With w = exp(s - highest), they are the sums of w, of w (s - highest), and of w times the
    distance.
    """
    highest = tl.full((QUERIES,), _HIDDEN, ACC)
    total = tl.zeros((QUERIES,), ACC)
    logits = tl.zeros((QUERIES,), ACC)
    far = tl.zeros((QUERIES,), ACC)
    for start in range(first, last + 1, KEYS):
        s = _logits(
            q_tile, k, mask_rows,
            start, last, k_n, mask_k,
            scale, dim, UNIT, MASK,
            QUERIES, KEYS, DIM,
            ACC, PRECISION, INTERPRETED,
        )  # fmt: skip
        new_highest = tl.maximum(highest, tl.max(s, 1))
        base = _from_hidden(new_highest)
        s = _bounded(s - base[:, None])
        weight = tl.exp(s)
        lower = _bounded(highest - base)
        rescale = tl.exp(lower)
        # Previous sums are relative to a lower maximum.
        recounted = logits + lower * total
        logits = rescale * recounted + tl.sum(weight * s, 1)
        total = rescale * total + tl.sum(weight, 1)
        if DISTANCE:
            y, x = key_pixels(start - first, last - first, width, KEYS, ACC)
            # Positions of the keys in the image; all of these keys are on the grid.
            key_y = y * grid_y + first_y
            key_x = x * grid_x + first_x
            dy = key_y[None, :] - query_y[:, None]
            dx = key_x[None, :] - query_x[:, None]
            lengths = tl.sqrt(dy * dy + dx * dx)
            far = rescale * far + tl.sum(weight * lengths, 1)
        highest = new_highest
    return highest, total, logits, far


@triton.jit
def _statistics(
    q, k, mask,
    largest, log_sum, expected, prefix_share, distance, received,
    q_b, q_h, q_n,
    k_b, k_h, k_n,
    mask_b, mask_h, mask_q, mask_k,
    heads, n_q, n_k, query_width, key_width,
    query_grid: tl.constexpr, query_prefix: tl.constexpr,
    key_grid: tl.constexpr, prefix: tl.constexpr,
    scale: tl.constexpr, dim: tl.constexpr,
    MASK: tl.constexpr, DISTANCE: tl.constexpr, RECEIVED: tl.constexpr, PREFIX_KEYS: tl.constexpr,
    UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    b, h, bh, start_m = place_of_program(index, n_q, heads, QUERIES)
    m = start_m + tl.arange(0, QUERIES)
    clamped = tl.minimum(m, n_q - 1)
    d = tl.arange(0, DIM)
    q += (b * q_b + h * q_h) * UNIT
    k += (b * k_b + h * k_h) * UNIT
    mask += b * mask_b + h * mask_h
    q_tile = load_tile(q, start_m, n_q - 1, q_n * UNIT, d, dim, QUERIES)
    mask_rows = mask + clamped.to(tl.int64) * mask_q
    y, x = key_pixels(start_m - query_prefix, n_q, query_width, QUERIES, ACC)
    # Class and register tokens are put on the first cell of the grid.
    on_grid = clamped >= query_prefix
    y = tl.where(on_grid, y, 0.0)
    x = tl.where(on_grid, x, 0.0)
    query_y = y * query_grid[0] + query_grid[2]
    query_x = x * query_grid[1] + query_grid[3]

    # The keys on the grid come first, because the distance is a mean over these keys only.
    highest, total, logits, far = _sums(
        q_tile, k, mask_rows,
        prefix, n_k - 1, k_n, mask_k,
        query_y, query_x, key_width,
        key_grid[0], key_grid[1],
        key_grid[2], key_grid[3],
        DISTANCE,
        scale, dim, UNIT, MASK,
        QUERIES, KEYS, DIM,
        ACC, PRECISION, INTERPRETED,
    )  # fmt: skip
    at = bh * n_q + m
    written = m < n_q
    if DISTANCE:
        positive_total = tl.where(total > 0, total, 1.0)
        tl.store(distance + at, far / positive_total, mask=written)
    if prefix > 0:
        prefix_highest, prefix_total, prefix_logits, _ = _sums(
            q_tile, k, mask_rows,
            0, prefix - 1, k_n, mask_k,
            query_y, query_x, key_width,
            0.0, 0.0,
            0.0, 0.0,
            False,
            scale, dim, UNIT, MASK,
            QUERIES, PREFIX_KEYS, DIM,
            ACC, PRECISION, INTERPRETED,
        )  # fmt: skip
        # The sums of both parts are made relative to the higher of the two maxima.
        grid_highest = highest
        highest = tl.maximum(grid_highest, prefix_highest)
        base = _from_hidden(highest)
        grid_lower = _bounded(grid_highest - base)
        prefix_lower = _bounded(prefix_highest - base)
        grid_scale = tl.exp(grid_lower)
        prefix_scale = tl.exp(prefix_lower)
        grid_logits = logits + grid_lower * total
        prefix_logits += prefix_lower * prefix_total
        logits = grid_scale * grid_logits
        logits += prefix_scale * prefix_logits
        prefix_total = prefix_scale * prefix_total
        total = grid_scale * total + prefix_total
        share = prefix_total / tl.where(total == 0, 1.0, total)
        tl.store(prefix_share + at, share, mask=written)
    # A maximum ignores NaN, but a sum does not: the largest logit of a row with NaN is NaN.
    broken = (total != total) & (highest < float("inf"))
    tl.store(largest + at, tl.where(broken, total, highest), mask=written)
    total = tl.where(total == 0, 1.0, total)  # where all keys are hidden
    tl.store(log_sum + at, tl.log(total), mask=written)
    tl.store(expected + at, logits / total, mask=written)
    if RECEIVED:
        # The tiles are formed again, now that the sums of their rows are known.
        base = _from_hidden(highest)
        share = tl.where(written, 1.0 / total, 0.0)
        for start in range(0, n_k, KEYS):
            s = _logits(
                q_tile, k, mask_rows,
                start, n_k - 1, k_n, mask_k,
                scale, dim, UNIT, MASK,
                QUERIES, KEYS, DIM,
                ACC, PRECISION, INTERPRETED,
            )  # fmt: skip
            weight = tl.exp(_bounded(s - base[:, None]))
            a = weight * share[:, None]
            n = start + tl.arange(0, KEYS)
            by_key = tl.sum(a, 0)
            tl.atomic_add(received + bh * n_k + n, by_key, mask=n < n_k, sem="relaxed")


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
    """Measure softmax attention with logits scale * q k^T + mask.

    Args:
        q: Queries, shape (rows, heads, N_q, d).
        k: Keys, shape (rows, heads, N_k, d).
        scale: Factor of the products.
        mask: Numbers to add, or True where a query may attend to a key; broadcasts to (rows, heads,
            N_q, N_k).
        queries, keys: Positions of the tokens; None if they are not known.
        received: Whether to sum the columns, too.
    """
    rows, heads, n_q, dim = q.shape
    n_k = k.shape[2]
    q = launch.aligned(q)
    k = launch.aligned(k)
    size = launch.blocks("statistics", q, dim)
    widest = size.keys if mask is None else min(size.keys, _KEYS_WITH_MASK)
    size = size._replace(
        queries=min(size.queries, launch.power_of_two(n_q)),
        keys=min(widest, launch.power_of_two(n_k)),
    )
    dtype = at_least_float32(q.dtype)
    largest, log_sum, expected = (
        launch.empty(rows, heads, n_q, like=q, dtype=dtype) for _ in range(3)
    )
    prefix = keys.prefix if keys is not None else 0
    share = torch.zeros_like(largest)
    if prefix:
        share = launch.empty(rows, heads, n_q, like=largest)
    distance = None
    if queries is not None and keys is not None:
        distance = launch.empty(rows, heads, n_q, like=largest)
    # Programs add to this tensor, so it starts from zeros.
    columns = largest.new_zeros(rows, heads, n_k) if received else None
    query_width, query_grid = _places(queries)
    key_width, key_grid = _places(keys)
    kind, mask, mask_strides = _prepared(mask, (rows, heads, n_q, n_k))
    # A kernel needs a pointer for each argument, but uses only those that its options ask for.
    pointers = (
        q,
        k,
        q if mask is None else mask,
        *(largest, log_sum, expected, share),
        *(largest if x is None else x for x in (distance, columns)),
    )
    blocks_of_queries = triton.cdiv(n_q, size.queries)
    programs = rows * heads * blocks_of_queries
    query_prefix = queries.prefix if queries is not None else 0
    # The prefix has separate tiles, as small as possible.
    prefix_keys = launch.power_of_two(prefix) if prefix < size.keys else size.keys
    _statistics[(programs,)](
        *pointers,
        *launch.strides(q),
        *launch.strides(k),
        *mask_strides,
        heads, n_q, n_k, query_width, key_width,
        query_grid=query_grid, query_prefix=query_prefix,
        key_grid=key_grid, prefix=prefix,
        scale=scale, dim=q.shape[3],
        MASK=kind, DISTANCE=distance is not None, RECEIVED=received, PREFIX_KEYS=prefix_keys,
        **launch.numerics(q.dtype),
        **size.tile(dim, with_channels=False),
    )  # fmt: skip
    return RowStatistics(largest, log_sum, expected, share, distance, columns)


def _places(tokens: TokenGrid | None) -> tuple[int, tuple[float, ...]]:
    """Return the width, and spacing and origin for compile-time constants;
    as arguments they would be float32.
    """
    if tokens is None:
        return 1, (0.0, 0.0, 0.0, 0.0)
    numbers = (*tokens.spacing, *tokens.origin)
    return tokens.width, tuple(float(number) for number in numbers)


def _prepared(
    mask: Tensor | None, shape: tuple[int, int, int, int]
) -> tuple[int, Tensor | None, tuple[Any, ...]]:
    """Return the kind of a mask, a view of its memory,
    and its strides, which are 0 in broadcast dimensions.
    """
    if mask is None:
        return 0, None, (0, 0, 0, 0)
    mask = mask.expand(shape)
    if mask.dtype == torch.bool:
        return _VISIBLE.value, mask.view(torch.uint8), mask.stride()
    return _ADDED.value, mask, mask.stride()
