"""Gaussian positional attention on a grid, kept as its two one-dimensional factors.

The positional logits of a head are ``-alpha * ||key - query - center||^2``. The squared norm is a sum over the two
axes, so the softmax over a rectangular grid is a product of two one-dimensional softmaxes::

    P[(y, x), (j, i)] = P_rows[y, j] * P_cols[x, i]

and no ``N x N`` tensor is needed to apply it (T-CNN paper, Eqs. 3-4 and 7, positional part).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Axis", "apply_separable", "gaussian_attention"]


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
        return torch.arange(self.queries, dtype=like.dtype, device=like.device) * self.stride + self.first_query

    def key_positions(self, like: Tensor) -> Tensor:
        """Key pixels, shape (keys,), with the dtype and device of ``like``."""
        return torch.arange(self.keys, dtype=like.dtype, device=like.device) - self.before


def gaussian_attention(locality_strength: Tensor, center: Tensor, axis: Axis) -> Tensor:
    """One-dimensional positional attention, one factor of the two-dimensional one.

    Args:
        locality_strength: alpha, shape (heads,).
        center: one coordinate of the centre of attention Delta, in pixels, shape (heads,).
        axis: the axis it runs along.

    Returns:
        softmax over keys of ``-alpha * (key - query - center)^2``, shape (heads, axis.queries, axis.keys).
    """
    offset = axis.key_positions(center)[None, :] - axis.query_positions(center)[:, None]
    return torch.softmax(-locality_strength[:, None, None] * (offset - center[:, None, None]) ** 2, dim=-1)


def apply_separable(rows: Tensor, cols: Tensor, values: Tensor) -> Tensor:
    """Apply ``rows (x) cols`` to a feature map without forming the product.

    Args:
        rows: shape (heads, queries_y, H).
        cols: shape (heads, queries_x, W).
        values: shape (B, C, H, W).

    Returns:
        shape (B, C, heads, queries_y, queries_x).
    """
    along_rows = torch.einsum("hyj,bcji->bchyi", rows, values)
    return torch.einsum("hxi,bchyi->bchyx", cols, along_rows)
