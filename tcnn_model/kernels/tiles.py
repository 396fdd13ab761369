"""Functions on tiles that all kernels share (Triton).

All logarithms are to base 2, which the hardware computes directly.
"""

# ruff: noqa: N803 (Triton's compile-time constants are upper case)
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

# Names that all kernels share, which are short so that an equation fits on a line:
# - b, h, bh: image, head, and both as one index. m: queries of the program's tile; n: keys;
#   clamped: m, but at most the last query, so that values read there are finite and can be masked.
# - d: channels of queries and keys; c: channels of values.
# - q_b, q_h, q_n: strides of q from image to image, head to head and token to token, in units of
#   UNIT elements; likewise for k, v and o (the output, or its gradient).
# - n_q, n_k: numbers of queries and keys; rows: number of queries in all images and heads, which is
#   the distance between the two tables in content (highest logits, sums).
# - s: content logits; p: position logits, or their exponentials; a: attention; da, ds: gradients.
# - ty, tx: offset from a query's reference to a key; dy, dx: offset from the query to the key; uy,
#   ux: ty, tx minus their means.

LOG2E = tl.constexpr(1.4426950408889634)

# Rows of the table of tables.py, (heads, TABLE, N_q): the parameters of a query's positional
# attention.
REFERENCE_Y = tl.constexpr(0)  # pixel of the highest positional attention
REFERENCE_X = tl.constexpr(1)
# Logit of a key t pixels from the reference: t (curvature t + slope), along each axis.
SLOPE_Y = tl.constexpr(2)
SLOPE_X = tl.constexpr(3)
CURVATURE = tl.constexpr(4)
NORMALISER = tl.constexpr(5)  # -log2 of the sum over keys of both axes
MEAN_Y = tl.constexpr(6)  # expected t_y and t_x, and the sum of their variances
MEAN_X = tl.constexpr(7)
VARIANCE = tl.constexpr(8)
OFFSET_Y = tl.constexpr(9)  # reference - query
OFFSET_X = tl.constexpr(10)
ENTROPY = tl.constexpr(11)  # of the positional attention, bits
TABLE = tl.constexpr(12)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return ``acc + a @ b``."""
    # Triton's interpreter stores bfloat16 as integers and would multiply these, so operands are
    # converted.
    if INTERPRETED:
        a = a.to(acc.dtype)
        b = b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def product(left, right, ACC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return ``left @ right^T``."""
    zeros = tl.zeros((left.shape[0], right.shape[0]), ACC)
    return dot(left, tl.trans(right), zeros, PRECISION, INTERPRETED)


@triton.jit
def place_of_program(index, count, heads, BLOCK: tl.constexpr):
    """Return image, head, both as one index,
    and the first of the program's ``BLOCK`` tokens out of ``count``.
    """
    blocks = tl.cdiv(count, BLOCK)
    # 64 bits are needed because the offset of a head is this index times a stride.
    bh = (index // blocks).to(tl.int64)
    start = (index % blocks) * BLOCK
    return bh // heads, bh % heads, bh, start


@triton.jit
def block(base, start, last, stride, BLOCK: tl.constexpr):
    """Return pointers to ``BLOCK`` rows from ``start``."""
    # Rows past the last repeat the last, so that values to be masked are finite: 0 * NaN is NaN,
    # not 0.
    rows = tl.minimum(start + tl.arange(0, BLOCK), last) - start
    return base + tl.cast(start, tl.int64) * stride + rows * stride


@triton.jit
def load_tile(base, start, last, stride, columns, count, ROWS: tl.constexpr):
    """Load ``ROWS`` rows from ``start``, with zeros in the columns from ``count`` on."""
    rows = block(base, start, last, stride, ROWS)
    places = rows[:, None] + columns[None, :]
    return tl.load(places, mask=(columns < count)[None, :], other=0.0)


@triton.jit
def store_tile(base, start, columns, width, tile, valid):
    """Store a tile in rows of ``width`` elements,
    from row ``start`` of ``base``, in its valid rows and columns.
    """
    rows = base + start * width + tl.arange(0, tile.shape[0]) * width
    places = rows[:, None] + columns[None, :]
    written = valid[:, None] & (columns < width)[None, :]
    tl.store(places, tile.to(base.dtype.element_ty), mask=written)


@triton.jit
def log2_of(x):
    """Return log2, with -inf at 0."""
    # NumPy, on which the interpreter runs, warns of a logarithm of 0 even if tl.where discards the
    # result.
    positive = tl.where(x > 0, x, 1.0)
    return tl.where(x > 0, tl.log2(positive), float("-inf"))


@triton.jit
def key_pixels(start, last, width, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Return the pixels (y, x) of the row-major keys from ``start``."""
    # The quotient is half a pixel from the steps of floor(), so float32 gives the exact row for up
    # to 2^22 keys.
    n = tl.minimum(start + tl.arange(0, BLOCK), last).to(tl.float32)
    y = tl.floor((n + 0.5) * (1.0 / width))
    return y.to(ACC), (n - y * width).to(ACC)


@triton.jit
def query_tables(table, m, n_q):
    """Load the reference pixel, slopes, curvature and normaliser of the queries ``m``."""
    return (
        tl.load(table + REFERENCE_Y * n_q + m),
        tl.load(table + REFERENCE_X * n_q + m),
        tl.load(table + SLOPE_Y * n_q + m),
        tl.load(table + SLOPE_X * n_q + m),
        tl.load(table + CURVATURE * n_q),
        tl.load(table + NORMALISER * n_q + m),
    )


@triton.jit
def position_logits(ty, tx, slope_y, slope_x, curvature, normaliser):
    """Return log2 P of keys ``t`` pixels from the reference."""
    # Logits relative to the reference are small where P is large, so that float32 keeps P within a
    # few ulp.
    along_y = ty * (curvature * ty + slope_y)
    along_x = tx * (curvature * tx + slope_x)
    return along_y + (along_x + normaliser)
