"""What is edited in layers while they run, for those who read a layer between its forwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from tcnn_probe.hooks.modes import only_modes_from_here

__all__ = ["EDITORS", "edited"]

EDITORS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""What edits a module, by module, with a method ``reading()``, which :func:`edited` enters. A copy has none."""


@contextmanager
def edited(module: nn.Module) -> Iterator[None]:
    """Inside, what is computed of a layer's parameters is what its forwards compute, ablations included.

    Function modes that the edit enters are in effect, also where torch functions are hidden from all modes; nobody
    else's are.
    """
    if (editor := EDITORS.get(module)) is None:
        yield
        return
    with only_modes_from_here(), editor.reading():
        yield
