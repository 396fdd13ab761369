"""Where the heads of a layer lie side by side while it runs, and can be edited before they are added up."""

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from timm.models import convit
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcnn_model import GPSA
from tcnn_probe.attention.rebuild import between_channels, heads_axis
from tcnn_probe.hooks.forwards import call_of_a_module
from tcnn_probe.hooks.interception import SeenAttention, SeenOperand, SeenProduct, describe
from tcnn_probe.hooks.modes import put_on, take_off

__all__ = ["Bare", "Plan", "Seam", "edit_heads", "seam_of"]

Plan = Callable[[int, int, int], tuple[Sequence[int], Sequence[int]]]
"""From the number of an attention in the layer's call, and of its heads and queries, to the heads that are zeroed, and
those that are averaged over their queries."""

_MULTIHEAD = inspect.signature(F.multi_head_attention_forward)


class Seam:
    """In a layer that runs, between entering and leaving.

    Args:
        module: the layer.
        plan: says what to do.
        inputs: of the call.
    """

    def __init__(self, module: nn.Module, plan: Plan, inputs: Sequence[Any]) -> None:
        self._module, self._plan, self._inputs = module, plan, inputs
        self.asked = 0
        """How many attentions there were."""

    def enter(self) -> None:
        """Begin to edit."""

    def leave(self) -> None:
        """Leave the layer as it was; may be called again."""

    def check(self) -> str | None:
        """What turned out to be wrong with what was edited, once the layer has run."""
        return None

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()


def seam_of(module: nn.Module, plan: Plan, inputs: Sequence[Any]) -> Seam:
    """The one that suits a layer."""
    if isinstance(module, GPSA):
        return _Combine(module, plan, inputs)
    if isinstance(module, convit.GPSA):
        return _Projection(module, plan, inputs)
    return _Asked(module, plan, inputs)


def edit_heads(heads: Tensor, axis: int, zeroed: Sequence[int], averaged: Sequence[int]) -> Tensor:
    """What heads give, or their attention, some of it zeroed and some replaced by its mean over the queries.

    Args:
        heads: shape (..., N_query, d), heads along ``axis``.
        axis: not one of the last two.
        zeroed, averaged: indices of heads.
    """
    if averaged:
        shape = [-1 if at == axis % heads.ndim else 1 for at in range(heads.ndim)]
        which = torch.zeros(heads.shape[axis], dtype=torch.bool)
        which[list(averaged)] = True
        heads = torch.where(which.to(heads.device).view(shape), heads.mean(-2, keepdim=True), heads)
    if zeroed:
        heads = heads.index_fill(axis, torch.tensor(zeroed, device=heads.device), 0)
    return heads


class _Method(Seam):
    """A method that is given all heads side by side, exchanged for one that edits them first.

    Args:
        owner: the module that has it.
        name: of the method.
    """

    def __init__(self, owner: nn.Module, name: str, module: nn.Module, plan: Plan, inputs: Sequence[Any]) -> None:
        super().__init__(module, plan, inputs)
        self._owner, self._name = owner, name
        self._before: dict[str, Any] = {}
        self._ours: Callable[..., Any] | None = None

    def enter(self) -> None:
        attributes, method = vars(self._owner), getattr(self._owner, self._name)
        self._before = {key: value for key, value in attributes.items() if key == self._name}

        def edited(heads: Tensor, *args: Any) -> Any:
            return method(self._edit_given(heads), *args)

        attributes[self._name] = self._ours = edited

    def leave(self) -> None:
        attributes = vars(self._owner)
        if self._ours is not None and attributes.get(self._name) is self._ours:
            del attributes[self._name]
            attributes.update(self._before)

    def _edit_given(self, heads: Tensor) -> Tensor:
        raise NotImplementedError

    def _edit(self, heads: Tensor, axis: int) -> Tensor:
        if not self.asked:  # called again, by who measures the layer, it is of the same attention
            self._todo = self._plan(0, heads.shape[axis], heads.shape[-2])
            self.asked = 1
        return edit_heads(heads, axis, *self._todo)


class _Combine(_Method):
    """Our own layers: what ``combine`` is given, (B, heads, N_query, C_in)."""

    def __init__(self, module: GPSA, plan: Plan, inputs: Sequence[Any]) -> None:
        super().__init__(module, "combine", module, plan, inputs)

    def _edit_given(self, heads: Tensor) -> Tensor:
        return self._edit(heads, 1)


