"""Gated positional self-attention of one batch, before it meets the values (T-CNN paper, Eq. 7).

Everything that has such attention, our :class:`~tcnn_model.GPSA` and timm's ConViT layers, can be described by one
:class:`GatedAttention`; the layer applies it, a probe measures it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tcnn_model.positional import Axis, apply_separable

__all__ = ["GatedAttention"]

# Content attention is dense. With few keys it is cheaper to mix the two attentions and gather once than to gather
# twice and mix the outputs. Forward and backward on a CPU, 9 heads: 2.6 times at 196 keys and 512 channels, 2.5 at 400
# and 512, 1.5 at 784 and 256, but 0.5 at 3136 and 144.
_MIX_ATTENTION_BELOW = 4  # keys per channel


@dataclass(frozen=True)
class GatedAttention:
    """``A_h = (1 - gate_h) softmax(q k^T / sqrt(d)) + gate_h (rows_h (x) cols_h)``.

    The content part attends to real pixels only; the positional part to the real grid extended by the padding.

    Args:
        query: shape (B, heads, N_query, d).
        key: shape (B, heads, H * W, d).
        rows: positional attention along y, shape (heads, y.queries, y.keys).
        cols: positional attention along x, shape (heads, x.queries, x.keys).
        gate: sigma(lambda), the share of positional attention, shape (heads,).
        y: vertical axis.
        x: horizontal axis.
    """

    query: Tensor
    key: Tensor
    rows: Tensor
    cols: Tensor
    gate: Tensor
    y: Axis
    x: Axis

    @property
    def scale(self) -> float:
        """1 / sqrt(d)."""
        return float(self.query.shape[-1] ** -0.5)

    def content(self) -> Tensor:
        """Content attention over real pixels, dense, shape (B, heads, N_query, H * W)."""
        return torch.softmax((self.query * self.scale) @ self.key.transpose(-2, -1), dim=-1)

    def positional(self) -> Tensor:
        """Positional attention over the extended grid, dense, shape (heads, N_query, N_key)."""
        return _product(self.rows, self.cols)

    def dense(self) -> Tensor:
        """The whole attention A over the extended grid, shape (B, heads, N_query, N_key); rows sum to one.

        Keys are row-major over a grid of ``y.keys`` by ``x.keys`` pixels, padding included. For pictures and tests:
        the layer itself never forms this.
        """
        gate = self.gate[:, None, None]
        content = self.content().unflatten(-1, (self.y.length, self.x.length))
        beyond = (self.x.before, self.x.after, self.y.before, self.y.after)
        content = torch.nn.functional.pad(content, beyond).flatten(-2)
        return (1 - gate) * content + gate * self.positional()

    def apply(self, values: Tensor) -> Tensor:
        """A times the values, whose padding is zero.

        Args:
            values: shape (B, C, H, W), shared by all heads.

        Returns:
            shape (B, C, heads, y.queries, x.queries). With channels before heads this is the "soft" counterpart of
            ``torch.nn.functional.unfold``, so a convolution weight of shape (C_out, C_in, k_h, k_w) applies to it as
            it would to the unfolded image.
        """
        # Padding holds zeros: attention that falls on it counts for nothing, so those columns can be left out.
        rows = self.rows[..., self.y.before : self.y.before + self.y.length]
        cols = self.cols[..., self.x.before : self.x.before + self.x.length]
        content, gate = self.content(), self.gate[:, None, None]
        if content.shape[-1] <= _MIX_ATTENTION_BELOW * values.shape[1]:
            mixed = torch.lerp(content, _product(rows, cols).to(content.dtype), gate.to(content.dtype))
            return self._gather(mixed, values)
        positional = apply_separable(rows.to(values.dtype), cols.to(values.dtype), values)
        return torch.lerp(self._gather(content, values), positional, gate.to(values.dtype))

    def _gather(self, attention: Tensor, values: Tensor) -> Tensor:
        """(B, heads, N_query, H * W) times (B, C, H, W) -> (B, C, heads, y.queries, x.queries)."""
        gathered = values.flatten(2) @ attention.flatten(1, 2).transpose(1, 2).to(values.dtype)
        return gathered.unflatten(2, (len(self.gate), self.y.queries, self.x.queries))


def _product(rows: Tensor, cols: Tensor) -> Tensor:
    """Rows (x) cols: (heads, queries_y, H) and (heads, queries_x, W) -> (heads, N_query, H * W)."""
    return torch.einsum("hyj,hxi->hyxji", rows, cols).flatten(3).flatten(1, 2)
