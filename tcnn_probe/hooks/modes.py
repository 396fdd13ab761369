"""Function and dispatch modes: entering and leaving them, and hiding our own computations from all others."""

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar
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
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "EDITORS",
    "Uncompiled",
    "balanced_modes",
    "edited",
    "hidden_depth",
    "hidden_from_recorders",
    "is_transformed",
    "may_compile",
    "named_in_errors",
    "never_compiled_alone",
    "only_modes_from_here",
    "put_on",
    "restore_flags",
    "take_off",
    "unseen",
]

Mode = TorchFunctionMode | TorchDispatchMode
Function = TypeVar("Function", bound=Callable[..., Any])

# The modes of make_fx and torch.export, of fake tensors and of functionalization (private in torch 2.8 to 2.15).
_KEY = torch._C._TorchDispatchModeKey
_TRACERS = (_KEY.PROXY, _KEY.FAKE, _KEY.FUNCTIONAL)
_FLEX = "torch.nn.attention.flex_attention"
_OPERATORS = (_FLEX, "torch._higher_order_ops.")
# Each thread and each asynchronous task of the user hides its own code.
_HIDDEN = ContextVar("tcnn_probe_hidden", default=0)
_DEPTHS: list[int] = []
"""Depths of all code that is hidden now, in any thread."""


@contextmanager
def hidden_from_recorders() -> Iterator[None]:
    """Hide code from recorders attached outside: only recorders that are attached inside see it."""
    depth = _HIDDEN.get() + 1
    token = _HIDDEN.set(depth)
    _DEPTHS.append(depth)
    try:
        yield
    finally:
        _DEPTHS.remove(depth)
        _HIDDEN.reset(token)


def hidden_depth() -> int:
    """Return how deep inside of :func:`hidden_from_recorders` this is; in a thread of autograd's own, anywhere."""
    # A thread that torch started in C++ has no context of ours, and works for whatever is hidden anywhere.
    if isinstance(threading.current_thread(), threading._DummyThread):
        return max(_DEPTHS, default=0)
    return _HIDDEN.get()


class Uncompiled(TorchDispatchMode):
    """Mode that changes nothing; but while any dispatch mode is on, torch.compile leaves Python code as it is."""

    # Without this, flex_attention, cond, while_loop and scan raise NotImplementedError inside any dispatch mode.
    supports_higher_order_operators = True
    _thread: int | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let higher-order operators compile: they ask for a whole graph even in eager mode (torch 2.15)."""
        frame: Any = sys._getframe()
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(
            _OPERATORS
        ):
            frame = frame.f_back
        return frame is not None

    def __enter__(self) -> Any:
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            # Older torch (2.8) asks each of these operators for a rule of its own.
            for operator in torch._ops._higher_order_ops.values():
                if type(self) not in operator.python_key_table:
                    operator.py_impl(type(self))(_without_mode(operator))
        super().__enter__()
        if dispatch._get_current_dispatch_mode_stack() == [self]:
            # The flags are of all threads, and a mode that is on in another thread alone may be left before this one.
            for flags in _flags_to_restore(self):
                flags[-1] = False
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        # After a Ctrl-C other modes may lie above, or this one may be hidden by code that was interrupted.
        if dispatch._get_current_dispatch_mode_stack()[-1:] == [self]:
            super().__exit__(*error)

    def hold(self) -> None:
        """Let what was compiled with ``fullgraph=True``, which raises in any dispatch mode, run as it was written."""
        self._thread = threading.get_ident()
        _run_eagerly(+1)

    def release(self) -> None:
        """Let this thread compile again; the second call does nothing."""
        if self._thread == threading.get_ident():
            self._thread = None
            _run_eagerly(-1)


def _run_eagerly(step: int) -> None:
    """Count, in this thread, who wants compiled functions to run as they were written."""
    # torch's own switch, for code that it traces itself (private, torch 2.15).
    frames = sys.modules.get("torch._dynamo.eval_frame")
    switch = getattr(frames, "_force_eager_nested_compile", None)
    if switch is not None:
        switch.depth = max(0, getattr(switch, "depth", 0) + step)


def _without_mode(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's rule for a dispatch mode, which torch has taken off by then: it runs as ever."""
    return lambda mode, *args, **kwargs: operator(*args, **kwargs)


def never_compiled_alone(function: Function) -> Function:
    """Return a mode's ``__torch_function__``, which torch.compile then traces only as a part of what calls it."""
    # Otherwise torch.compile compiles one version for each kind of call, up to 256 of them. torch.compiler.disable
    # would break the graphs that flex_attention asks to be whole.
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(
        frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    )
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def may_compile() -> bool:
    """Return whether torch.compile was called in this process, or a forward may call it, as flex_attention does."""
    # transformers compiles flex_attention in the first forward: if that one is recorded, the call comes too late.
    if _FLEX in sys.modules:
        return True
    backends = sys.modules.get("torch._dynamo.eval_frame")
    frames = sys.modules.get("torch._dynamo.utils")
    has_compiled = frames is not None and frames.counters["frames"]["total"] > 0
    # What torch.compiler.disable was called on has None for a backend.
    return has_compiled or any(
        backend is not None
        for backend in getattr(backends, "cached_backends", {}).values()
    )


def put_on(*modes: Mode) -> list[Mode]:
    """Enter modes, and :class:`Uncompiled` where something may be compiled; return them for :func:`take_off`."""
    entered: list[Mode] = []
    for mode in (*modes, *([Uncompiled()] if may_compile() else [])):
        mode.__enter__()
        entered.append(mode)
        if isinstance(mode, Uncompiled):
            mode.hold()
    return entered