class _Projection(_Method):
    """ConViT's gated layers, which mix and renormalise two softmaxes: what ``proj`` is given, (B, N, heads * d)."""

    def __init__(self, module: convit.GPSA, plan: Plan, inputs: Sequence[Any]) -> None:
        super().__init__(module.proj, "forward", module, plan, inputs)
        self._heads = module.num_heads

    def _edit_given(self, heads: Tensor) -> Tensor:
        return self._edit(heads.unflatten(-1, (self._heads, -1)).transpose(1, 2), 1).transpose(1, 2).flatten(2)


class _Asked(Seam):
    """Any other layer: what it asks torch for."""

    def enter(self) -> None:
        self._unconfirmed: dict[int, tuple[SeenOperand, bool]] = {}
        self._modes: list[Any] = put_on(_Mode(self))

    def leave(self) -> None:
        take_off(getattr(self, "_modes", []))

    def check(self) -> str | None:
        if self._unconfirmed:
            return "edited a softmax that weighs no values in a matrix product"
        return None

    def is_asking(self, frame: FrameType | None) -> bool:
        """Whether code running in this frame is the layer's own, not that of a layer inside of it."""
        while (frame := call_of_a_module(frame)) is not None:
            module = frame.f_locals.get("self")
            if not isinstance(module, nn.Softmax | nn.Dropout):
                return module is self._module or (isinstance(module, Bare) and module.layer is self._module)
            frame = frame.f_back
        return False

    def fused(self, output: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """What torch's fused attention gives, edited."""
        return self._at_heads(output, query.shape[-2], key.shape[-2])

    def softmax(self, seen: SeenAttention) -> Tensor:
        """The attention itself: what is done to it is done to what it makes of the values, as that is linear."""
        weights = seen.output
        assert weights is not None
        edited = self._at_heads(weights, *weights.shape[-2:])
        if edited is weights:
            return weights
        if not weights.requires_grad:
            edited = weights.copy_(edited)  # where a recorder knows it to be
        several = heads_axis(weights.shape[:-2], self._module)[1] > 1 or weights.ndim > 3
        self._unconfirmed[self.asked] = SeenOperand.of(edited), several
        return edited

    def confirm(self, product: SeenProduct) -> None:
        """A softmax is attention once it weighs values."""
        for number, (softmax, heads) in list(self._unconfirmed.items()):
            if any(softmax.is_in(operand, heads=heads) for operand in product.operands):
                del self._unconfirmed[number]

    def multihead(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's multi-head attention, with the identity for its projection until the heads are edited."""
        given = _MULTIHEAD.bind(*args, **kwargs).arguments
        weight, bias = given["out_proj_weight"], given["out_proj_bias"]
        given["out_proj_weight"] = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        given["out_proj_bias"] = None
        beside, weights = func(**given)  # (N, B, heads * d), or without B
        heads = beside.unflatten(-1, (given["num_heads"], -1)).movedim(0, -2)
        number, self.asked = self.asked, self.asked + 1
        edited = edit_heads(heads, -3, *self._plan(number, *heads.shape[-3:-1]))
        return F.linear(edited.movedim(-2, 0).flatten(-2), weight, bias), weights

    def _at_heads(self, x: Tensor, queries: int, keys: int) -> Tensor:
        if x.ndim == 2:
            return self._at_heads(x[None], queries, keys)[0]
        axis, count = heads_axis(x.shape[:-2], self._module)
        if queries == keys and between_channels(keys, count, self._inputs):
            return x
        number, self.asked = self.asked, self.asked + 1
        todo = self._plan(number, count, queries)
        if not any(todo):
            return x
        if axis == "one":
            return edit_heads(x[None], 0, *todo)[0]
        if axis == "merged":
            return edit_heads(x.unflatten(0, (-1, count)), 1, *todo).flatten(0, 1)
        return edit_heads(x, int(axis), *todo)


class _Mode(TorchFunctionMode):
    """Shows the seam what the layer asks torch for."""

    def __init__(self, seam: _Asked) -> None:
        super().__init__()
        self._seam = seam

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, seam = kwargs or {}, self._seam
        if func is F.multi_head_attention_forward and seam.is_asking(sys._getframe()):
            return seam.multihead(func, args, kwargs)
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            query, key = (args[at] if len(args) > at else kwargs[name] for at, name in enumerate(("query", "key")))
            return seam.fused(output, query, key) if seam.is_asking(sys._getframe()) else output
        if func is not F.multi_head_attention_forward:
            with torch._C.DisableTorchFunction():
                seen = describe(func, output, args, kwargs)
            if isinstance(seen, SeenProduct):
                seam.confirm(seen)
            elif seen is not None and seam.is_asking(sys._getframe()):
                return seam.softmax(seen)
        return output


class Bare(nn.Module):
    """A layer called past its own hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own gives."""
        return self.layer.forward(*args, **kwargs)
