"""Edits of heads, applied to the separate outputs of a layer's heads, before the projection adds them up."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tcnn_probe.architectures.lookup import as_rows, from_rows
from tcnn_probe.attention.attention import Attention, weigh
from tcnn_probe.attention.gated import GatedAttention, gated_attention_of
from tcnn_probe.attention.reconstruction import values_of
from tcnn_probe.hooks.interception import (
    FUSED,
    SeenAttention,
    describe,
    multihead_arguments,
)
from tcnn_probe.models import whole_number

__all__ = [
    "AttendingCall",
    "HeadEdit",
    "HeadWatch",
    "edit_call",
    "edit_function",
    "edit_gated",
    "edit_gated_output",
    "edits_of",
    "owned_edits",
]


@dataclass(frozen=True)
class HeadEdit:
    """Edit of the outputs of heads, which a listener returns for an attention.

    ::

        with tcnn_probe.attention_stream(model, lambda attention: HeadEdit([3])):  # head 3 of every layer gives zero
            model(images)

    Args:
        heads: Indices of the heads.
        give: New output of the heads: "zero", or the "mean" over the edited queries of an image or window.
        attention: Attention that replaces that of the heads, shape (B or 1, windows, len(heads), N_query, N_key); in
            gated layers it replaces the content part, over H * W real pixels, unless it is ``whole``.
        terms: Function (call, output, heads) -> output that adds other terms to the layer's output in place of the
            heads' terms, which are zero by then. Only for listeners to single layers.
        queries: Whether each query is edited, shape (N_query,); None for all.
        whole: Whether ``attention`` replaces all of a gated layer's attention, over N_key keys with the padding.
    """

    heads: Sequence[int]
    give: Literal["zero", "mean"] = "zero"
    attention: Tensor | None = None
    terms: Callable[[Any, Tensor, Sequence[int]], Tensor] | None = None
    queries: Tensor | None = None
    whole: bool = False

    def check(self, attention: Attention) -> None:
        """Check that this edit can be applied to an attention.

        Raises:
            TypeError: Heads are not integers.
            ValueError: A head does not exist or is named twice, ``give`` has another value, or ``attention`` has
                another shape.
        """
        heads = [
            whole_number(head, f"heads of {attention.name!r}") for head in self.heads
        ]
        missing = [head for head in heads if head >= attention.heads]
        if missing or len({*heads}) < len(heads):
            raise ValueError(
                f"expected distinct heads below {attention.heads} of {attention.name!r}, got {heads}"
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
        if (
            self.attention.shape[0] not in (1, images)
            or self.attention.shape[1:] != shape
        ):
            raise ValueError(
                f"expected attention of shape (1 or {images}, {', '.join(map(str, shape))}) for {attention.name!r}, "
                f"got {tuple(self.attention.shape)}"
            )

    def in_order(self, queries: Tensor, keys: Tensor) -> "HeadEdit":
        """Return the edit for queries and keys in another order, given by their indices."""

        def ordered(x: Tensor | None, dim: int, order: Tensor) -> Tensor | None:
            return None if x is None else x.index_select(dim, order.to(x.device))

        attention = ordered(ordered(self.attention, -2, queries), -1, keys)
        return replace(
            self, attention=attention, queries=ordered(self.queries, 0, queries)
        )

    def only(self, heads: Sequence[int]) -> "HeadEdit":
        """Return the edit restricted to some of its heads."""
        if self.attention is None or [*heads] == [*self.heads]:
            return replace(self, heads=heads)
        places = [[*self.heads].index(head) for head in heads]
        return replace(self, heads=heads, attention=self.attention[:, :, places])


@dataclass(frozen=True)
class HeadWatch(HeadEdit):
    """Function of the outputs of a layer's heads, applied after all edits, for listeners to single layers.

    Args:
        watch: Function (outputs, edit) -> outputs. ``outputs`` are (rows, heads, N_query, d), or the attention of a
            softmax that is not fused, and ``edit(head_edit)`` returns them with an edit, without gradients.
    """

    watch: Callable[[Tensor, Callable[[HeadEdit], Tensor]], Tensor] | None = None


# Edits that were applied to outputs, for streams that get these outputs later: an edited output cannot verify a
# reconstruction, and when an output is computed again to be edited, all edits must be applied again.
_EDITS: MutableMapping[Tensor, Sequence[HeadEdit]] = WeakTensorKeyDictionary()


def edits_of(output: Any) -> Sequence[HeadEdit]:
    """Return the edits that streams have made to an output of a function or layer."""
    first = _first(output)
    return () if first is None else _EDITS.get(first, ())


def _first(output: Any) -> Any:
    """Return the output, or the first one of a tuple."""
    return output[0] if isinstance(output, tuple) else output


def owned_edits(edits: Sequence[HeadEdit]) -> list[HeadEdit]:
    """Restrict edits so that each head belongs only to the last edit that names it."""
    owners = {head: edit for edit in edits for head in edit.heads}
    by_edit = [
        (edit, [head for head in edit.heads if owners[head] is edit]) for edit in edits
    ]
    watches = [edit for edit in edits if isinstance(edit, HeadWatch)]
    return [*(edit.only(heads) for edit, heads in by_edit if heads), *watches]


class AttendingCall:
    """A call of a torch function that computes attention, with outputs of heads that can be edited.

    Args:
        func, args, kwargs: Call of ``scaled_dot_product_attention``, flex_attention, a softmax, or torch's multi-head
            attention, which is run with the identity as its projection, so that the heads can be edited before they
            are mixed.
        output: Output of the function if it has run already; otherwise it is run here.

    Attributes:
        heads: Outputs of the heads, (..., N_query, d); for a softmax, the attention itself, (..., N_query, N_key),
            whose edits carry over to attention times values, as this is linear.
        keys: Number of keys.
        known_axis: Axis of the heads, if the function determines it.
    """

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any = None,
    ) -> None:
        self.known_axis: int | None = None
        self._project: Callable[[Tensor], Any] | None = None
        if func is F.multi_head_attention_forward:
            arguments = multihead_arguments(*args, **kwargs)
            self._run_multihead(func, arguments)
            return
        returned = func(*args, **kwargs) if output is None else output
        self._describe = partial(describe, func, returned, args, dict(kwargs))
        # flex_attention also returns statistics of its logits' rows, which are not edited.
        self._output, *self._beside = (
            returned if isinstance(returned, tuple) else (returned,)
        )
        # A single head without images, (N_query, d), gets an axis of heads.
        self.heads = self._output if self._output.ndim > 2 else self._output[None]
        self.is_softmax = func not in FUSED
        if self.is_softmax:
            self.keys = self._output.shape[-1]
        else:
            key = args[1] if len(args) > 1 else kwargs["key"]
            self.keys = key.shape[-2]

    @cached_property
    def request(self) -> SeenAttention:
        """Description of the call, computed when it is needed."""
        request = self._describe()
        assert isinstance(request, SeenAttention)
        return request

    def finish(self, edited: Tensor) -> Any:
        """Return the function's output for edited heads."""
        if self._project is not None:
            return self._project(edited)
        if edited is self.heads:
            return self._whole(self._output)
        edited = edited.view(self._output.shape)
        if self.is_softmax and not self._output.requires_grad:
            # The softmax is edited in place, because its memory address identifies it in the product with the values.
            return self._output.copy_(edited)
        return self._whole(edited)

    def _whole(self, output: Tensor) -> Any:
        return (output, *self._beside) if self._beside else output

    def _run_multihead(self, func: Any, arguments: dict[str, Any]) -> None:
        weight, bias = arguments["out_proj_weight"], arguments["out_proj_bias"]
        # With the identity, the output is the concatenation of heads; the true projection is applied after the edit.
        arguments["out_proj_weight"] = torch.eye(
            weight.shape[1], dtype=weight.dtype, device=weight.device
        )
        arguments["out_proj_bias"] = None
        side_by_side, weights = func(**arguments)  # (N, B, heads * d), or without B
        heads = side_by_side.unflatten(-1, (arguments["num_heads"], -1)).movedim(0, -2)

        def project(edited: Tensor) -> tuple[Tensor, Any]:
            merged = edited.reshape(heads.shape).movedim(-2, 0).flatten(-2)
            return F.linear(merged, weight, bias), weights

        self.heads = heads if heads.ndim == 4 else heads[None]
        self.known_axis = 1
        self.is_softmax = False
        # torch appends a key for each of these options.
        own_keys = (arguments["bias_k"] is not None) + bool(arguments["add_zero_attn"])
        self.keys = len(arguments["key"]) + own_keys
        self._project = project
        self._describe = partial(describe, func, (side_by_side, weights), (), arguments)


