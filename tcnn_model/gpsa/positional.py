"""Positional attention on a grid, kept as its two one-dimensional factors.

The positional logits of a head, ``v_pos . (||delta||^2, delta_1, delta_2)`` for a key at ``delta``
from the query, are a sum over the two axes, so their softmax over a rectangular grid is a product
of two one-dimensional softmaxes::

    P[(y, x), (j, i)] = P_rows[y, j] * P_cols[x, i]

and no ``N x N`` tensor is needed to apply it (T-CNN paper, Eqs. 3-4 and 7, positional part).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tcnn_model.precision import widest

__all__ = [
    "Axis",
    "Padding",
    "apply_separable",
    "axes",
    "gaussian_position",
    "is_jit_tracing",
    "positional_factors",
    "traces_sizes",
]

Pair = tuple[int, int]
Padding = Pair | Literal["same"]


def traces_sizes() -> bool:
    """Return whether sizes stand for those of any input,
    because torch.jit.trace or torch.export is running.
    """
    # A branch on a size would then hold for the example's size only. Under torch.compile it is a
    # guard.
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return is_jit_tracing()


def is_jit_tracing() -> bool:
    """Return whether torch.jit.trace is running."""
    # torch 2.11 cannot compile the second question.
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution-like layer: the pixels of its queries and of its keys.

    Positions are in input pixels. Query ``n`` sits at pixel ``first_query + n * stride``; keys are
    the pixels ``-before, ..., length - 1 + after``, where pixels outside ``[0, length)`` are zero.

    Args:
        length: Number of pixels of the input along this axis.
        stride: Distance between neighbouring queries in pixels.
        padding: Number of zero pixels on either side; or "same", TensorFlow's rule: the fewest that
            give ``ceil(length / stride)`` queries, with an odd pixel at the end.
        extent: Number of pixels spanned by the kernel, ``dilation * (kernel_size - 1) + 1``.

    Raises:
        ValueError: If a number is not an integer or is too small.
    """

    length: int
    stride: int = 1
    padding: int | Literal["same"] = 0
    extent: int = 1

    def __post_init__(self) -> None:
        """Raise unless the numbers describe an axis."""
        if traces_sizes():
            return
        padding = 0 if self.padding == "same" else self.padding
        for number, minimum in (
            (self.length, 0),
            (padding, 0),
            (self.stride, 1),
            (self.extent, 1),
        ):
            # Sizes are SymInt while torch.compile traces with dynamic shapes.
            if not isinstance(number, (int, torch.SymInt)) or number < minimum:
                raise ValueError(
                    "expected length and padding of at least 0 (or padding 'same'), stride and "
                    f"extent of at least 1, all integers; got {self}"
                )

    @property
    def before(self) -> int:
        """Number of zero pixels before the first pixel."""
        return self._same // 2 if isinstance(self.padding, str) else self.padding

    @property
    def after(self) -> int:
        """Number of zero pixels after the last pixel."""
        return self._same - self._same // 2 if isinstance(self.padding, str) else self.padding

    @property
    def _same(self) -> int:
        """Number of zero pixels that "same" padding adds in total."""
        # The extent, minus the pixels from the last query on, of which there are 1 to stride. It is
        # negative only if pixels lie between the kernels of neighbouring queries.
        total = self.extent - 1 - (self.length - 1) % self.stride
        # max(0, total) without a branch, which a traced graph would not have.
        return total if self.extent >= self.stride else (total + abs(total)) // 2

    @property
    def queries(self) -> int:
        """Number of query positions: the convolution's output size (can be <= 0 if the kernel does
        not fit).
        """
        return (self.keys - self.extent) // self.stride + 1

    @property
    def keys(self) -> int:
        """Number of key positions, padding included."""
        return self.length + self.before + self.after

    @property
    def first_query(self) -> int:
        """Pixel of the first query.

        It is 0 with numeric padding. With "same" padding, whose width depends on the image size, it
        is the pixel under the centre of the kernel.
        """
        return (self.extent - 1) // 2 - self.before if isinstance(self.padding, str) else 0

    def query_positions(self, like: Tensor) -> Tensor:
        """Return the query pixels, shape (queries,), with the dtype and device of ``like``."""
        first = self.first_query
        end = first + self.queries * self.stride
        return torch.arange(first, end, self.stride, dtype=like.dtype, device=like.device)

    def key_positions(self, like: Tensor) -> Tensor:
        """Return the key pixels, shape (keys,), with the dtype and device of ``like``."""
        return torch.arange(
            -self.before, self.length + self.after, dtype=like.dtype, device=like.device
        )


