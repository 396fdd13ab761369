"""timm's attention of vision transformers, in which some heads are convolutions of their values."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_model.convolved.head_convolution import HeadConvolution
from tcnn_model.gpsa.positional import Axis

if TYPE_CHECKING:
    from timm.layers import Attention  # recording needs no timm

__all__ = ["ConvolvedAttention"]

Grid = tuple[int, int]


class ConvolvedAttention(nn.Module):
    """Fused attention of fewer heads, beside heads
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
            patches, these are taken to have the same proportions.

    Attributes:
        num_heads: Number of all heads.
        convolved, attending: Indices of the heads that are convolutions, and of the others.
        grid: Rows and columns of patches, which may be changed for images of other proportions.
        qkv: Queries, keys and values of the attending heads, followed by the values of the
            convolved ones.
        query, key: Queries and keys of the convolved heads, for class and register tokens; None
            without such tokens.
        convolution: The :class:`HeadConvolution`.
        q_norm, k_norm, norm, gate, proj: Those of timm's layer.

    Shape:
        (B, N, C) -> (B, N, C_out), class and register tokens first, then the patches row by row.

    Raises:
        ValueError: In the forward, if the patches are on no grid of these proportions, or there is
            a mask.
    """

    def __init__(
        self,
        attention: "Attention",
        heads: Sequence[int],
        convolution: HeadConvolution,
        grid: Grid | None = None,
    ) -> None:
        super().__init__()
        self.num_heads: int = attention.num_heads
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scale
        self.grid = grid
        self.convolved = tuple(heads)
        self.attending = tuple(head for head in range(self.num_heads) if head not in self.convolved)
        self.convolution = convolution
        prefix = convolution.prefix_theta
        self.prefix_tokens = 0 if prefix is None else prefix.shape[1]
        blocks = [(block, self.attending) for block in range(3)]
        self.qkv = _of_heads(attention, [*blocks, (2, self.convolved)])
        self.query = self.key = None
        if self.prefix_tokens:
            self.query = _of_heads(attention, [(0, self.convolved)])
            self.key = _of_heads(attention, [(1, self.convolved)])
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        if self.key is not None and self._folds_keys:
            # The bias of the keys changes all logits of a query alike, and would never get a
            # gradient.
            self.key.register_parameter("bias", None)
        self.attn_drop = attention.attn_drop
        self.norm = attention.norm
        self.gate = getattr(attention, "gate", None)  # from timm 1.0.27 on
        self.proj, self.proj_drop = attention.proj, attention.proj_drop
        order = torch.tensor([*self.attending, *self.convolved]).argsort()
        self.register_buffer("_order", order.to(self.qkv.weight.device), False)
        self._order: Tensor
        self.train(attention.training)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Apply the layer; a mask is refused, because a convolution sees the whole grid."""
        if attn_mask is not None or is_causal:
            raise ValueError(
                "expected no attention mask: heads that are convolutions see all patches of their "
                "kernel"
            )
        query, key, values, convolved_values = self._projections(x)
        outputs = [self._convolve(x, convolved_values)]
        if self.attending:
            query, key, values = map(self._by_head, (query, key, values))
            attended = F.scaled_dot_product_attention(
                self.q_norm(query),
                self.k_norm(key),
                values,
                dropout_p=self.attn_drop.p if self.training else 0.0,
                scale=self.scale,
            )
            outputs.insert(0, attended.transpose(1, 2))
        # (B, N, heads, d), in the order of the original heads
        by_head = torch.cat(outputs, 2).index_select(2, self._order)
        return self.project(by_head, x)

    def project(self, heads: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output for outputs of all heads, (B, N, heads, d), and its input x."""
        side_by_side = self.norm(heads.flatten(2))
        if self.gate is not None:
            side_by_side = side_by_side * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(side_by_side))

    def size(self, patches: int) -> Grid:
        """Return the rows and columns of patches.

        Raises:
            ValueError: There are not as many patches on a grid of the layer's proportions.
        """
        rows, columns = self.grid or (1, 1)
        factor = math.sqrt(patches / (rows * columns))
        size = round(rows * factor), round(columns * factor)
        if size[0] * size[1] != patches:
            raise ValueError(
                f"expected patches on a grid with the proportions of {rows} x {columns}, got "
                f"{patches}: for images of other proportions set `grid`, (rows, columns) of "
                "patches, of each ConvolvedAttention"
            )
        return size

    @torch.no_grad()
    def as_softmax(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return all heads as softmax(scale * q k^T + bias) of values, for recorders and tests.

        Args:
            x: Input of the layer, shape (B, N, C).

        Returns:
            Queries and keys, which are zero where a head is a convolution, and values, shape (B,
            heads, N, d), and the bias, (heads, N, N), which is zero elsewhere. Heads are in their
            original order.
        """
        query, key, values, convolved_values = self._projections(x)
        y, x_axis = self._axes(x)
        prefix = self.prefix_tokens
        shape = len(x), len(self.convolved), x.shape[1], self.head_dim
        parts = [x.new_zeros(shape, dtype=values.dtype) for _ in range(2)]
        if self.query is not None and self.key is not None:
            own = self.q_norm(self._by_head(self.query(x[:, :prefix])))
            parts[0][:, :, :prefix] = own
            parts[1] = self.k_norm(self._by_head(self.key(x)))
        bias = values.new_zeros(self.num_heads, x.shape[1], x.shape[1])
        bias[list(self.convolved), prefix:] = self.convolution.logits(y, x_axis).to(bias)
        parts.append(self._by_head(convolved_values))
        if self.attending:
            query, key, values = map(self._by_head, (query, key, values))
            attending = self.q_norm(query), self.k_norm(key), values
            parts = [torch.cat(halves, 1) for halves in zip(attending, parts, strict=True)]
        query, key, values = (part.index_select(1, self._order) for part in parts)
        return query, key, values, bias

    @property
    def _folds_keys(self) -> bool:
        """Whether logits of class tokens are products
        of their queries with the tokens themselves, q W_key x.
        """
        return type(self.k_norm) is nn.Identity

    def _projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the attending heads,
        and values of the others, (B, N, heads * d).
        """
        count, convolved = len(self.attending), len(self.convolved)
        sizes = [heads * self.head_dim for heads in (count, count, count, convolved)]
        query, key, values, convolved_values = self.qkv(x).split(sizes, -1)
        return query, key, values, convolved_values

    def _convolve(self, x: Tensor, values: Tensor) -> Tensor:
        """Return the outputs of the convolved heads, (B, N, heads, d)."""
        y, x_axis = self._axes(x)
        prefix = values[:, : self.prefix_tokens]
        maps = values[:, self.prefix_tokens :].unflatten(1, (y.length, x_axis.length))
        outputs = self.convolution(maps.permute(0, 3, 1, 2), y, x_axis, prefix)
        tokens = outputs.permute(0, 2, 3, 1).flatten(1, 2)
        if self.query is not None:
            tokens = torch.cat([self._attend_from_prefix(x, values), tokens], 1)
        return tokens.unflatten(2, (len(self.convolved), self.head_dim))

    def _attend_from_prefix(self, x: Tensor, values: Tensor) -> Tensor:
        """Return the outputs of class and register tokens
        in the convolved heads, (B, tokens, heads * d).
        """
        assert self.query is not None
        assert self.key is not None
        query = self.q_norm(self._by_head(self.query(x[:, : self.prefix_tokens])))
        if self._folds_keys:
            # For a few queries this is cheaper than the keys of all tokens.
            rows = self.key.weight.unflatten(0, (len(self.convolved), self.head_dim))
            logits = (query @ rows) @ x.mT[:, None]
        else:
            logits = query @ self.k_norm(self._by_head(self.key(x))).mT
        weights = torch.softmax(logits * self.scale, -1)
        attended = weights.to(values.dtype) @ self._by_head(values)
        return attended.transpose(1, 2).flatten(2)

    def _axes(self, x: Tensor) -> tuple[Axis, Axis]:
        rows, columns = self.size(x.shape[1] - self.prefix_tokens)
        return Axis(rows), Axis(columns)

    def _by_head(self, features: Tensor) -> Tensor:
        """Split (B, N, heads * d) into (B, heads, N, d)."""
        return features.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _of_heads(attention: "Attention", blocks: Sequence[tuple[int, Sequence[int]]]) -> nn.Linear:
    """Return the rows of a layer's ``qkv`` for some heads of queries (0),
    keys (1) or values (2).
    """
    qkv = attention.qkv
    dim = attention.head_dim
    index = [
        (block * attention.num_heads + head) * dim + channel
        for block, heads in blocks
        for head in heads
        for channel in range(dim)
    ]
    part = nn.utils.skip_init(
        nn.Linear,
        qkv.in_features,
        len(index),
        bias=qkv.bias is not None,
        device=qkv.weight.device,
        dtype=qkv.weight.dtype,
    )
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            original = getattr(qkv, name)
            parameter.copy_(original[index]).requires_grad_(original.requires_grad)
    return part