def take_off(modes: list[Mode]) -> None:
    """Leave modes that others may have been entered after and not left. The list is empty afterwards."""
    while modes:
        mode = modes.pop()
        _take_off(mode)
        if isinstance(mode, Uncompiled):
            mode.release()


def _take_off(mode: Mode) -> None:
    above: list[Any] = []
    functions: tuple[Any, Any, Any] = (
        _get_current_function_mode_stack,
        _pop_mode,
        _push_mode,
    )
    if isinstance(mode, TorchDispatchMode):
        functions = (
            dispatch._get_current_dispatch_mode_stack,
            dispatch._pop_mode,
            dispatch._push_mode,
        )
    stack, pop, push = functions
    # torch leaves only the mode on top: those above are set aside, and put back in their order.
    while stack() and stack()[-1] is not mode:
        above.append(pop())
    if stack():
        if above and isinstance(mode, TorchDispatchMode):
            _exchange_flags(mode, above[-1])
        try:
            mode.__exit__(None, None, None)
        except IndexError:  # a dispatch mode whose __exit__ was interrupted: its flags are restored, but it is still on
            pop()
    for mode_above in reversed(above):
        push(mode_above)


def restore_flags() -> None:
    """Set torch's flags of dispatch modes back, after a thread that ended with one on; not while one is on in this."""
    if not dispatch._get_current_dispatch_mode_stack():
        with Uncompiled():
            pass


def _flags_to_restore(mode: TorchDispatchMode) -> list[deque[bool]]:
    """Return what a dispatch mode sets torch's flags to when it is left: the last entry of a queue for each flag."""
    # torch.compile leaves all code as it is while one of them says that a mode is on (private, torch 2.8 to 2.15).
    names = [name for name in vars(mode) if name.endswith("dispatch_mode_flags")]
    return [vars(mode)[name] for name in sorted(names)]


def _exchange_flags(mode: TorchDispatchMode, above: TorchDispatchMode) -> None:
    """Let a mode and the one above it be left in the opposite order: the last of them restores what the first found."""
    for flags, flags_above in zip(
        _flags_to_restore(mode), _flags_to_restore(above), strict=True
    ):
        # Both have entries, but for a mode whose __exit__ was interrupted.
        if flags and flags_above:
            flags[-1], flags_above[-1] = flags_above[-1], flags[-1]


@contextmanager
def balanced_modes() -> Iterator[None]:
    """Take off all modes that code inside leaves on: Ctrl-C can fall between a mode's entry and its ``with`` block."""
    before = {id(mode) for mode in _modes()}
    has_gradients = torch.is_grad_enabled()
    # It restores the flag that torch functions are shown, for which torch has no setter.
    shown = (
        torch._C._EnableTorchFunction()
        if torch._C._is_torch_function_enabled()
        else nullcontext()
    )
    try:
        # Leaving inference mode late also brings back dispatch keys of modes that are off by then.
        with shown, torch._C._PreserveDispatchKeyGuard():
            try:
                yield
            except KeyboardInterrupt as error:
                # It can also fall in the __exit__ of a context manager, which is then resumed when its frame is
                # cleared: after those around it, so that it brings back what was set inside of them.
                traceback.clear_frames(error.__traceback__)
                torch.set_grad_enabled(has_gradients)
                raise
    finally:
        take_off([mode for mode in _modes() if id(mode) not in before])


def _modes() -> list[Any]:
    """Return the function modes and dispatch modes that are on in this thread."""
    return [
        *_get_current_function_mode_stack(),
        *dispatch._get_current_dispatch_mode_stack(),
    ]


@contextmanager
def only_modes_from_here() -> Iterator[None]:
    """Hide torch functions inside from all modes but those that are entered inside."""
    outer: list[Any] = []
    try:
        while torch._C._len_torch_function_stack():
            outer.append(_pop_mode())
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for mode in reversed(outer):
            _push_mode(mode)


def is_transformed(inputs: Iterable[Any]) -> bool:
    """Return whether a call is not the user's own on numbers: run again by checkpointing, traced or transformed."""
    if torch._C._current_graph_task_id() != -1:  # in a backward pass
        return True
    if (
        # In torch.func.vmap, grad and the like, or in torch.jit.trace.
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    ):
        return True
    # In torch.compile, or with one of the tracers' modes on.
    if torch.compiler.is_compiling() or any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACERS
    ):
        return True
    return any(
        isinstance(x, (Proxy, FakeTensor)) or (isinstance(x, Tensor) and x.is_meta)
        for x in inputs
    )


@contextmanager
def unseen() -> Iterator[None]:
    """Run operations inside without gradients of either mode, hidden from every function and dispatch mode."""
    with (
        # inference_mode(False) comes first, as it turns gradients on; without it, sums made here could not be changed
        # outside.
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.no_grad(),
        forward_ad._set_fwd_grad_enabled(False),
    ):
        # Disabling modes takes 0.1 ms even where none is on; asking whether one is takes next to nothing.
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
"""Editors of modules, whose method ``reading()`` enters what they edit. A copy of a module has none."""


@contextmanager
def edited(module: nn.Module) -> Iterator[None]:
    """Compute inside what a layer's forwards compute of its parameters, ablations included.

    Function modes that the edit enters are in effect, also where torch functions are hidden from all modes; nobody
    else's are.
    """
    editor = EDITORS.get(module)
    if editor is None:
        yield
        return
    with only_modes_from_here(), editor.reading():
        yield
