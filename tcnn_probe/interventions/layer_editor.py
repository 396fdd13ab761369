"""Editing what a layer computes while it runs: neither its parameters nor its methods are ever exchanged."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from tcnn_probe.hooks.calls import Call, Calls
from tcnn_probe.hooks.edits import EDITORS
from tcnn_probe.hooks.modes import put_on
from tcnn_probe.interventions.contributions import Terms, first_tensor, images_first, with_first_tensor
from tcnn_probe.interventions.edits import Edit
from tcnn_probe.interventions.gates import GATES, gate_editor
from tcnn_probe.interventions.hook_points import Editing, HookPoint, Todo, edits_head_outputs, hook_point

__all__ = ["LayerEditor"]

_LOCK = threading.RLock()


@dataclass(eq=False)
class _LayerCall(Call):
    """A call of a layer, and what is edited in it."""

    edits: Sequence[Edit] = ()
    attended: list[tuple[Edit, int]] = field(default_factory=list)  # and for which attention of the call
    terms: list[tuple[Edit, int, Sequence[int]]] = field(default_factory=list)  # and of which heads they are put in
    point: HookPoint = field(init=False)

    def __post_init__(self) -> None:
        self.point = hook_point(self.module, self._plan, self.inputs)

    def editing(self) -> Editing:
        return Editing(gate_editor(self.module, self.edits), self.point, over=lambda: self.over)

    def _plan(self, number: int, count: int, queries: int) -> Todo:
        owners: dict[int, Edit] = {}  # of several edits that name the same head, the last one
        todo = Todo(self.edits[0].layer, number)
        for edit in self.edits:
            if edit.call not in (None, number) or not _can_average(edit, queries):
                continue
            heads, edit.count = edit.among(count), count
            self.attended.append((edit, number))
            if edit.acts_on_output:
                owners |= dict.fromkeys(heads, edit)
            if edit.attention is not None and edit.attention.taking:
                todo.taken.append((edit.attention, heads))
        for edit in dict.fromkeys(owners.values()):
            own = [head for head in owners if owners[head] is edit]
            if edit.gives_terms:
                self.terms.append((edit, number, own))
            if edit.attention is not None:
                todo.given.append((edit.attention, own))
            else:
                (todo.averaged if edit.mode == "mean" and not edit.gives_terms else todo.zeroed).extend(own)
        return todo


class LayerEditor(Calls[_LayerCall]):
    """Edits heads and gates in each call of a layer, for all ablations of it together."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, _LayerCall)
        self._edits: tuple[Edit, ...] = ()

    @classmethod
    def add(cls, edit: Edit) -> None:
        """Have one more thing done."""
        with _LOCK:
            editor = EDITORS.setdefault(edit.module, cls(edit.module))
            editor._edits = (*editor._edits, edit)
            if len(editor._edits) == 1:
                editor.attach()
                editor._handles += edits_head_outputs(edit.module, editor._point)

    @classmethod
    def remove(cls, edit: Edit) -> None:
        """Have it done no longer; may be called in the middle of a forward, and again."""
        with _LOCK:
            editor = EDITORS.get(edit.module)
            if editor is not None and edit in editor._edits:
                editor._edits = tuple(other for other in editor._edits if other is not edit)
                if not editor._edits:
                    del EDITORS[edit.module]
                    editor.detach()

    def begins(self, call: _LayerCall) -> None:
        """Begin to edit."""
        call.edits = self._edits
        call.modes = put_on(call.editing())

    def returns(self, call: _LayerCall, output: Any) -> Any:
        """Check what was done, take means, and put terms into the output."""
        _check(call)
        layer = call.edits[0].layer
        terms = partial(Terms, layer=layer, args=call.args, kwargs=call.kwargs)
        for edit, number in call.attended:
            if edit.means is not None and edit.means.taking and edit.indices:
                own = terms(call.module, number=number, gates=[one for one in call.edits if one.mode in GATES])
                if not edit.additive:
                    own.check(edit.indices[:1])
                edit.additive = True
                edit.means.add(number, own.of(*([head] for head in edit.indices)), layer)
        if not call.terms:
            return None
        whole = images_first(call.module, first_tensor(output, layer))
        for edit, number, heads in call.terms:
            if edit.means is not None:
                whole = edit.means.add_to(whole, number, [edit.indices.index(head) for head in heads], layer)
                continue
            assert edit.source is not None
            theirs = terms(edit.source, number=number)
            if not edit.additive:
                terms(call.module, number=number).check(heads)
                theirs.check(heads)
            edit.additive = True
            whole = whole + theirs.of(heads)[0].to(whole.dtype)
        return with_first_tensor(output, images_first(call.module, whole))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, what is computed of the layer is what its forwards compute."""
        running, frame = self.current(), sys._getframe()
        while frame.f_back is not None:  # the outermost one, which is there as long as this is read
            frame = frame.f_back
        call = running or _LayerCall(self.module, (), {}, frame, edits=self._edits)
        try:
            self._running[threading.get_ident()] = call
            with call.editing():
                yield
        finally:
            if running is None:
                self._leave()

    def _point(self) -> HookPoint | None:
        call = self.current()
        return None if call is None else call.point


def _check(call: _LayerCall) -> None:
    """Refuse what turns out not to have been done."""
    if wrong := call.point.check():
        raise RuntimeError(f"{call.edits[0].layer!r} {wrong}: choose other layers")
    attended = {edit for edit, _ in call.attended}
    for edit in call.edits:
        edit.ran = True
        edit.attended |= edit in attended
        if edit.strict and edit not in attended:
            several = f" of this number, only {call.point.asked}" if edit.call else ""
            raise RuntimeError(f"{edit.layer!r} ran and asked for no attention between tokens{several}")


def _can_average(edit: Edit, queries: int) -> bool:
    """Whether there are several queries, where it takes their mean; an error in a layer that the user named."""
    alone = edit.mode == "mean" and edit.means is None and queries == 1
    if alone and edit.strict:
        raise ValueError(f"{edit.layer!r} has a single query, whose mean is itself; give images= to take means over")
    return not alone
