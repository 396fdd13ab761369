"""timm's own ConViT models through :func:`~tcnn_model.gpsa`: same weights, same output, linear memory.

Their positional logits are ``w_0 dx + w_1 dy + w_2 (dx^2 + dy^2) + b`` with (w_0, w_1, w_2) the rows of ``pos_proj``
(ConViT, Eqs. 5-7): v_pos with its components in another order, whatever the weights.
"""

import math
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import convit
from torch import Tensor, nn

from tcnn_model.gpsa.attention import GatedAttention
from tcnn_model.gpsa.functional import attend
from tcnn_model.gpsa.positional import Axis
from tcnn_model.gpsa.precision import widest

__all__ = ["Acceleration", "accelerate", "convit_attention"]


def accelerate(model: nn.Module) -> "Acceleration":
    """Make the attention layers of a timm ConViT work without N x N matrices, in place.

    Parameters, ``state_dict``, hooks and output (to rounding) stay. Only the layers' forward is exchanged, until
    ``remove()`` of the result or, in a ``with`` statement, its end. Attention dropout needs the matrix, so layers that
    have it train as before. A copy or a pickle made meanwhile stays accelerated.

    Args:
        model: a ConViT of timm, or any module that contains its layers.

    Returns:
        a handle to undo it: ``with accelerate(model): ...`` or ``handle.remove()``.

    Raises:
        ValueError: the model has no such layers, or they are accelerated already, or of a subclass, which may compute
            something else. The model is then unchanged.
    """
    ours = (_GPSA, _MHSA)
    theirs = {name: m for name, m in model.named_modules() if isinstance(m, convit.GPSA | convit.MHSA)}
    if not theirs:
        raise ValueError(f"no ConViT attention in {type(model).__name__}: accelerate() is for timm's convit_* models")
    for name, module in theirs.items():
        if isinstance(module, ours):
            raise ValueError(f"{name!r} is accelerated already")
        if type(module) not in _EXCHANGE:
            raise ValueError(f"{name!r} is a {type(module).__qualname__}, a subclass which may compute something else")
    return Acceleration(list(theirs.values()))


class Acceleration:
    """Handle of :func:`accelerate`: ``remove()``, or the end of a ``with`` statement, undoes it."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._classes = [(layer, type(layer)) for layer in layers]
        for layer in layers:
            layer.__class__ = _EXCHANGE[type(layer)]

    def remove(self) -> None:
        """Give the layers their own forward back. Further calls do nothing."""
        for layer, original in self._classes:
            layer.__class__ = original
        self._classes = []

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def convit_attention(layer: convit.GPSA, qk: Tensor) -> GatedAttention:
    """Describe the attention of a ConViT layer, on the square grid that its tokens lie on.

    Args:
        layer: the layer, unchanged.
        qk: output of its ``qk`` projection, shape (B, N, 2 * heads * d).

    Raises:
        ValueError: N is not a square.
    """
    side = math.isqrt(qk.shape[1])
    if side * side != qk.shape[1]:
        raise ValueError(f"ConViT's positional attention needs a square grid of tokens, got {qk.shape[1]} tokens")
    query, key = qk.unflatten(2, (2, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    position, axis = layer.pos_proj.weight.flip(1), Axis(side)
    if layer.pos_proj.bias is not None:  # the softmax takes it out again; its gradient is zero, not missing
        position = position.add(layer.pos_proj.bias[:, None], alpha=0)
    return GatedAttention(query, key, widest(position), torch.sigmoid(layer.gating_param), axis, axis)


class _GPSA(convit.GPSA):  # type: ignore[misc]  # timm is not typed
    def forward(self, x: Tensor) -> Any:
        if self.training and self.attn_drop.p > 0:
            return super().forward(x)
        values = self.v(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        output = attend(convit_attention(self, self.qk(x)), values)  # (B, heads, N, d)
        return self.proj_drop(self.proj(output.transpose(1, 2).flatten(2)))

    def get_attention(self, x: Tensor) -> Any:
        # The forward of theirs leaves these behind, for this one and for get_attention_map.
        if self.rel_indices is None or self.rel_indices.shape[1] != x.shape[1]:
            self.rel_indices: Tensor = self.get_rel_indices(x.shape[1])
        return super().get_attention(x)


class _MHSA(convit.MHSA):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Any:
        if self.training and self.attn_drop.p > 0:
            return super().forward(x)
        query, key, values = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(query, key, values)
        return self.proj_drop(self.proj(output.transpose(1, 2).flatten(2)))


_EXCHANGE: dict[type, type] = {convit.GPSA: _GPSA, convit.MHSA: _MHSA}
