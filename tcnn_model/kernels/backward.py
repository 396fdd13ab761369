"""Backward kernels (Triton): one over blocks of queries,
one over blocks of keys for k, one for the values.
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
    LOG2E,
    MEAN_X,
    MEAN_Y,
    OFFSET_X,
    OFFSET_Y,
    TABLE,
    VARIANCE,
    block,
    dot,
    key_pixels,
    load_tile,
    log2_of,
    place_of_program,
    position_logits,
    product,
    query_tables,
    store_tile,
)

__all__ = ["backward_keys", "backward_queries", "backward_values"]


@triton.jit
def _grad_attention(
    left, right,
    l_stride, r_stride,
    start_l, start_r,
    l_rows, r_rows,
    channels: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHANNELS: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Form ``left @ right^T`` over all channels, (LEFT, RIGHT):
    the gradient dA, with zeros past the last rows.

    ``left`` has the rows of gradients and ``right`` those of values. If the two are exchanged, the
    result is dA^T.
    """
    rows = block(left, start_l, l_rows - 1, l_stride, LEFT)[:, None]
    cols = block(right, start_r, r_rows - 1, r_stride, RIGHT)[:, None]
    row_index = start_l + tl.arange(0, LEFT)
    col_index = start_r + tl.arange(0, RIGHT)
    row_valid = (row_index < l_rows)[:, None]
    col_valid = (col_index < r_rows)[:, None]
    acc = tl.zeros((LEFT, RIGHT), ACC)
    for start in range(0, channels, CHANNELS):
        c = (start + tl.arange(0, CHANNELS))[None, :]
        c_valid = c < channels
        l_tile = tl.load(rows + c, mask=row_valid & c_valid, other=0.0)
        r_tile = tl.load(cols + c, mask=col_valid & c_valid, other=0.0)
        acc = dot(l_tile, tl.trans(r_tile), acc, PRECISION, INTERPRETED)
    return acc


