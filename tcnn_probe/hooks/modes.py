"""Function modes: entering and leaving them, and hiding our own code.

Computations with the tensors of a forward run under :func:`run_unseen`, so that nobody takes them
for the model's; where only properties are read, torch.DisableTorchFunction is enough.
:func:`run_in_modes` lets some modes see such a computation after all. :func:`hidden_from_recorders`
hides forwards that we run ourselves from the user's recorders, but not from other modes.
"""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.overrides import TorchFunctionMode

from tcnn_probe.hooks.private_torch import (
    _current_graph_task_id,
    _disable_current_modes,
    _EnableTorchFunction,
    _get_current_dispatch_mode_stack,
    _get_current_function_mode_stack,
    _InferenceMode,
    _PreserveDispatchKeyGuard,
    _set_fwd_grad_enabled,
    peek_interpreter_stack,
)

__all__ = [
    "HIDDEN_DEPTHS",
    "balanced_modes",
    "end_interrupted_contexts",
    "hidden_depth",
    "hidden_from_recorders",
    "is_function_transformed",
    "is_nested",
    "is_transformed",
    "leave_mode",
    "leaves_of",
    "named_in_errors",
    "run_in_modes",
    "run_unseen",
    "unseen",
    "without_gradients",
]

Result = TypeVar("Result")

# Modes of make_fx and torch.export, of fake tensors and of functionalization. Types of tracers are
# told by their names, because they are private, and some take long to import.
_TRACERS = {"ProxyTorchDispatchMode", "FakeTensorMode", "FunctionalTensorMode"}
# This is a context variable, so that each thread and asynchronous task of the user hides its own
# code.
_HIDDEN = ContextVar("tcnn_probe_hidden", default=0)
HIDDEN_DEPTHS: list[int] = []
"""Depths of the code that is currently hidden, in all threads."""


@contextmanager
def hidden_from_recorders() -> Iterator[None]:
    """Hide the code inside from all recorders except those that are attached inside."""
    depth = _HIDDEN.get() + 1
    token = _HIDDEN.set(depth)
    HIDDEN_DEPTHS.append(depth)
    try:
        yield
    finally:
        HIDDEN_DEPTHS.remove(depth)
        _HIDDEN.reset(token)


def hidden_depth() -> int:
    """Return how many :func:`hidden_from_recorders` are active here;
    in autograd's threads, the maximum anywhere.
    """
    # If nothing is hidden anywhere, this is found out much faster than the rest.
    if not HIDDEN_DEPTHS:
        return 0
    # A thread that torch has started in C++ does not inherit the context variable, and may work for
    # any thread.
    if isinstance(threading.current_thread(), threading._DummyThread):
        return max(HIDDEN_DEPTHS, default=0)
    return _HIDDEN.get()


def leave_mode(mode: TorchFunctionMode) -> bool:
    """Leave a function mode, wherever it is in the stack; return False if it is not there."""
    stack = _get_current_function_mode_stack()
    place = next((place for place, entered in enumerate(stack) if entered is mode), None)
    if place is None:
        return False
    # torch can only leave the mode on top, so modes above are set aside and then put back in their
    # order. Methods of theirs could do more than that.
    for entered in reversed(stack[place:]):
        TorchFunctionMode.__exit__(entered, None, None, None)
    for entered in stack[place + 1 :]:
        TorchFunctionMode.__enter__(entered)
    return True


def end_interrupted_contexts() -> None:
    """End the context managers whose ``__exit__`` was interrupted by the Ctrl-C
    that is being handled, if one is.

    They are resumed when the frame of their ``__exit__`` is cleared, which is otherwise after the
    outer context managers have ended, and restore a state from inside them. In this way torch puts
    back a mode that it has set aside while the mode handles a call.
    """
    error = sys.exc_info()[1]
    if isinstance(error, KeyboardInterrupt):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == contextlib.__file__:
                with suppress(RuntimeError):  # the frame is running, as around this call
                    frame.clear()


