"""What is edited in layers while they run, for those who read a layer between its forwards."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from tcnn_probe.hooks.modes import only_modes_from_here

__all__ = ["add_edit", "edited", "remove_edit"]

Edit = Callable[[], AbstractContextManager[object]]

_EDITS: WeakKeyDictionary[nn.Module, list[Edit]] = WeakKeyDictionary()


def add_edit(module: nn.Module, edit: Edit) -> None:
    """Have :func:`edited` enter ``edit()``, after those that were added before. A copy of the module has none."""
    _EDITS.setdefault(module, []).append(edit)


def remove_edit(module: nn.Module, edit: Edit) -> None:
    """Undo :func:`add_edit`; may be called again."""
    edits = _EDITS.get(module, [])
    if edit in edits:
        edits.remove(edit)
    if not edits:
        _EDITS.pop(module, None)


@contextmanager
def edited(module: nn.Module) -> Iterator[None]:
    """Inside, what is computed of a layer's parameters is what its forwards compute, ablations included.

    Function modes that the edits enter are in effect, also where torch functions are hidden from all modes; nobody
    else's are.
    """
    if not (edits := _EDITS.get(module)):
        yield
        return
    with only_modes_from_here(), ExitStack() as stack:
        for edit in list(edits):
            stack.enter_context(edit())
        yield
