"""All ablations of one layer together."""

import threading
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from tcnn_probe.hooks.edits import add_edit, remove_edit
from tcnn_probe.interventions.contributions import Terms, first_tensor, images_first, with_first_tensor
from tcnn_probe.interventions.edits import Edit
from tcnn_probe.interventions.gates import GATES
from tcnn_probe.interventions.layer_editor import LayerCall, LayerEditor

__all__ = ["LayerAblations"]

_LOCK = threading.RLock()


class LayerAblations(LayerEditor):
    """Edits a layer, checks that it was done, and adds the terms that take the place of others."""

    @classmethod
    def add(cls, edit: Edit) -> None:
        """Have one more thing done."""
        with _LOCK:
            ablations = _ABLATIONS.get(edit.module) or cls(edit.module)
            ablations.edits = (*ablations.edits, edit)
            if len(ablations.edits) == 1:
                _ABLATIONS[edit.module] = ablations
                add_edit(edit.module, ablations.reading)
                ablations.attach()

    @classmethod
    def remove(cls, edit: Edit) -> None:
        """Have it done no longer; may be called in the middle of a forward, and again."""
        with _LOCK:
            ablations = _ABLATIONS.get(edit.module)
            if ablations is not None and edit in ablations.edits:
                ablations.edits = tuple(other for other in ablations.edits if other is not edit)
                if not ablations.edits:
                    del _ABLATIONS[edit.module]
                    remove_edit(edit.module, ablations.reading)
                    ablations.detach()

    def returns(self, call: LayerCall, output: Any) -> Any:
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


_ABLATIONS: WeakKeyDictionary[nn.Module, LayerAblations] = WeakKeyDictionary()


def _check(call: LayerCall) -> None:
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
