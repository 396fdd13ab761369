"""Where the heads of a layer lie side by side while it runs, and can be edited before they are added up."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import convit
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tcnn_model import GPSA
from tcnn_probe.attention.rebuild import (
    ReconstructionError,
    as_rows,
    between_channels,
    discrepancy,
    from_rows,
    heads_axis,
    logits_of,
    values_of,
)
from tcnn_probe.hooks.copy_safe import add_hook
from tcnn_probe.hooks.interception import SeenAttention, describe, multihead_arguments
from tcnn_probe.hooks.products import SeenCopy, SeenOperand, SeenProduct, Weighed
from tcnn_probe.hooks.running import innermost_call
from tcnn_probe.interventions.gated_content import content_of, with_content
from tcnn_probe.interventions.given_attention import GivenAttention, weigh

__all__ = ["Editing", "HookPoint", "Plan", "Todo", "edits_head_outputs", "hook_point"]


@dataclass
class Todo:
    """What is done to heads of one attention.

    Args:
        layer: its name.
        number: of the attention in the layer's call.
        zeroed, averaged: heads; those averaged, over their queries.
        given: heads whose attention is exchanged, and for what.
        taken: heads whose attention is kept for later, and by what.
    """

    layer: str
    number: int
    zeroed: list[int] = field(default_factory=list)
    averaged: list[int] = field(default_factory=list)
    given: list[tuple[GivenAttention, Sequence[int]]] = field(default_factory=list)
    taken: list[tuple[GivenAttention, Sequence[int]]] = field(default_factory=list)

    def take(self, attention: Callable[[], Tensor]) -> None:
        """Keep what is to be kept of an attention (rows, heads, N_query, N_key)."""
        if self.taken:
            with torch.no_grad():
                weights = attention()
            for keeper, heads in self.taken:
                keeper.take(self.number, heads, weights, self.layer)

    def edit(self, heads: Tensor, exchange: Callable[[Sequence[int], Callable[[int], Tensor]], Tensor]) -> Tensor:
        """Heads' outputs edited.

        Args:
            heads: shape (rows, heads, N_query, d).
            exchange: gives (rows, some heads, N_query, d) for these heads and, given N_key, their new attention.
        """
        for giver, which in self.given:
            attention = partial(giver.of, self.number, which, self.layer, heads.shape[0], heads.shape[2])
            exchanged = exchange(which, attention).to(heads.dtype)
            heads = heads.index_copy(1, torch.tensor(which, device=heads.device), exchanged)
        if self.averaged:
            averaged = torch.zeros(heads.shape[1], dtype=torch.bool)
            averaged[self.averaged] = True
            heads = torch.where(averaged.to(heads.device)[:, None, None], heads.mean(-2, keepdim=True), heads)
        if self.zeroed:
            heads = heads.index_fill(1, torch.tensor(self.zeroed, device=heads.device), 0)
        return heads


Plan = Callable[[int, int, int], Todo]
"""From the number of an attention in the layer's call, and of its heads and queries, to what is done to it."""


