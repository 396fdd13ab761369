"""Gaussian positional attention on a grid, kept as its two one-dimensional factors.

The positional logits of a head are ``-alpha * ||key - query - center||^2``. The squared norm is a sum over the two
axes, so the softmax over a rectangular grid is a product of two one-dimensional softmaxes::

    P[(y, x), (j, i)] = P_rows[y, j] * P_cols[x, i]

and no ``N x N`` tensor is needed to apply it (T-CNN paper, Eqs. 3-4 and 7, positional part).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Axis", "apply_separable", "gaussian_attention"]


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution-like layer: which pixels ask, and which are looked at.

    Positions are in input pixels. Query ``n`` sits at pixel ``n * stride``; keys are the pixels
    ``-padding, ..., length - 1 + padding``, of which those outside ``[0, length)`` hold zeros.

    Args:
        length: pixels of the input along this axis.
        stride: pixels between neighbouring queries.
        padding: zero pixels on either side.
        extent: pixels spanned by the kernel, ``dilation * (kernel_size - 1) + 1``.
    """

    length: int
    stride: int = 1
    padding: int = 0
    extent: int = 1

    @property
    def queries(self) -> int:
        """Number of query positions: the convolution's output size (can be <= 0 if the kernel does not fit)."""
        return (self.length + 2 * self.padding - self.extent) // self.stride + 1

    @property
    def keys(self) -> int:
        """Number of key positions, padding included."""
        return self.length + 2 * self.padding

    def query_positions(self, like: Tensor) -> Tensor:
        """Query pixels, shape (queries,), with the dtype and device of ``like``."""
        return torch.arange(self.queries, dtype=like.dtype, device=like.device) * self.stride

    def key_positions(self, like: Tensor) -> Tensor:
        """Key pixels, shape (keys,), with the dtype and device of ``like``."""
        return torch.arange(self.keys, dtype=like.dtype, device=like.device) - self.padding


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
