"""timm's own ConViT models through :func:`~tcnn_model.gpsa`:
same weights, same output, linear memory.

The positional logits of a head in ConViT are ``w_0 dx + w_1 dy + w_2 (dx^2 + dy^2) + b``, where
(w_0, w_1, w_2) is the head's row of ``pos_proj`` (ConViT, Eqs. 5-7). For any weights this is v_pos
with its components in another order.
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
from tcnn_model.precision import widest

__all__ = ["Acceleration", "accelerate", "convit_attention"]


def accelerate(model: nn.Module) -> "Acceleration":
    """Make the attention layers of a timm ConViT work without N x N matrices, in place.

    Parameters, ``state_dict`` and hooks stay as they are, and outputs change by rounding only. The
    forward methods of the layers are replaced until ``remove()`` is called on the handle or its
    ``with`` statement ends. Attention dropout needs the matrix, so layers with attention dropout
    train as before. A copy or a pickle that is made while the model is accelerated stays
    accelerated.

    Args:
        model: A ConViT of timm, or any module that contains its layers.

    Returns:
        A handle that restores the model: ``with accelerate(model): ...`` or ``handle.remove()``.

    Raises:
        ValueError: If the model has no such layers, they are accelerated already, or they belong to
            a subclass, which may compute something else. The model is then unchanged.
    """
    layers = {
        name: m for name, m in model.named_modules() if isinstance(m, convit.GPSA | convit.MHSA)
    }
    if not layers:
        raise ValueError(
            f"no ConViT attention in {type(model).__name__}: accelerate() is for timm's convit_* "
            "models"
        )
    for name, layer in layers.items():
        if isinstance(layer, (_GPSA, _MHSA)):
            raise ValueError(f"{name!r} is accelerated already")
        if type(layer) not in _ACCELERATED:
            raise ValueError(
                f"{name!r} is a {type(layer).__qualname__}, a subclass which may compute something "
                "else"
            )
    return Acceleration(list(layers.values()))


class Acceleration:
    """Handle returned by :func:`accelerate`; ``remove()``,
    or the end of a ``with`` statement, restores the model.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._classes = [(layer, type(layer)) for layer in layers]
        # The class is replaced rather than the module, so that parameters, hooks and references
        # stay valid.
        for layer in layers:
            layer.__class__ = _ACCELERATED[type(layer)]

    def remove(self) -> None:
        """Restore the layers' own forward methods. Further calls do nothing."""
        for layer, original in self._classes:
            layer.__class__ = original
        self._classes = []

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def convit_attention(layer: convit.GPSA, qk: Tensor) -> GatedAttention:
    """Describe the attention of a ConViT layer on the square grid of its tokens.

    Args:
        layer: The layer, which is not changed.
        qk: Output of its ``qk`` projection, shape (B, N, 2 * heads * d).

    Returns:
        The attention, with ``pos_proj`` as position and sigma(``gating_param``) as gate.

    Raises:
        ValueError: If N is not a square.
    """
    tokens = qk.shape[1]
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ValueError(
            f"ConViT's positional attention needs a square grid of tokens, got {tokens} tokens"
        )
    # (B, N, 2, heads, d) to (2, B, heads, N, d).
    by_head = qk.unflatten(2, (2, layer.num_heads, -1))
    query, key = by_head.permute(2, 0, 3, 1, 4)
    # From the order (dx, dy, squares) to (squares, dy, dx).
    position = layer.pos_proj.weight.flip(1)
    if layer.pos_proj.bias is not None:
        # The softmax cancels the bias. The bias is added with a factor of 0, so that its gradient
        # is zero, as in timm, instead of missing: DistributedDataParallel raises for parameters
        # without a gradient.
        position = position.add(layer.pos_proj.bias[:, None], alpha=0)
    axis = Axis(side)
    return GatedAttention(
        query, key, widest(position), torch.sigmoid(layer.gating_param), axis, axis
    )


class _GPSA(convit.GPSA):  # type: ignore[misc]  # timm is not typed
    def forward(self, x: Tensor) -> Any:
        # Attention dropout acts on single attention weights, so it needs the matrix.
        if self.training and self.attn_drop.p > 0:
            return super().forward(x)
        values = self.v(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        output = attend(convit_attention(self, self.qk(x)), values)  # (B, heads, N, d)
        return self.proj_drop(self.proj(output.transpose(1, 2).flatten(2)))

    def get_attention(self, x: Tensor) -> Any:
        # timm's forward, which is replaced, sets rel_indices for get_attention and
        # get_attention_map (timm 1.0).
        if self.rel_indices is None or self.rel_indices.shape[1] != x.shape[1]:
            self.rel_indices: Tensor = self.get_rel_indices(x.shape[1])
        return super().get_attention(x)


class _MHSA(convit.MHSA):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Any:
        if self.training and self.attn_drop.p > 0:
            return super().forward(x)
        query, key, values = (
            self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        output = F.scaled_dot_product_attention(query, key, values)
        return self.proj_drop(self.proj(output.transpose(1, 2).flatten(2)))


_ACCELERATED: dict[type, type] = {convit.GPSA: _GPSA, convit.MHSA: _MHSA}
