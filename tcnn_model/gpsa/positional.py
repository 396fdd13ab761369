"""Positional attention on a grid, kept as its two one-dimensional factors.

The positional logits of a head, ``v_pos . (||delta||^2, delta_1, delta_2)`` for a key at ``delta`` from the query, are
a sum over the two axes, so their softmax over a rectangular grid is a product of two one-dimensional softmaxes::

    P[(y, x), (j, i)] = P_rows[y, j] * P_cols[x, i]

and no ``N x N`` tensor is needed to apply it (T-CNN paper, Eqs. 3-4 and 7, positional part).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tcnn_model.gpsa.precision import widest

__all__ = ["Axis", "Padding", "apply_separable", "axes", "gaussian_position", "positional_factors"]

Pair = tuple[int, int]
Padding = Pair | Literal["same"]


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution-like layer: which pixels ask, and which are looked at.

    Positions are in input pixels. Query ``n`` sits at pixel ``first_query + n * stride``; keys are the pixels
    ``-before, ..., length - 1 + after``, of which those outside ``[0, length)`` hold zeros.

    Args:
        length: pixels of the input along this axis.
        stride: pixels between neighbouring queries.
        padding: zero pixels on either side; or "same", TensorFlow's rule: as few as give ``ceil(length / stride)``
            queries, the odd one behind.
        extent: pixels spanned by the kernel, ``dilation * (kernel_size - 1) + 1``.
    """

    length: int
    stride: int = 1
    padding: int | Literal["same"] = 0
    extent: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no axis."""
        padding = 0 if self.padding == "same" else self.padding
        for number, least in ((self.length, 0), (padding, 0), (self.stride, 1), (self.extent, 1)):
            if not isinstance(number, (int, torch.SymInt)) or number < least:
                raise ValueError(
                    "expected length and padding of at least 0 (or padding 'same'), stride and extent of at least 1, "
                    f"all integers; got {self}"
                )

    @property
    def before(self) -> int:
        """Zero pixels before the first pixel."""
        return self._same // 2 if isinstance(self.padding, str) else self.padding

    @property
    def after(self) -> int:
        """Zero pixels after the last pixel."""
        return self._same - self._same // 2 if isinstance(self.padding, str) else self.padding

    @property
    def _same(self) -> int:
        return max(0, (math.ceil(self.length / self.stride) - 1) * self.stride + self.extent - self.length)

    @property
    def queries(self) -> int:
        """Number of query positions: the convolution's output size (can be <= 0 if the kernel does not fit)."""
        return (self.keys - self.extent) // self.stride + 1

    @property
    def keys(self) -> int:
        """Number of key positions, padding included."""
        return self.length + self.before + self.after

    @property
    def first_query(self) -> int:
        """Pixel of the first query: 0, but with "same" the centre of the kernel, wherever the padding moves it."""
        return (self.extent - 1) // 2 - self.before if isinstance(self.padding, str) else 0

    def query_positions(self, like: Tensor) -> Tensor:
        """Query pixels, shape (queries,), with the dtype and device of ``like``."""
        first, step = self.first_query, self.stride
        return torch.arange(first, first + self.queries * step, step, dtype=like.dtype, device=like.device)

    def key_positions(self, like: Tensor) -> Tensor:
        """Key pixels, shape (keys,), with the dtype and device of ``like``."""
        return torch.arange(-self.before, self.length + self.after, dtype=like.dtype, device=like.device)


def axes(size: Pair, kernel_size: Pair, stride: Pair, padding: Padding, dilation: Pair) -> tuple[Axis, Axis]:
    """The vertical and the horizontal axis of a convolution-like layer on a map of ``size`` (H, W)."""
    py, px = (padding, padding) if isinstance(padding, str) else padding
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, kernel_size, strict=True)]
    return Axis(size[0], stride[0], py, extents[0]), Axis(size[1], stride[1], px, extents[1])


def gaussian_position(locality_strength: Tensor, center: Tensor) -> Tensor:
    """The papers' v_pos of a Gaussian around a centre: ``v_pos · r = -alpha ||delta - Delta||^2 + const`` (Eq. 4).

    Args:
        locality_strength: alpha, shape (heads,).
        center: Delta as (dy, dx), shape (heads, 2).

    Returns:
        ``-alpha (1, -2 Delta_1, -2 Delta_2)``, shape (heads, 3).
    """
    return -locality_strength[:, None] * torch.cat([torch.ones_like(center[:, :1]), -2 * center], dim=1)


def positional_factors(
    position: Tensor,
    y: Axis,
    x: Axis,
    *,
    logarithm: bool = False,
    padding: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The two one-dimensional factors of ``softmax_j(v_pos · r_ij)``.

    They are computed in float64 where the device has it: logits grow with the square of the distance, and it is their
    differences that decide.

    Args:
        position: v_pos, the weights of r = (||delta||^2, delta_1, delta_2), shape (heads, 3).
        y, x: the two axes.
        logarithm: whether to return the factors' logarithms.
        padding: whether to return the columns of the padding too.
        dtype: of the result, if not that of the computation.

    Returns:
        rows, shape (heads, y.queries, y.keys), and cols, shape (heads, x.queries, x.keys): distributions over the keys,
        padding included.
    """
    squared, along_y, along_x = widest(position)[:, :, None, None].unbind(1)
    normalize = torch.log_softmax if logarithm else torch.softmax

    def factor(linear: Tensor, axis: Axis) -> Tensor:
        offset = axis.key_positions(squared) - axis.query_positions(squared)[:, None]
        on_grid = normalize((squared * offset + linear) * offset, -1)
        whole = padding or axis.keys == axis.length
        return (on_grid if whole else on_grid.narrow(-1, axis.before, axis.length)).to(dtype or squared.dtype)

    # Both at once: of 14 x 14 tokens it is the number of operations that takes the time. Not where it would have to be
    # compiled for square images and for others.
    if not torch.compiler.is_compiling() and y == x:
        rows, cols = factor(torch.stack([along_y, along_x]), y)
        return rows, cols
    return factor(along_y, y), factor(along_x, x)


def apply_separable(rows: Tensor, cols: Tensor, values: Tensor) -> Tensor:
    """Apply ``rows (x) cols`` to values without forming the product: O(N (H + W)) instead of O(N^2).

    Args:
        rows: shape (heads, queries_y, H).
        cols: shape (heads, queries_x, W).
        values: shape (B, 1, H, W, C), shared by the heads, or (B, heads, H, W, C).

    Returns:
        shape (B, heads, queries_y, queries_x, C).
    """
    if values.shape[1] == 1:  # with channels first in memory, as feature maps have them
        along_rows = torch.einsum("hyj,bjic->bchyi", rows, values[:, 0])
        return torch.einsum("hxi,bchyi->bchyx", cols, along_rows).permute(0, 2, 3, 4, 1)
    batch, heads, height, width, channels = values.shape
    queries_y, queries_x = rows.shape[1], cols.shape[1]
    columns = values.permute(1, 2, 0, 3, 4).reshape(heads, height, batch * width * channels)
    along_rows = (rows @ columns).view(heads, queries_y, batch, width, channels)
    across = along_rows.permute(0, 3, 2, 1, 4).reshape(heads, width, batch * queries_y * channels)
    return (cols @ across).view(heads, queries_x, batch, queries_y, channels).permute(2, 0, 3, 1, 4)
