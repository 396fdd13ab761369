"""Function modes: entering and leaving them, and hiding our own computations from other modes."""

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_leaves

from tcnn_probe.hooks.compilation import Eagerness

__all__ = [
    "EDITORS",
    "Scope",
    "balanced_modes",
    "edited",
    "hidden_depth",
    "hidden_from_recorders",
    "is_function_transformed",
    "is_nested",
    "is_transformed",
    "named_in_errors",
    "only_modes_from_here",
    "take_off",
    "unseen",
]

# Keys of the modes of make_fx and torch.export, of fake tensors and of functionalization (private, torch 2.8 to 2.15).
_KEY = torch._C._TorchDispatchModeKey
_TRACERS = (_KEY.PROXY, _KEY.FAKE, _KEY.FUNCTIONAL)
# This is a context variable, so that each thread and asynchronous task of the user hides its own code.
_HIDDEN = ContextVar("tcnn_probe_hidden", default=0)
_DEPTHS: list[int] = []
"""Depths of the code that is currently hidden, in all threads."""


@contextmanager
def hidden_from_recorders() -> Iterator[None]:
    """Hide the code inside from all recorders except those that are attached inside."""
    depth = _HIDDEN.get() + 1
    token = _HIDDEN.set(depth)
    _DEPTHS.append(depth)
    try:
        yield
    finally:
        _DEPTHS.remove(depth)
        _HIDDEN.reset(token)


def hidden_depth() -> int:
    """Return how many :func:`hidden_from_recorders` are active here; in autograd's threads, the maximum anywhere."""
    # A thread that torch has started in C++ does not inherit the context variable, and may work for any thread.
    if isinstance(threading.current_thread(), threading._DummyThread):
        return max(_DEPTHS, default=0)
    return _HIDDEN.get()


class Scope:
    """Function modes that are on, and compiled code that runs eagerly, from here to :meth:`close`."""

    def __init__(self, module: nn.Module, *modes: TorchFunctionMode) -> None:
        self._modes: list[TorchFunctionMode] = []
        self._eagerness = Eagerness(module)
        for mode in modes:
            mode.__enter__()
            self._modes.append(mode)

    def close(self) -> None:
        """Leave the modes, even if others that were entered later are still on. A second call has no effect."""
        self.leave_modes()
        self._eagerness.close()

    def leave_modes(self) -> None:
        """Leave the modes, but still run compiled code eagerly."""
        while self._modes:
            take_off(self._modes.pop())


def take_off(mode: TorchFunctionMode) -> None:
    """Leave a function mode, wherever it is in the stack."""
    # torch can only leave the mode on top, so modes above are set aside and then put back in their order.
    above: list[Any] = []
    while torch._C._len_torch_function_stack():
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for mode_above in reversed(above):
        _push_mode(mode_above)


@contextmanager
def balanced_modes() -> Iterator[None]:
    """Leave all modes that the code inside leaves on, for example when Ctrl-C comes just after a mode was entered."""
    before = _get_current_function_mode_stack()
    count = torch._C._len_torch_dispatch_stack()
    has_gradients = torch.is_grad_enabled()
    # This guard restores the flag that enables __torch_function__, for which torch has no setter.
    shown = (
        torch._C._EnableTorchFunction()
        if torch._C._is_torch_function_enabled()
        else nullcontext()
    )
    try:
        # The second guard is needed because leaving inference mode late restores dispatch keys of modes that are off.
        with shown, torch._C._PreserveDispatchKeyGuard():
            try:
                yield
            except KeyboardInterrupt as error:
                # If Ctrl-C interrupts the __exit__ of a context manager, it is resumed when its frame is cleared, after
                # the outer context managers have ended, and restores a state from inside them. So frames are cleared
                # first.
                traceback.clear_frames(error.__traceback__)
                torch.set_grad_enabled(has_gradients)
                raise
    finally:
        for mode in _get_current_function_mode_stack():
            if mode not in before:
                take_off(mode)
        while torch._C._len_torch_dispatch_stack() > count:
            dispatch._pop_mode()


@contextmanager
def only_modes_from_here() -> Iterator[None]:
    """Disable all function modes inside the ``with``, except those that are entered inside it."""
    outer: list[Any] = []
    try:
        while torch._C._len_torch_function_stack():
            outer.append(_pop_mode())
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for mode in reversed(outer):
            _push_mode(mode)


def is_function_transformed() -> bool:
    """Return whether a function runs under torch.vmap, torch.func.grad or another transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_nested(value: Any) -> bool:
    """Return whether a value is a nested tensor, whose images have different sizes, so that it has no shape."""
    # Reading a property of a tensor is a call of a torch function, which the user's modes must not see.
    with torch._C.DisableTorchFunction():
        return isinstance(value, Tensor) and value.is_nested


def is_transformed(inputs: Any) -> bool:
    """Return whether a call is a recomputation of checkpointing, or is traced or transformed by torch."""
    if torch._C._current_graph_task_id() != -1:  # in a backward pass
        return True
    if is_function_transformed() or torch._C._is_tracing():  # the latter in torch.jit
        return True
    # In torch.compile, or with one of the tracers' modes on.
    if torch.compiler.is_compiling() or any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACERS
    ):
        return True
    # Models and functions such as torch.cat take tensors in tuples and dictionaries, too.
    return any(
        isinstance(x, (Proxy, FakeTensor)) or (isinstance(x, Tensor) and x.is_meta)
        for x in tree_leaves(inputs)
    )


@contextmanager
def unseen() -> Iterator[None]:
    """Run operations without forward- or reverse-mode gradients, hidden from all function and dispatch modes."""
    with (
        # In inference mode, sums that are created here could not be changed in place outside. inference_mode(False)
        # turns gradients on, so no_grad() comes after it.
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.no_grad(),
        forward_ad._set_fwd_grad_enabled(False),
    ):
        # Disabling modes takes 0.1 ms even if none is on, so it is checked first whether one is.
        if not torch._C._len_torch_dispatch_stack():
            yield
            return
        with dispatch._disable_current_modes():
            yield


@contextmanager
def named_in_errors(layer: str) -> Iterator[None]:
    """Add the name of a layer to errors that are raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"while tcnn_probe measured the layer {layer!r}")
        raise


EDITORS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Editors of modules. Their method ``reading()`` is a context manager that applies the edits. Copies have no editor."""


@contextmanager
def edited(module: nn.Module) -> Iterator[None]:
    """Apply the edits of a layer's parameters, such as ablations, that are active in its forwards.

    Inside, only function modes that the edit enters are active, even if torch functions are hidden from all modes.
    """
    editor = EDITORS.get(module)
    if editor is None:
        yield
        return
    with only_modes_from_here(), editor.reading():
        yield
