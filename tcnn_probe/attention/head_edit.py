"""Edits of heads, applied to the separate outputs of a layer's heads,
before the projection adds them up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tcnn_probe.architectures.lookup import as_rows, from_rows
from tcnn_probe.attention.attention import Attention, weigh
from tcnn_probe.attention.gated import GatedAttention
from tcnn_probe.attention.reconstruction import values_of
from tcnn_probe.hooks.interception import SeenAttention, TorchCall
from tcnn_probe.models import whole_number

__all__ = [
    "HeadEdit",
    "HeadWatch",
    "edit_call",
    "edit_gated",
]


@dataclass(frozen=True)
class HeadEdit:
    """Edit of the outputs of heads, which a listener returns for an attention.

    ::

        # Head 3 of every layer gives zero.
        with tcnn_probe.attention_stream(model, lambda attention: HeadEdit([3])):
            model(images)

    Args:
        heads: Indices of the heads.
        give: New output of the heads: "zero", or the "mean" over the edited queries of an image or
            window.
        attention: Attention that replaces that of the heads, shape (B or 1, windows, len(heads),
            N_query, N_key); in gated layers it replaces the content part, over H * W real pixels,
            unless it is ``whole``.
        queries: Whether each query is edited, shape (N_query,); None for all.
        whole: Whether ``attention`` replaces all of a gated layer's attention, over N_key keys with
            the padding.
    """

    heads: Sequence[int]
    give: Literal["zero", "mean"] = "zero"
    attention: Tensor | None = None
    queries: Tensor | None = None
    whole: bool = False

    def check(self, attention: Attention) -> None:
        """Check that this edit can be applied to an attention.

        Raises:
            TypeError: Heads are not integers.
            ValueError: A head does not exist or is named twice, ``give`` has another value, or
                ``attention`` has another shape.
        """
        heads = [whole_number(head, f"heads of {attention.name!r}") for head in self.heads]
        missing = [head for head in heads if head >= attention.heads]
        if missing or len({*heads}) < len(heads):
            raise ValueError(
                f"expected distinct heads below {attention.heads} of {attention.name!r}, got "
                f"{heads}"
            )
        if self.give not in ("zero", "mean"):
            raise ValueError(f"expected give='zero' or 'mean', got {self.give!r}")
        if self.queries is not None and self.queries.shape != (attention.queries,):
            raise ValueError(
                f"expected queries of shape ({attention.queries},), got {tuple(self.queries.shape)}"
            )
        if self.attention is None:
            return
        images = attention.rows // attention.windows
        shape = (
            attention.windows,
            len(heads),
            attention.queries,
            attention.keys if self.whole else attention.content_keys,
        )
        if self.attention.shape[0] not in (1, images) or self.attention.shape[1:] != shape:
            raise ValueError(
                f"expected attention of shape (1 or {images}, {', '.join(map(str, shape))}) for "
                f"{attention.name!r}, got {tuple(self.attention.shape)}"
            )

    def in_order(self, queries: Tensor, keys: Tensor) -> "HeadEdit":
        """Return the edit for queries and keys in another order, given by their indices."""

        def ordered(x: Tensor | None, dim: int, order: Tensor) -> Tensor | None:
            return None if x is None else x.index_select(dim, order.to(x.device))

        attention = ordered(ordered(self.attention, -2, queries), -1, keys)
        return replace(self, attention=attention, queries=ordered(self.queries, 0, queries))

    def only(self, heads: Sequence[int]) -> "HeadEdit":
        """Return the edit restricted to some of its heads."""
        if self.attention is None or [*heads] == [*self.heads]:
            return replace(self, heads=heads)
        places = [[*self.heads].index(head) for head in heads]
        return replace(self, heads=heads, attention=self.attention[:, :, places])


@dataclass(frozen=True)
class HeadWatch(HeadEdit):
    """Function of the outputs of a layer's heads,
    applied after all edits, for listeners to single layers.

    Args:
        watch: Function (outputs, edit) -> outputs. ``outputs`` are (rows, heads, N_query, d), or
            the attention of a softmax that is not fused, and ``edit(head_edit)`` returns them with
            an edit, without gradients.
    """

    watch: Callable[[Tensor, Callable[[HeadEdit], Tensor]], Tensor] | None = None


def edit_call(call: TorchCall, edits: Sequence[HeadEdit], module: nn.Module) -> Any:
    """Return the edited output of a torch function in a module,
    which is differentiable if the original is.
    """
    rows = as_rows(call.heads, module, call.heads_axis)

    def exchange(edit: HeadEdit) -> Tensor:
        assert edit.attention is not None
        if not call.is_fused:
            images = len(rows) // edit.attention.shape[1]
            return edit.attention.expand(images, *edit.attention.shape[1:]).flatten(0, 1)
        seen = call.describe()
        assert isinstance(seen, SeenAttention)
        return weigh(edit.attention, values_of(seen, module)[:, list(edit.heads)])

    edited = _edit_rows(rows, edits, exchange)
    return call.with_heads(from_rows(edited, call.heads.shape[:-2], module, call.heads_axis))


def edit_gated(attention: GatedAttention, edits: Sequence[HeadEdit], heads: Tensor) -> Tensor:
    """Return the outputs of a gated layer's heads, (B, heads, N_query, d), edited."""

    def exchange(edit: HeadEdit) -> Tensor:
        assert edit.attention is not None
        exchanged = attention.with_whole if edit.whole else attention.with_content
        return exchanged(edit.heads, edit.attention)

    return _edit_rows(heads, edits, exchange)


def _edit_rows(
    heads: Tensor, edits: Sequence[HeadEdit], exchange: Callable[[HeadEdit], Tensor]
) -> Tensor:
    """Edit outputs of heads (rows, heads, N_query, d);
    ``exchange`` returns the outputs for an edit's attention.
    """
    for edit in edits:
        if isinstance(edit, HeadWatch):
            assert edit.watch is not None
            edited = partial(_edited_alone, heads.detach(), exchange=exchange)
            heads = edit.watch(heads, edited)
            continue
        # Nothing is edited in place, because the model's backward pass may need these tensors.
        index = torch.tensor(list(edit.heads), device=heads.device)
        old = heads.index_select(1, index)
        queries = None if edit.queries is None else edit.queries.to(heads.device)
        if edit.attention is not None:
            new = exchange(edit).to(heads.dtype)
        elif edit.give == "mean":
            averaged = old if queries is None else old[:, :, queries]
            new = averaged.mean(-2, keepdim=True).expand_as(old)
        else:
            new = torch.zeros_like(old)
        if queries is not None:
            new = torch.where(queries[:, None], new, old)
        heads = heads.index_copy(1, index, new)
    return heads


def _edited_alone(heads: Tensor, edit: HeadEdit, exchange: Callable[[HeadEdit], Tensor]) -> Tensor:
    return _edit_rows(heads, [edit], exchange)