def axes(
    size: Pair, kernel_size: Pair, stride: Pair, padding: Padding, dilation: Pair
) -> tuple[Axis, Axis]:
    """Return the vertical and the horizontal axis
    of a convolution-like layer on a map of ``size`` (H, W).
    """
    paddings = (padding, padding) if isinstance(padding, str) else padding
    taps = zip(dilation, kernel_size, strict=True)
    extents = [step * (count - 1) + 1 for step, count in taps]
    y, x = map(Axis, size, stride, paddings, extents)
    return y, x


def gaussian_position(locality_strength: Tensor, center: Tensor) -> Tensor:
    """Return v_pos of a Gaussian around a centre:
    ``v_pos · r = -alpha ||delta - Delta||^2 + const`` (Eq. 4).

    Args:
        locality_strength: alpha, shape (heads,).
        center: Delta as (dy, dx), shape (heads, 2).

    Returns:
        ``-alpha (1, -2 Delta_1, -2 Delta_2)``, shape (heads, 3).
    """
    return -locality_strength[:, None] * torch.cat(
        [torch.ones_like(center[:, :1]), -2 * center], dim=1
    )


def positional_factors(
    position: Tensor,
    y: Axis,
    x: Axis,
    *,
    logarithm: bool = False,
    padding: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the two one-dimensional factors of ``softmax_j(v_pos · r_ij)``.

    The factors are computed in float64 where the device supports it: logits grow with the square of
    the distance, but the softmax depends on their differences.

    Args:
        position: v_pos, the weights of r = (||delta||^2, delta_1, delta_2), shape (heads, 3).
        y: Vertical axis.
        x: Horizontal axis.
        logarithm: Whether to return the logarithms of the factors.
        padding: Whether to return the keys on the padding, too.
        dtype: Dtype of the result; by default that of the computation.

    Returns:
        Rows, shape (heads, y.queries, y.keys), and columns, shape (heads, x.queries, x.keys). With
        the padding they are distributions over the keys.
    """
    squared, along_y, along_x = widest(position)[:, :, None, None].unbind(1)
    normalize = torch.log_softmax if logarithm else torch.softmax

    def factor(linear: Tensor, axis: Axis) -> Tensor:
        offset = axis.key_positions(squared) - axis.query_positions(squared)[:, None]
        # w_0 delta^2 + w_i delta of one axis, by Horner's rule.
        attention = normalize((squared * offset + linear) * offset, -1)
        if not padding:
            # The padding is cut off after the softmax, because attention to the padding counts in
            # its normalisation. Whether "same" adds padding depends on the size: a view of all
            # keys, or of some, would be a branch on it.
            pixels = torch.arange(axis.length, device=squared.device) + axis.before
            attention = attention.index_select(-1, pixels)
        return attention.to(dtype or squared.dtype)

    # On equal axes both factors are computed at once: at 14 x 14 tokens the number of operations,
    # not their size, takes the time. In a traced graph this branch would give one graph for square
    # images and another for the rest.
    if not (traces_sizes() or torch.compiler.is_compiling()) and y == x:
        rows, cols = factor(torch.stack([along_y, along_x]), y)
        return rows, cols
    return factor(along_y, y), factor(along_x, x)


def apply_separable(rows: Tensor, cols: Tensor, values: Tensor) -> Tensor:
    """Apply ``rows (x) cols`` to values without forming the product:
    O(N (H + W)) instead of O(N^2).

    Args:
        rows: Positional attention along y, shape (heads, queries_y, H).
        cols: Positional attention along x, shape (heads, queries_x, W).
        values: Values, shape (B, 1, H, W, C), shared by the heads, or (B, heads, H, W, C).

    Returns:
        Output of shape (B, heads, queries_y, queries_x, C).
    """
    if values.shape[1] == 1:
        # Shared values come from a feature map, whose channels are first in memory. Keeping this
        # order avoids copies.
        along_rows = torch.einsum("hyj,bjic->bchyi", rows, values[:, 0])
        return torch.einsum("hxi,bchyi->bchyx", cols, along_rows).permute(0, 2, 3, 4, 1)
    batch, heads, height, width, channels = values.shape
    queries_y = rows.shape[1]
    queries_x = cols.shape[1]
    # One matrix product per head and axis, in which all other dimensions are flattened into
    # columns.
    columns = values.permute(1, 2, 0, 3, 4).reshape(heads, height, batch * width * channels)
    along_rows = (rows @ columns).view(heads, queries_y, batch, width, channels)
    columns = along_rows.permute(0, 3, 2, 1, 4).reshape(heads, width, batch * queries_y * channels)
    output = (cols @ columns).view(heads, queries_x, batch, queries_y, channels)
    return output.permute(2, 0, 3, 1, 4)
