"""timm's attention of vision transformers, in which some heads are convolutions of their values."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_model.convolved.head_convolution import HeadConvolution
from tcnn_model.convolved.head_logits import (
    HeadLogits,
    QueriesAndKeys,
    logits_of_class,
    projection,
)
from tcnn_model.gpsa.attention import GatedAttention
from tcnn_model.gpsa.functional import attend
from tcnn_model.gpsa.positional import Axis
from tcnn_model.precision import widen

__all__ = ["ConvolvedAttention"]

Grid = tuple[int, int]


class ConvolvedAttention(nn.Module):
    """Attention of fewer heads, beside heads
    that are convolutions of their values, before one projection.

    Class and register tokens have no place on the grid. As queries they keep their own attention in
    all heads, for which the layer keeps queries and keys of the convolved heads; without such
    tokens these are dropped.

    Args:
        attention: timm's layer, whose modules and parameters are taken over where they are not
            divided by heads.
        heads: Indices of the heads that become convolutions.
        convolution: Their kernels, in the same order.
        grid: Rows and columns of patches; None for a square. If an image has another number of
            patches, these are taken to have the same proportions. Not used in layers that attend in
            windows.

    Attributes:
        num_heads: Number of all heads.
        convolved, attending: Indices of the heads that are convolutions, and of the others.
        grid: Rows and columns of patches, which may be changed for images of other proportions; of
            a window, in layers that attend in windows.
        in_windows: Whether the layer attends in windows.
        logits: Queries and keys of the attending heads, and what else their logits have; None
            without such heads.
        prefix_logits: Those of the convolved heads, for class and register tokens as queries; None
            without such tokens.
        value: Values of all heads.
        convolution: The :class:`HeadConvolution`.
        softmax: Softmax of the kernels in windows, or of ``prefix_logits``.
        norm, gate, proj: Those of timm's layer.

    Shape:
        (B, N, C) -> (B, N, C_out), class and register tokens first, then the patches row by row; B
        counts windows in layers that attend in windows.

    Raises:
        ValueError: In the forward, if the patches are on no grid of these proportions, or there is
            a mask other than that of windows.
    """

    def __init__(
        self,
        attention: Any,
        heads: Sequence[int],
        convolution: HeadConvolution,
        grid: Grid | None = None,
    ) -> None:
        super().__init__()
        kind = logits_of_class(type(attention))
        assert kind is not None
        self.num_heads: int = attention.num_heads
        self.convolved = tuple(heads)
        self.attending = tuple(head for head in range(self.num_heads) if head not in self.convolved)
        self.in_windows = kind.in_windows
        self.grid = attention.window_size if self.in_windows else grid
        self.convolution = convolution
        prefix = convolution.prefix_theta
        self.prefix_tokens = 0 if prefix is None else prefix.shape[1]
        groups = getattr(attention, "num_kv_heads", self.num_heads)
        self.value = projection(attention, "v", range(groups))
        self.head_dim = self.value.out_features // groups
        self.logits: HeadLogits | None = None
        if self.attending:
            self.logits = kind(attention, self.attending)
        self.prefix_logits: HeadLogits | None = None
        if self.prefix_tokens:
            self.prefix_logits = kind(attention, self.convolved, self.prefix_tokens)
        self.softmax = nn.Softmax(-1)
        self.attn_drop = attention.attn_drop
        self.norm = getattr(attention, "norm", None) or nn.Identity()
        self.gate = getattr(attention, "gate", None)  # from timm 1.0.27 on
        self.proj, self.proj_drop = attention.proj, attention.proj_drop
        sharing = self.num_heads // groups  # heads with the same values in grouped attention
        device = self.value.weight.device
        for name, places in (
            ("_of_attending", [head // sharing for head in self.attending]),
            ("_of_convolved", [head // sharing for head in self.convolved]),
            (
                "_order",
                [[*self.attending, *self.convolved].index(i) for i in range(self.num_heads)],
            ),
        ):
            self.register_buffer(name, torch.tensor(places, dtype=torch.long, device=device), False)
        self._of_attending: Tensor
        self._of_convolved: Tensor
        self._order: Tensor
        self.train(attention.training)

    def forward(
        self,
        x: Tensor,
        *,
        rope: Tensor | None = None,
        mask: Tensor | None = None,
        shared_rel_pos_bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: Tokens, shape (B, N, C).
            rope: Rotary positions, as for EVA's layers.
            mask: Mask of the windows of an image, as for Swin's layers, (windows, N, N).
            shared_rel_pos_bias: Bias of all layers, as for BEiT's, (heads, N, N).
            attn_mask, is_causal: Refused, because a convolution sees the whole grid.
        """
        if attn_mask is not None or is_causal:
            raise ValueError(
                "expected no attention mask: heads that are convolutions see all patches of their "
                "kernel"
            )
        values = self.value(x).unflatten(-1, (-1, self.head_dim))  # (B, N, heads, d)
        convolved = values.index_select(2, self._of_convolved)
        outputs = [
            self._convolve_in_windows(convolved, mask)
            if self.in_windows
            else self._convolve(x, convolved, rope, shared_rel_pos_bias)
        ]
        if self.logits is not None:
            by_head = values.index_select(2, self._of_attending).transpose(1, 2)
            parts = self.logits(x, rope, shared_rel_pos_bias, mask)
            attended = self._attend(parts, by_head, self.logits.scale)
            outputs.insert(0, attended.transpose(1, 2))
        # In the order of the original heads.
        return self.project(torch.cat(outputs, 2).index_select(2, self._order), x)

    def project(self, heads: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output for outputs of all heads, (B, N, heads, d), and its input x."""
        side_by_side = self.norm(heads.flatten(2))
        if self.gate is not None:
            side_by_side = side_by_side * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(side_by_side))

    def values_by_head(self, values: Tensor) -> Tensor:
        """Return the output of ``value`` as the values of all heads, (B, heads, N, d)."""
        sharing = self.num_heads * self.head_dim // self.value.out_features
        by_head = values.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return by_head.repeat_interleave(sharing, 1)

    def axes(self, tokens: int) -> tuple[Axis, Axis]:
        """Return the axes of the grid of an image, or of a window, with this number of tokens.

        Raises:
            ValueError: There are not as many patches on a grid of the layer's proportions.
        """
        patches = tokens - self.prefix_tokens
        rows, columns = self.grid or (1, 1)
        factor = 1.0 if self.in_windows else math.sqrt(patches / (rows * columns))
        size = round(rows * factor), round(columns * factor)
        if size[0] * size[1] != patches:
            raise ValueError(
                f"expected patches on a grid with the proportions of {rows} x {columns}, got "
                f"{patches}: for images of other proportions set `grid`, (rows, columns) of "
                "patches, of each ConvolvedAttention"
            )
        return Axis(size[0]), Axis(size[1])

    def _attend(
        self, parts: QueriesAndKeys | GatedAttention, values: Tensor, scale: float
    ) -> Tensor:
        """Return the outputs of the attending heads, (B, heads, N, d)."""
        if isinstance(parts, GatedAttention):
            return attend(parts, values)
        return F.scaled_dot_product_attention(
            parts.query,
            parts.key,
            values,
            attn_mask=None if parts.bias is None else parts.bias.to(parts.query.dtype),
            dropout_p=self.attn_drop.p if self.training else 0.0,
            scale=scale,
        )

    def _convolve_in_windows(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of the convolved heads in each window, like :meth:`_convolve`."""
        theta = widen(self.convolution.logits(*self.axes(values.shape[1])))[None]
        # With the few tokens of a window, a matrix costs no more than a large kernel does, a fifth
        # of attention, and it takes any mask.
        weights = self.softmax(theta if mask is None else theta + mask[:, None]).to(values.dtype)
        by_window = values.unflatten(0, (-1, len(weights)))  # all are alike without a mask
        return torch.einsum("whqk,bwkhd->bwqhd", weights, by_window).flatten(0, 1)

    def _convolve(
        self, x: Tensor, values: Tensor, rope: Tensor | None, shared_bias: Tensor | None
    ) -> Tensor:
        """Return the outputs of the convolved heads, (B, N, heads, d)."""
        y, x_axis = self.axes(x.shape[1])
        prefix, patches = values.flatten(2).tensor_split([self.prefix_tokens], 1)
        maps = patches.unflatten(1, (y.length, x_axis.length)).permute(0, 3, 1, 2)
        outputs = self.convolution(maps, y, x_axis, prefix)
        tokens = outputs.permute(0, 2, 3, 1).flatten(1, 2).unflatten(2, values.shape[2:])
        if self.prefix_logits is None:
            return tokens
        weights = self.softmax(self.prefix_logits.logits(x, rope, shared_bias))
        attended = weights.to(values.dtype) @ values.transpose(1, 2)
        return torch.cat([attended.transpose(1, 2), tokens], 1)