class Editing(TorchFunctionMode):
    """Asks each of the editors to make a call of a torch function, until ``over``; the first that does so counts."""

    def __init__(self, *editors: Callable[..., Any] | None, over: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._editors, self._over = [editor for editor in editors if editor is not None], over

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for editor in () if self._over() else self._editors:
            if (edited := editor(func, args, kwargs or {})) is not NotImplemented:
                return edited
        return func(*args, **(kwargs or {}))


class HookPoint:
    """Where the heads of a layer are edited during one call of it: of our GPSA layers, in ``head_outputs``."""

    def __init__(self, module: nn.Module, plan: Plan, inputs: Sequence[Any]) -> None:
        self._module, self._plan, self._inputs = module, plan, inputs
        self.asked = 0
        """How many attentions there were."""

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a torch function gives, edited; NotImplemented if heads are not edited there."""
        return NotImplemented

    def edit_all(self, heads: Tensor) -> Tensor:
        """Edit the heads of a gated layer's only attention, shape (B, heads, N_query, d)."""
        if not self.asked:  # asked again by who measures the layer, it is the same attention, of some images
            self._todo = self._plan(0, *heads.shape[1:3])
            self._todo.take(lambda: content_of(self._module, self._input(len(heads))))
            self.asked = 1
        return self._todo.edit(heads, lambda *given: with_content(self._module, self._input(len(heads)), *given))

    def _input(self, images: int) -> Tensor:
        return next(x for x in self._inputs if isinstance(x, Tensor))[:images]

    def check(self) -> str | None:
        """What turned out to be wrong with what was edited, once the layer has run."""
        return None


def hook_point(module: nn.Module, plan: Plan, inputs: Sequence[Any]) -> HookPoint:
    """The one that suits a layer."""
    if isinstance(module, GPSA):
        return HookPoint(module, plan, inputs)
    return (_Projection if isinstance(module, convit.GPSA) else _Asked)(module, plan, inputs)


def edits_head_outputs(module: nn.Module, point: Callable[[], HookPoint | None]) -> list[RemovableHandle]:
    """Hook the place where a GPSA layer has its heads; ``point`` gives what edits them there, while it is to."""

    def edit(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        editor = point()
        return None if editor is None else editor.edit_all(output)

    return [add_hook(module.head_outputs, edit, after=True)] if isinstance(module, GPSA) else []


class _Projection(HookPoint):
    """ConViT's gated layers, which mix and renormalise two softmaxes: what ``proj`` is given, (B, N, heads * d)."""

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not F.linear or len(args) < 2 or args[1] is not self._module.proj.weight:  # type: ignore[union-attr]
            return NotImplemented
        heads = args[0].unflatten(-1, (self._module.num_heads, -1)).transpose(1, 2)
        return func(self.edit_all(heads).transpose(1, 2).flatten(2), *args[1:], **kwargs)


class _Asked(HookPoint):
    """Any other layer: what it asks torch for."""

    def __init__(self, module: nn.Module, plan: Plan, inputs: Sequence[Any]) -> None:
        super().__init__(module, plan, inputs)
        self._unconfirmed: dict[int, tuple[SeenOperand, bool]] = {}
        self._weighed, self._objection = Weighed(), ""

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.multi_head_attention_forward:
            return self._multihead(func, args, kwargs) if self._is_asking(sys._getframe()) else NotImplemented
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            query, key = (args[at] if len(args) > at else kwargs[name] for at, name in enumerate(("query", "key")))
            asked = cache(partial(describe, func, output, args, kwargs))
            sizes = query.shape[-2], key.shape[-2]
            return self._edit(output, asked, *sizes) if self._is_asking(sys._getframe()) else output
        with torch._C.DisableTorchFunction():
            seen = describe(func, output, args, kwargs)
        if isinstance(seen, SeenProduct):
            self._confirm(seen)
        elif isinstance(seen, SeenCopy):
            self._weighed.copied(seen)
        elif isinstance(seen, SeenAttention) and self._is_asking(sys._getframe()):
            return self._softmax(output, seen)
        return output

    def check(self) -> str | None:
        if self._unconfirmed:
            return "edited a softmax that weighs no values in a matrix product"
        return f"edited {self._objection}" if self._objection else None

    def _is_asking(self, frame: FrameType | None) -> bool:
        """Whether code running in this frame is the layer's own, not that of a layer inside of it."""
        while (frame := innermost_call(frame)) is not None:
            module = frame.f_locals.get("self")
            if not isinstance(module, nn.Softmax | nn.Dropout):
                return module is self._module
            frame = frame.f_back
        return False

    def _softmax(self, weights: Tensor, seen: SeenAttention) -> Tensor:
        """The attention itself: what is done to it is done to what it makes of the values, as that is linear."""
        edited = self._edit(weights, lambda: seen, *weights.shape[-2:])
        if edited is weights:
            return weights
        if not weights.requires_grad:
            edited = weights.copy_(edited)  # where a recorder knows it to be
        several = heads_axis(weights.shape[:-2], self._module)[1] > 1 or weights.ndim > 3
        self._unconfirmed[self.asked] = SeenOperand.of(edited), several
        return edited

    def _confirm(self, product: SeenProduct) -> None:
        """A softmax is attention once it weighs values."""
        for number, objection in self._weighed.by(product, self._unconfirmed).items():
            del self._unconfirmed[number]
            self._objection = self._objection or objection

    def _multihead(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's multi-head attention, with the identity for its projection until the heads are edited."""
        given = multihead_arguments(*args, **kwargs)
        weight, bias = given["out_proj_weight"], given["out_proj_bias"]
        given["out_proj_weight"] = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        given["out_proj_bias"] = None
        beside, weights = func(**given)  # (N, B, heads * d), or without B
        heads = beside.unflatten(-1, (given["num_heads"], -1)).movedim(0, -2)
        asked = cache(partial(describe, func, (beside, weights), (), given))
        edited = self._edited(heads if heads.ndim == 4 else heads[None], asked, heads=1)
        return F.linear(edited.reshape(heads.shape).movedim(-2, 0).flatten(-2), weight, bias), weights

    def _edit(self, x: Tensor, asked: Callable[[], Any], queries: int, keys: int) -> Tensor:
        """Edit heads, or their attention, unless it is one between channels."""
        if x.ndim == 2:
            return self._edit(x[None], asked, queries, keys)[0]
        count = heads_axis(x.shape[:-2], self._module)[1]
        between = queries == keys and between_channels(keys, count, self._inputs)
        return x if between else self._edited(x, asked)

    def _edited(self, x: Tensor, asked: Callable[[], Any], heads: int | None = None) -> Tensor:
        """Edit heads (..., N_query, d), or their attention, along the axis on which this layer has them."""
        rows = as_rows(x, self._module, heads)
        number, self.asked = self.asked, self.asked + 1
        todo = self._plan(number, *rows.shape[1:3])
        todo.take(lambda: self._attention(asked()))

        def exchange(which: Sequence[int], attention: Callable[[int], Tensor]) -> Tensor:
            if (logits := (seen := asked()).logits) is not None:
                given = attention(logits.shape[-1])
                return given.expand(len(rows) // given.shape[1], *given.shape[1:]).flatten(0, 1)
            values = values_of(seen, self._module)
            return weigh(attention(values.shape[2]), values[:, list(which)])

        edited = todo.edit(rows, exchange)
        return x if edited is rows else from_rows(edited, x.shape[:-2], self._module, heads)

    def _attention(self, seen: SeenAttention) -> Tensor:
        """(rows, heads, N_query, N_key), compared with what the layer has got."""
        compared = discrepancy(seen, self._module)
        if compared is not None and not bool(compared[0] <= compared[1]):
            raise ReconstructionError(
                f"attention of {type(self._module).__name__} as rebuilt differs from the layer's own output by "
                f"{float(compared[0]):.2g} of its largest value: it cannot be exchanged"
            )
        return logits_of(seen, self._module).weights()