def edit_call(call: AttendingCall, module: nn.Module, edits: Sequence[HeadEdit]) -> Any:
    """Return the edited output of a torch function, which is differentiable if the original is."""
    rows = as_rows(call.heads, module, call.known_axis)

    def exchange(edit: HeadEdit) -> Tensor:
        assert edit.attention is not None
        if call.is_softmax:
            images = len(rows) // edit.attention.shape[1]
            return edit.attention.expand(images, *edit.attention.shape[1:]).flatten(
                0, 1
            )
        return weigh(
            edit.attention, values_of(call.request, module)[:, list(edit.heads)]
        )

    edited = _edit_rows(rows, edits, exchange)
    heads = (
        call.heads
        if edited is rows
        else from_rows(edited, call.heads.shape[:-2], module, call.known_axis)
    )
    return call.finish(heads)


def edit_function(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
    module: nn.Module,
    edit: HeadEdit,
) -> Any:
    """Return the output of a torch function with this edit after the edits of other streams."""
    earlier = edits_of(output)
    if earlier:
        # The function runs again without the earlier edits, as a mean over a head that was set to zero is meaningless.
        result = func(*args, **kwargs)
        is_kept = isinstance(result, Tensor) and not result.requires_grad
        # The memory address stays the same, because it identifies a softmax in the product with the values.
        output = output.copy_(result) if is_kept else result
    edits = owned_edits([*earlier, edit])
    edited = edit_call(AttendingCall(func, args, kwargs, output), module, edits)
    _EDITS[_first(edited)] = edits
    return edited


