"""What is edited in layers while they run, for those who read a layer between its forwards."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from tcnn_probe.hooks.modes import only_modes_from_here

__all__ = ["EDITS", "edited"]

EDITS: WeakKeyDictionary[nn.Module, Callable[[], AbstractContextManager[object]]] = WeakKeyDictionary()
"""What :func:`edited` enters, by module. A copy of the module has none."""


@contextmanager
def edited(module: nn.Module) -> Iterator[None]:
    """Inside, what is computed of a layer's parameters is what its forwards compute, ablations included.

    Function modes that the edit enters are in effect, also where torch functions are hidden from all modes; nobody
    else's are.
    """
    if (edit := EDITS.get(module)) is None:
        yield
        return
    with only_modes_from_here(), edit():
        yield
