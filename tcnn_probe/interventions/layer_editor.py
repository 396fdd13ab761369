"""Editing what a layer computes while it runs: neither its parameters nor its methods are ever exchanged."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcnn_model import GPSA
from tcnn_probe.hooks.copy_safe import after_call
from tcnn_probe.hooks.modes import put_on
from tcnn_probe.interventions.calls import Call, Calls
from tcnn_probe.interventions.edits import Edit
from tcnn_probe.interventions.gates import gate_editor
from tcnn_probe.interventions.hook_points import hook_point

__all__ = ["LayerCall", "LayerEditor"]


class _Editing(TorchFunctionMode):
    """Asks each of the editors to make a call of a torch function; the first that does so counts."""

    def __init__(self, editors: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self._editors = editors

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for editor in self._editors:
            if (edited := editor(func, args, kwargs or {})) is not NotImplemented:
                return edited
        return func(*args, **(kwargs or {}))


class LayerCall(Call):
    """A call of a layer, and what is edited in it."""

    def plan(self, edits: Sequence[Edit]) -> None:
        """Find out where these edits are to be made; of several that name the same head, the last one counts."""
        self.edits = edits
        self.attended: list[tuple[Edit, int]] = []
        """Edits, and for which attention of the call."""
        self.terms: list[tuple[Edit, int, Sequence[int]]] = []
        """Edits that put terms in the place of others, for which attention, and of which heads."""
        self.point = hook_point(self.module, self._heads_to_edit, self.inputs)

    def mode(self) -> TorchFunctionMode:
        """What edits when torch is asked for something."""
        gates = gate_editor(self.module, self.edits)
        return _Editing([self.point] if gates is None else [gates, self.point])

    def _heads_to_edit(self, number: int, count: int, queries: int) -> tuple[Sequence[int], Sequence[int]]:
        owners: dict[int, Edit] = {}
        for edit in self.edits:
            if edit.call not in (None, number) or not _can_average(edit, queries):
                continue
            heads = edit.heads.of(count, edit.layer)
            edit.count = count
            self.attended.append((edit, number))
            if edit.acts_on_output:
                owners |= dict.fromkeys(heads, edit)
        for edit in dict.fromkeys(owners.values()):
            if edit.gives_terms:
                self.terms.append((edit, number, [head for head in owners if owners[head] is edit]))
        averaged = [head for head, edit in owners.items() if edit.mode == "mean" and not edit.gives_terms]
        return [head for head in owners if head not in averaged], averaged


class LayerEditor(Calls[LayerCall]):
    """Edits heads and gates in each call of a layer.

    Args:
        module: the layer.
        edits: what is done to which heads.
    """

    def __init__(self, module: nn.Module, edits: tuple[Edit, ...] = ()) -> None:
        super().__init__(module, LayerCall)
        self.edits = edits

    def attach(self) -> None:
        """Hook the layer."""
        super().attach()
        if isinstance(self.module, GPSA):
            self._handles.append(after_call(self.module.head_outputs, self._edit_heads))

    def begins(self, call: LayerCall) -> None:
        """Begin to edit."""
        call.plan(self.edits)
        call.modes = put_on(call.mode())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, what is computed of the layer is what its forwards compute."""
        thread, running = threading.get_ident(), self.current()
        call = running or LayerCall(self.module, (), {}, sys._getframe())
        if running is None:
            call.plan(self.edits)
            self._running[thread] = call
        try:
            with call.mode():
                yield
        finally:
            if running is None:
                del self._running[thread]

    def _edit_heads(self, module: nn.Module, args: tuple[Tensor], kwargs: Mapping[str, Any], output: Tensor) -> Any:
        call = self.current()
        return None if call is None else call.point.edit_all(output)


def _can_average(edit: Edit, queries: int) -> bool:
    """Whether there are several queries, where it takes their mean.

    Raises:
        ValueError: there is one only, in a layer that the user named.
    """
    alone = edit.mode == "mean" and edit.means is None and queries == 1
    if alone and edit.strict:
        raise ValueError(f"{edit.layer!r} has a single query, whose mean is itself; give images= to take means over")
    return not alone
