"""Forward kernels (Triton): the normaliser of content attention,
then the mixed attention times the values.
"""

# Triton's compile-time constants are upper case, and each is tested in a separate if.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from tcnn_model.kernels import launch
from tcnn_model.kernels.grid import Grid
from tcnn_model.kernels.tables import padding_statistics
from tcnn_model.kernels.tiles import (
    LOG2E,
    OFFSET_X,
    OFFSET_Y,
    TABLE,
    block,
    dot,
    key_pixels,
    load_tile,
    log2_of,
    place_of_program,
    position_logits,
    product,
    query_tables,
)
from tcnn_model.precision import at_least_float32

__all__ = ["content_normaliser", "mix"]


@triton.jit
def _lse(
    q, k, normaliser, entropy,
    q_b, q_h, q_n,
    k_b, k_h, k_n,
    heads, n_q, n_k, rows,
    scale: tl.constexpr, dim: tl.constexpr, STATISTICS: tl.constexpr,
    UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    b, h, bh, start_m = place_of_program(index, n_q, heads, QUERIES)
    d = tl.arange(0, DIM)
    q += (b * q_b + h * q_h) * UNIT
    k += (b * k_b + h * k_h) * UNIT
    q_tile = load_tile(q, start_m, n_q - 1, q_n * UNIT, d, dim, QUERIES)
    # An online softmax: sums over the keys so far are relative to their highest logit, and rescaled
    # when it rises.
    highest = tl.full((QUERIES,), -1e30, ACC)  # finite: -inf - (-inf) would be NaN
    total = tl.zeros((QUERIES,), ACC)
    logits = tl.zeros((QUERIES,), ACC)  # sum of weight * (logit - highest)
    for start in range(0, n_k, KEYS):
        k_tile = load_tile(k, start, n_k - 1, k_n * UNIT, d, dim, KEYS)
        s = product(q_tile, k_tile, ACC, PRECISION, INTERPRETED)
        s *= scale
        # Keys past the last get no weight.
        n = start + tl.arange(0, KEYS)
        s = tl.where((n < n_k)[None, :], s, -1e30)
        new_highest = tl.maximum(highest, tl.max(s, 1))
        s -= new_highest[:, None]
        weight = tl.exp2(s)
        lower = highest - new_highest
        rescale = tl.exp2(lower)
        if STATISTICS:
            # Previous logits are relative to a lower maximum.
            recounted = logits + lower * total
            logits = rescale * recounted
            logits += tl.sum(weight * s, 1)
        total = rescale * total + tl.sum(weight, 1)
        highest = new_highest
    m = start_m + tl.arange(0, QUERIES)
    written = m < n_q
    normaliser += bh * n_q
    tl.store(normaliser + m, highest, mask=written)
    tl.store(normaliser + rows + m, total, mask=written)
    if STATISTICS:
        bits = tl.log2(total) - logits / total
        nats = bits / LOG2E
        tl.store(entropy + bh * n_q + m, nats, mask=written)


@triton.jit
def _mix(
    q, k, v, content, gate, table, out,
    entropy, distance, received,
    padding_entropy, padding_distance,
    q_b, q_h, q_n,
    k_b, k_h, k_n,
    v_b, v_h, v_n,
    o_b, o_h, o_n,
    heads, n_q, n_k, rows, width,
    scale: tl.constexpr, dim: tl.constexpr, channels: tl.constexpr, STATISTICS: tl.constexpr,
    UNIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs have the same queries but write different channels of the output.
    tiles_c = tl.cdiv(channels, CHANNELS)
    tile = tl.program_id(0) % tiles_c
    index = tl.program_id(0) // tiles_c
    b, h, bh, start_m = place_of_program(index, n_q, heads, QUERIES)
    m = start_m + tl.arange(0, QUERIES)
    clamped = tl.minimum(m, n_q - 1)
    d = tl.arange(0, DIM)
    c = tile * CHANNELS + tl.arange(0, CHANNELS)
    q += (b * q_b + h * q_h) * UNIT
    k += (b * k_b + h * k_h) * UNIT
    v += (b * v_b + h * v_h) * UNIT
    q_tile = load_tile(q, start_m, n_q - 1, q_n * UNIT, d, dim, QUERIES)
    # Parameters of the queries for the positional part, then for the content part.
    table += h * TABLE * n_q
    content += bh * n_q
    ref_y, ref_x, slope_y, slope_x, curvature, normaliser = query_tables(table, clamped, n_q)
    # float64 keeps the precision of 1 - g if the gate is near 1.
    g = tl.load(gate + h).to(tl.float64)
    # A = 2^(s - highest) * share + 2^(position logit + log2 g) saves a product and a sum per
    # weight.
    normaliser += log2_of(g.to(ACC))
    highest = tl.load(content + clamped)
    total = tl.load(content + rows + clamped)
    share = (1 - g).to(ACC) / total
    if STATISTICS:
        offset_y = tl.load(table + OFFSET_Y * n_q + clamped)
        offset_x = tl.load(table + OFFSET_X * n_q + clamped)
        bits = tl.zeros((QUERIES,), ACC)
        far = tl.zeros((QUERIES,), ACC)
    acc = tl.zeros((QUERIES, CHANNELS), ACC)
    for start in range(0, n_k, KEYS):
        n = start + tl.arange(0, KEYS)
        k_tile = load_tile(k, start, n_k - 1, k_n * UNIT, d, dim, KEYS)
        v_rows = block(v, start, n_k - 1, v_n * UNIT, KEYS)
        v_places = v_rows[:, None] + c[None, :]
        valid = (n < n_k)[:, None] & (c < channels)[None, :]
        v_tile = tl.load(v_places, mask=valid, other=0.0)
        s = product(q_tile, k_tile, ACC, PRECISION, INTERPRETED)
        # Position: log2 of g P.
        y, x = key_pixels(start, n_k - 1, width, KEYS, ACC)
        ty = y[None, :] - ref_y[:, None]
        tx = x[None, :] - ref_x[:, None]
        p = position_logits(
            ty, tx, slope_y[:, None], slope_x[:, None], curvature, normaliser[:, None]
        )
        # Content: (1 - g) C. The sum of both is Eq. (7).
        content_weight = tl.exp2(s * scale - highest[:, None])
        content_part = content_weight * share[:, None]
        a = content_part + tl.exp2(p)
        acc = dot(a.to(v_tile.dtype), v_tile, acc, PRECISION, INTERPRETED)
        if STATISTICS:
            # Programs that differ only in their channels form the same attention, which the first
            # of them measures.
            if tile == 0:
                valid_pairs = (n < n_k)[None, :] & (m < n_q)[:, None]
                a = tl.where(valid_pairs, a, 0.0)
                # 1e-37 is about the smallest normal float32 number: 0 times the logarithm of 0
                # would be NaN.
                logarithm = tl.log2(tl.maximum(a, 1e-37))
                bits -= tl.sum(a * logarithm, 1)
                # Distances are from the query, but t is relative to the query's reference.
                dy = ty + offset_y[:, None]
                dx = tx + offset_x[:, None]
                lengths = tl.sqrt(dy * dy + dx * dx)
                far += tl.sum(a * lengths, 1)
                by_key = tl.sum(a, 0)
                tl.atomic_add(received + bh * n_k + n, by_key, mask=n < n_k, sem="relaxed")
    # The rows of a head are not adjacent in memory, (B, N_q, heads, C).
    step = o_n * UNIT
    out_rows = (
        out
        + (b * o_b + h * o_h) * UNIT
        + start_m.to(tl.int64) * step
        + tl.arange(0, QUERIES) * step
    )
    places = out_rows[:, None] + c[None, :]
    written = (m < n_q)[:, None] & (c < channels)[None, :]
    tl.store(places, acc.to(v.dtype.element_ty), mask=written)
    if STATISTICS:
        if tile == 0:
            # The contribution of the padding is the same for all images.
            head_row = h * n_q + clamped
            nats = bits / LOG2E + tl.load(padding_entropy + head_row)
            far += tl.load(padding_distance + head_row)
            at = bh * n_q + m
            tl.store(entropy + at, nats, mask=m < n_q)
            tl.store(distance + at, far, mask=m < n_q)


def content_normaliser(
    q: Tensor, k: Tensor, *, statistics: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the normaliser of content attention, and optionally its entropy.

    Args:
        q: Queries, shape (B, heads, N_q, d).
        k: Keys, shape (B, heads, N_k, d).
        statistics: Whether to compute the entropy.

    Returns:
        Normaliser, shape (2, B, heads, N_q): the highest logit of each query to base 2, and the sum
        over keys of 2^(logit - highest). They are kept separate, because the rounding error of a
        single number would be as large as that of the logit. With ``statistics`` also the entropy
        in nats, (B, heads, N_q).
    """
    batch, heads, n_q, dim = q.shape
    n_k = k.shape[2]
    q = launch.aligned(q)
    k = launch.aligned(k)
    size = launch.blocks("lse", q, dim)
    normaliser = launch.empty(2, batch, heads, n_q, like=q, dtype=at_least_float32(q.dtype))
    entropy = launch.empty(batch, heads, n_q, like=normaliser) if statistics else None
    blocks_of_queries = triton.cdiv(n_q, size.queries)
    programs = batch * heads * blocks_of_queries
    rows = batch * heads * n_q
    scale = dim**-0.5 * LOG2E.value
    _lse[(programs,)](
        q, k, normaliser, normaliser if entropy is None else entropy,
        *launch.strides(q),
        *launch.strides(k),
        heads, n_q, n_k, rows,
        scale=scale, dim=q.shape[3], STATISTICS=statistics,
        **launch.numerics(q.dtype),
        **size.tile(dim, with_channels=False),
    )  # fmt: skip
    return normaliser, entropy


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
    """Apply the mixed attention to the values.

    Args:
        q: Queries, shape (B, heads, N_q, d).
        k: Keys, shape (B, heads, N_k, d).
        v: Values, shape (B, 1, N_k, C), shared by the heads, or (B, heads, N_k, C).
        normaliser: Result of :func:`content_normaliser`.
        gate: Share of positional attention, shape (heads,).
        table: Result of ``positional_table``.
        grid: Both axes.
        statistics: Whether to compute the statistics.

    Returns:
        Output, shape (B, heads, N_q, C), in memory (B, N_q, heads, C); and, with ``statistics``,
        entropy and attention distance, both (B, heads, N_q), and the attention that each key
        receives, (B, heads, N_k).
    """
    batch, heads, n_q, dim = q.shape
    n_k, channels = v.shape[2:]
    q = launch.aligned(q)
    k = launch.aligned(k)
    v = launch.aligned(v)
    size = launch.blocks("mix", q, dim, channels)
    out = launch.empty(batch, n_q, heads, v.shape[3], like=v).transpose(1, 2)
    # A kernel needs a pointer for each argument, but does not use these without statistics.
    measured = (normaliser,) * 3
    padding = (normaliser,) * 2
    if statistics:
        entropy, distance = (launch.empty(batch, heads, n_q, like=normaliser) for _ in range(2))
        # Programs add to this tensor, so it starts from zeros.
        received = normaliser.new_zeros(batch, heads, n_k)
        measured = (entropy, distance, received)
        padding = padding_statistics(gate, table, grid)
    blocks_of_queries = triton.cdiv(n_q, size.queries)
    tiles_of_channels = triton.cdiv(channels, size.channels)
    programs = batch * heads * blocks_of_queries * tiles_of_channels
    rows = batch * heads * n_q
    scale = dim**-0.5 * LOG2E.value
    _mix[(programs,)](
        q, k, v, normaliser, gate, table, out,
        *measured,
        *padding,
        *launch.strides(q),
        *launch.strides(k),
        *launch.strides(v),
        *launch.strides(out),
        heads, n_q, n_k, rows, grid.x.length,
        scale=scale, dim=q.shape[3], channels=v.shape[3], STATISTICS=statistics,
        **launch.numerics(q.dtype),
        **size.tile(dim),
    )  # fmt: skip
    return out[..., :channels], measured if statistics else None