@contextmanager
def balanced_modes() -> Iterator[None]:
    """Leave all modes that the code inside leaves on,
    for example when Ctrl-C comes just after a mode was entered.
    """
    before = _get_current_function_mode_stack()
    count = len(_get_current_dispatch_mode_stack())
    has_gradients = torch.is_grad_enabled()
    try:
        # The first guard restores the flag that enables __torch_function__, for which torch has no
        # setter. The second one is needed because leaving inference mode late restores dispatch
        # keys of modes that are off.
        with _EnableTorchFunction(), _PreserveDispatchKeyGuard():
            try:
                yield
            except KeyboardInterrupt:
                end_interrupted_contexts()
                torch.set_grad_enabled(has_gradients)
                raise
    finally:
        for mode in _get_current_function_mode_stack():
            if mode not in before:
                leave_mode(mode)
        for entered in reversed(_get_current_dispatch_mode_stack()[count:]):
            entered.__exit__(None, None, None)


class _Curtain(TorchFunctionMode):
    """Mode that hides calls of torch from the modes below it while it is up."""

    is_up = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_up:
            return func(*args, **(kwargs or {}))
        with torch.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


def run_in_modes(function: Callable[[], Result], *modes: TorchFunctionMode) -> Result:
    """Call a function with these function modes only,
    even where torch functions are hidden from all modes.
    """
    entered: list[TorchFunctionMode] = []
    curtain = _Curtain()
    try:
        with _EnableTorchFunction():
            for mode in (curtain, *modes):
                # This order leaves a mode that Ctrl-C has interrupted while it was entered.
                entered.append(mode)
                mode.__enter__()
            return function()
    finally:
        # A curtain that Ctrl-C leaves on hides nothing.
        curtain.is_up = False
        for mode in reversed(entered):
            leave_mode(mode)


def is_function_transformed() -> bool:
    """Return whether a function runs under torch.vmap,
    torch.func.grad or another transform of torch.func.
    """
    return peek_interpreter_stack() is not None


def is_nested(value: Any) -> bool:
    """Return whether a value is a nested tensor,
    whose images have different sizes, so that it has no shape.
    """
    # Reading a property of a tensor is a call of a torch function, which the user's modes must not
    # see.
    with torch.DisableTorchFunction():
        return isinstance(value, Tensor) and value.is_nested


def is_transformed(inputs: Sequence[Any]) -> bool:
    """Return whether a call is a recomputation of checkpointing,
    or is traced or transformed by torch.
    """
    if _current_graph_task_id() != -1:  # in a backward pass
        return True
    if is_function_transformed() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    # In torch.compile, or with one of the tracers' modes on.
    if torch.compiler.is_compiling() or any(
        type(mode).__name__ in _TRACERS for mode in _get_current_dispatch_mode_stack()
    ):
        return True
    for value in leaves_of(inputs):
        if isinstance(value, Tensor):
            if value.is_meta or type(value).__name__ == "FakeTensor":
                return True
        elif isinstance(value, Proxy):
            return True
    return False


def leaves_of(values: Sequence[Any]) -> Sequence[Any]:
    """Return all values inside of values, which may be nested in sequences and mappings."""
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, (Tensor, int, float, str)):
            leaves.append(value)  # as nearly all arguments
        elif isinstance(value, Mapping):
            leaves += leaves_of([*value.values()])
        else:
            leaves += leaves_of(value) if isinstance(value, (tuple, list)) else [value]
    return leaves


def run_unseen(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function without forward- or reverse-mode gradients, hidden from all modes."""
    # Python runs no handler of signals between the effect of these C++ guards and their ``with``,
    # unlike in no_grad and other context managers that are written in Python. In inference mode,
    # sums that are created here could not be changed in place outside. The second guard restores
    # the flags of gradients, too.
    with torch.DisableTorchFunction(), _InferenceMode(False):
        torch.set_grad_enabled(False)
        _set_fwd_grad_enabled(False)
        # Disabling modes takes 0.1 ms even if none is on, so it is checked first whether one is.
        if not _get_current_dispatch_mode_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)


def without_gradients(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function to run as under torch.no_grad, which Ctrl-C can leave on."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        # The guard of C++ restores the flag, see run_unseen().
        with _InferenceMode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(False)
            return function(*args, **kwargs)

    return run


def unseen(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function to run as under :func:`run_unseen`."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        return run_unseen(function, *args, **kwargs)

    return run


@contextmanager
def named_in_errors(layer: str) -> Iterator[None]:
    """Add the name of a layer to errors that are raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"while tcnn_probe measured the layer {layer!r}")
        raise