def edit_gated(
    attention: GatedAttention, edits: Sequence[HeadEdit], heads: Tensor
) -> Tensor:
    """Return the outputs of a gated layer's heads, (B, heads, N_query, d), edited."""

    def exchange(edit: HeadEdit) -> Tensor:
        assert edit.attention is not None
        exchanged = attention.with_whole if edit.whole else attention.with_content
        return exchanged(edit.heads, edit.attention)

    return _edit_rows(heads, edits, exchange)


def edit_gated_output(
    layer: nn.Module, x: Tensor, output: Tensor, edit: HeadEdit
) -> Tensor:
    """Compute the output of a gated layer again, with this edit after those of other streams; differentiable."""
    # These are names of ConViT; a GPSA layer has no dropout.
    drops = [
        getattr(layer, name)
        for name in ("attn_drop", "proj_drop")
        if hasattr(layer, name)
    ]
    if layer.training and any(drop.p > 0 for drop in drops):
        raise RuntimeError(
            "a stream's edit computes the layer again, without its dropout: use tcnn_probe.ablate, or eval mode"
        )
    attention = gated_attention_of(layer, x)
    edits = owned_edits([*edits_of(output), edit])
    edited = attention.output(edit_gated(attention, edits, attention.head_outputs()))
    _EDITS[edited] = edits
    return edited


def _edit_rows(
    heads: Tensor, edits: Sequence[HeadEdit], exchange: Callable[[HeadEdit], Tensor]
) -> Tensor:
    """Edit outputs of heads (rows, heads, N_query, d); ``exchange`` returns the outputs for an edit's attention."""
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


def _edited_alone(
    heads: Tensor, edit: HeadEdit, exchange: Callable[[HeadEdit], Tensor]
) -> Tensor:
    return _edit_rows(heads, [edit], exchange)