@triton.jit
def _queries(
    q, k, v, content, gate, table, grad,
    dq, content_mean, partial,
    q_b, q_h, q_n,
    k_b, k_h, k_n,
    v_b, v_h, v_n,
    o_b, o_h, o_n,
    heads, n_q, n_k, rows, width,
    scale: tl.constexpr, dim: tl.constexpr, channels: tl.constexpr,
    UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    b, h, bh, start_m = place_of_program(index, n_q, heads, QUERIES)
    m = start_m + tl.arange(0, QUERIES)
    clamped = tl.minimum(m, n_q - 1)
    d = tl.arange(0, DIM)
    q += (b * q_b + h * q_h) * UNIT
    k += (b * k_b + h * k_h) * UNIT
    v += (b * v_b + h * v_h) * UNIT
    grad += (b * o_b + h * o_h) * UNIT
    q_tile = load_tile(q, start_m, n_q - 1, q_n * UNIT, d, dim, QUERIES)
    table += h * TABLE * n_q
    content += bh * n_q
    ref_y, ref_x, slope_y, slope_x, curvature, normaliser = query_tables(table, clamped, n_q)
    highest = tl.load(content + clamped)
    share = 1 / tl.load(content + rows + clamped)
    mean_y = tl.load(table + MEAN_Y * n_q + clamped)
    mean_x = tl.load(table + MEAN_X * n_q + clamped)
    variance = tl.load(table + VARIANCE * n_q + clamped)
    # Sum over keys of P dA and, with u = t - E[t], its covariances with u and |u|^2. Centring
    # avoids cancellation.
    mass = tl.zeros((QUERIES,), ACC)
    cov_y = tl.zeros((QUERIES,), ACC)
    cov_x = tl.zeros((QUERIES,), ACC)
    cov_square = tl.zeros((QUERIES,), ACC)
    # Sums over the keys so far of C and of C dA, and the ratio of the two.
    total = tl.zeros((QUERIES,), ACC)
    weighted = tl.zeros((QUERIES,), ACC)
    mean = tl.zeros((QUERIES,), ACC)
    acc = tl.zeros((QUERIES, DIM), ACC)  # sum of C (dA - mean) k
    acc_k = tl.zeros((QUERIES, DIM), ACC)  # sum of C k
    for start in range(0, n_k, KEYS):
        k_tile = load_tile(k, start, n_k - 1, k_n * UNIT, d, dim, KEYS)
        da = _grad_attention(
            grad, v,
            o_n * UNIT, v_n * UNIT,
            start_m, start,
            n_q, n_k,
            channels, QUERIES, KEYS, CHANNELS,
            ACC, PRECISION, INTERPRETED,
        )  # fmt: skip
        # Position: P dA, and its moments.
        y, x = key_pixels(start, n_k - 1, width, KEYS, ACC)
        ty = y[None, :] - ref_y[:, None]
        tx = x[None, :] - ref_x[:, None]
        p = position_logits(
            ty, tx, slope_y[:, None], slope_x[:, None], curvature, normaliser[:, None]
        )
        p_da = tl.exp2(p) * da
        mass += tl.sum(p_da, 1)
        uy = ty - mean_y[:, None]
        ux = tx - mean_x[:, None]
        cov_y += tl.sum(p_da * uy, 1)
        cov_x += tl.sum(p_da * ux, 1)
        centred = uy * uy + (ux * ux - variance[:, None])
        cov_square += tl.sum(p_da * centred, 1)
        # Content: C, from the normaliser of the forward.
        s = product(q_tile, k_tile, ACC, PRECISION, INTERPRETED)
        weight = tl.exp2(s * scale - highest[:, None])
        c = weight * share[:, None]
        n = start + tl.arange(0, KEYS)
        c = tl.where((n < n_k)[None, :], c, 0.0)
        # The mean of dA under C is known only at the end. The estimate from the keys so far is
        # subtracted before the product is rounded for the tensor cores, and the sum under the
        # previous estimate is moved to the new one.
        total += tl.sum(c, 1)
        weighted += tl.sum(c * da, 1)
        estimate = weighted / tl.where(total > 0, total, 1.0)
        acc += (mean - estimate)[:, None] * acc_k
        mean = estimate
        ds = c * (da - mean[:, None])
        acc = dot(ds.to(k_tile.dtype), k_tile, acc, PRECISION, INTERPRETED)
        acc_k = dot(c.to(k_tile.dtype), k_tile, acc_k, PRECISION, INTERPRETED)
    # The factor of content logits, (1 - g) / sqrt(d), is the same for all products.
    valid = m < n_q
    g = tl.load(gate + h).to(tl.float64)
    content_share = (1 - g).to(ACC)
    acc *= (scale / LOG2E) * content_share
    store_tile(dq, bh * n_q + start_m, d, dim, acc, valid)
    tl.store(content_mean + bh * n_q + m, mean, mask=valid)

    # position multiplies |delta|^2, and delta = u + E[t] + offset.
    offset_y = tl.load(table + OFFSET_Y * n_q + clamped)
    offset_x = tl.load(table + OFFSET_X * n_q + clamped)
    cov_square += 2 * (offset_y + mean_y) * cov_y
    cov_square += 2 * (offset_x + mean_x) * cov_x
    partial += index.to(tl.int64) * 4
    # dA and therefore these sums are zero for queries past the end, so no mask is needed.
    tl.store(partial, tl.sum(cov_square, 0))
    tl.store(partial + 1, tl.sum(cov_y, 0))
    tl.store(partial + 2, tl.sum(cov_x, 0))
    tl.store(partial + 3, tl.sum(mass - mean, 0))


@triton.jit
def _keys(
    q, k, v, content, gate, grad, content_mean,
    dk,
    q_b, q_h, q_n,
    k_b, k_h, k_n,
    v_b, v_h, v_n,
    o_b, o_h, o_n,
    heads, n_q, n_k, rows,
    scale: tl.constexpr, dim: tl.constexpr, channels: tl.constexpr,
    UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    b, h, bh, start_n = place_of_program(index, n_k, heads, KEYS)
    n = start_n + tl.arange(0, KEYS)
    d = tl.arange(0, DIM)
    q += (b * q_b + h * q_h) * UNIT
    k += (b * k_b + h * k_h) * UNIT
    v += (b * v_b + h * v_h) * UNIT
    grad += (b * o_b + h * o_h) * UNIT
    k_tile = load_tile(k, start_n, n_k - 1, k_n * UNIT, d, dim, KEYS)
    content += bh * n_q
    content_mean += bh * n_q
    acc = tl.zeros((KEYS, DIM), ACC)
    for start in range(0, n_q, QUERIES):
        m = start + tl.arange(0, QUERIES)
        q_tile = load_tile(q, start, n_q - 1, q_n * UNIT, d, dim, QUERIES)
        da = _grad_attention(
            v, grad,
            v_n * UNIT, o_n * UNIT,
            start_n, start,
            n_k, n_q,
            channels, KEYS, QUERIES, CHANNELS,
            ACC, PRECISION, INTERPRETED,
        )  # fmt: skip
        # C and dA are transposed here, with one row per key.
        s = product(k_tile, q_tile, ACC, PRECISION, INTERPRETED)
        clamped = tl.minimum(m, n_q - 1)
        highest = tl.load(content + clamped)
        share = 1 / tl.load(content + rows + clamped)
        # Past the end da is zero, too.
        mean = tl.load(content_mean + m, mask=m < n_q, other=0.0)
        weight = tl.exp2(s * scale - highest[None, :])
        c = weight * share[None, :]
        ds = c * (da - mean[None, :])
        acc = dot(ds.to(q_tile.dtype), q_tile, acc, PRECISION, INTERPRETED)
    g = tl.load(gate + h).to(tl.float64)
    content_share = (1 - g).to(ACC)
    acc *= (scale / LOG2E) * content_share
    store_tile(dk, bh * n_k + start_n, d, dim, acc, n < n_k)


@triton.jit
def _values(
    q, k, content, gate, table, grad,
    dv,
    q_b, q_h, q_n,
    k_b, k_h, k_n,
    o_b, o_h, o_n,
    heads, shared_by, n_q, n_k, rows, width,
    scale: tl.constexpr, dim: tl.constexpr, channels: tl.constexpr,
    UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    tiles_c = tl.cdiv(channels, CHANNELS)
    tile = tl.program_id(0) % tiles_c
    index = tl.program_id(0) // tiles_c
    # The group is an image and, unless the values are shared, a head.
    _, _, group, start_n = place_of_program(index, n_k, heads, KEYS)
    n = start_n + tl.arange(0, KEYS)
    d = tl.arange(0, DIM)
    c = tile * CHANNELS + tl.arange(0, CHANNELS)
    y, x = key_pixels(start_n, n_k - 1, width, KEYS, ACC)
    acc = tl.zeros((KEYS, CHANNELS), ACC)
    # The gradient of shared values is a sum over the heads that share them.
    for shared in range(shared_by):
        bh = group * shared_by + shared
        b = bh // heads
        h = bh % heads
        head_q = q + (b * q_b + h * q_h) * UNIT
        head_k = k + (b * k_b + h * k_h) * UNIT
        head_grad = grad + (b * o_b + h * o_h) * UNIT
        k_tile = load_tile(head_k, start_n, n_k - 1, k_n * UNIT, d, dim, KEYS)
        g = tl.load(gate + h).to(tl.float64)
        log_gate = log2_of(g.to(ACC))
        head_table = table + h * TABLE * n_q
        for start in range(0, n_q, QUERIES):
            m = start + tl.arange(0, QUERIES)
            clamped = tl.minimum(m, n_q - 1)
            q_tile = load_tile(head_q, start, n_q - 1, q_n * UNIT, d, dim, QUERIES)
            grad_rows = block(head_grad, start, n_q - 1, o_n * UNIT, QUERIES)
            grad_places = grad_rows[:, None] + c[None, :]
            valid = (m < n_q)[:, None] & (c < channels)[None, :]
            grad_tile = tl.load(grad_places, mask=valid, other=0.0)
            ref_y, ref_x, slope_y, slope_x, curvature, normaliser = query_tables(
                head_table, clamped, n_q
            )
            highest = tl.load(content + bh * n_q + clamped)
            total = tl.load(content + rows + bh * n_q + clamped)
            share = (1 - g).to(ACC) / total
            # A is formed as in the forward pass, but transposed, with one row per key.
            s = product(k_tile, q_tile, ACC, PRECISION, INTERPRETED)
            ty = y[:, None] - ref_y[None, :]
            tx = x[:, None] - ref_x[None, :]
            p = position_logits(
                ty,
                tx,
                slope_y[None, :],
                slope_x[None, :],
                curvature,
                (normaliser + log_gate)[None, :],
            )
            content_weight = tl.exp2(s * scale - highest[None, :])
            content_part = content_weight * share[None, :]
            a = content_part + tl.exp2(p)
            acc = dot(a.to(grad_tile.dtype), grad_tile, acc, PRECISION, INTERPRETED)
    store_tile(dv, group * n_k + start_n, c, channels, acc, n < n_k)


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
    """Compute the gradients that are sums over keys.

    Args:
        q: Queries, shape (B, heads, N_q, d).
        k: Keys, shape (B, heads, N_k, d).
        v: Values, shape (B, 1, N_k, C) or (B, heads, N_k, C).
        normaliser: Result of ``content_normaliser``.
        gate: Share of positional attention, shape (heads,).
        table: Result of ``positional_table``.
        grid: Both axes.
        grad: Gradient of the output, shape (B, heads, N_q, C).

    Returns:
        Gradients of q, of position (heads, 3) and of gate (heads,), the last two in float64; and
        the mean of dA under content attention, (B, heads, N_q), which :func:`backward_keys` needs.
    """
    dim = q.shape[3]  # aligned() may add columns of zeros
    channels = v.shape[3]
    q = launch.aligned(q)
    k = launch.aligned(k)
    v = launch.aligned(v)
    grad = launch.aligned(grad)
    batch, heads, n_q, _ = q.shape
    n_k = k.shape[2]
    size = launch.blocks("queries", q, dim, channels)
    blocks = triton.cdiv(n_q, size.queries)
    programs = batch * heads * blocks
    dq = launch.empty(*q.shape, like=q)
    content_mean = launch.empty(batch, heads, n_q, like=normaliser)
    partial = launch.empty(batch, heads, blocks, 4, like=normaliser)
    rows = batch * heads * n_q
    scale = dim**-0.5 * LOG2E.value
    _queries[(programs,)](
        q, k, v, normaliser, gate, table, grad,
        dq, content_mean, partial,
        *launch.strides(q),
        *launch.strides(k),
        *launch.strides(v),
        *launch.strides(grad),
        heads, n_q, n_k, rows, grid.x.length,
        scale=scale, dim=q.shape[3], channels=v.shape[3],
        **launch.numerics(q.dtype),
        **size.tile(dim),
    )  # fmt: skip
    sums = partial.sum((0, 2), dtype=torch.float64)
    d_position = gate.double()[:, None] * sums[:, :3]
    d_gate = sums[:, 3].contiguous()
    return dq[..., :dim], d_position, d_gate, content_mean


def backward_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    grad: Tensor,
    content_mean: Tensor,
) -> Tensor:
    """Compute the gradient of k, shape (B, heads, N_k, d).

    Args:
        q, k, v, normaliser, gate, grad: The arguments of :func:`backward_queries`.
        content_mean: Last result of :func:`backward_queries`.
    """
    dim = q.shape[3]  # aligned() may add columns of zeros
    channels = v.shape[3]
    q = launch.aligned(q)
    k = launch.aligned(k)
    v = launch.aligned(v)
    grad = launch.aligned(grad)
    batch, heads, n_k, _ = k.shape
    n_q = q.shape[2]
    size = launch.blocks("keys", q, dim, channels)
    dk = launch.empty(*k.shape, like=k)
    blocks_of_keys = triton.cdiv(n_k, size.keys)
    programs = batch * heads * blocks_of_keys
    rows = batch * heads * n_q
    scale = dim**-0.5 * LOG2E.value
    _keys[(programs,)](
        q, k, v, normaliser, gate, grad, content_mean,
        dk,
        *launch.strides(q),
        *launch.strides(k),
        *launch.strides(v),
        *launch.strides(grad),
        heads, n_q, n_k, rows,
        scale=scale, dim=q.shape[3], channels=v.shape[3],
        **launch.numerics(q.dtype),
        **size.tile(dim),
    )  # fmt: skip
    return dk[..., :dim]


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
    """Compute the gradient of v, in the shape of v: a sum over heads if they share the values.

    Args:
        q, k, v, normaliser, gate, table, grid, grad: The arguments of :func:`backward_queries`.
    """
    dim = q.shape[3]
    value_heads, n_k, channels = v.shape[1:]
    q = launch.aligned(q)
    k = launch.aligned(k)
    grad = launch.aligned(grad)
    batch, heads, n_q, _ = q.shape
    size = launch.blocks("values", q, dim, channels)
    dv = launch.empty(batch, value_heads, n_k, grad.shape[3], like=v)
    blocks_of_keys = triton.cdiv(n_k, size.keys)
    tiles_of_channels = triton.cdiv(channels, size.channels)
    programs = batch * value_heads * blocks_of_keys * tiles_of_channels
    rows = batch * heads * n_q
    scale = dim**-0.5 * LOG2E.value
    _values[(programs,)](
        q, k, normaliser, gate, table, grad,
        dv,
        *launch.strides(q),
        *launch.strides(k),
        *launch.strides(grad),
        heads, heads // value_heads, n_q, n_k, rows, grid.x.length,
        scale=scale, dim=q.shape[3], channels=grad.shape[3],
        **launch.numerics(q.dtype),
        **size.tile(dim),
    )  # fmt: skip
    return dv[..., :channels]
