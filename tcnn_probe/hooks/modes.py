"""Function and dispatch modes: entering and leaving them, and hiding our own computations from other modes."""

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
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
from torch.utils._pytree import tree_leaves

__all__ = [
    "EDITORS",
    "Uncompiled",
    "balanced_modes",
    "edited",
    "hidden_depth",
    "hidden_from_recorders",
    "is_function_transformed",
    "is_nested",
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

# Keys of the modes of make_fx and torch.export, of fake tensors and of functionalization (private, torch 2.8 to 2.15).
_KEY = torch._C._TorchDispatchModeKey
_TRACERS = (_KEY.PROXY, _KEY.FAKE, _KEY.FUNCTIONAL)
_FLEX = "torch.nn.attention.flex_attention"
_OPERATORS = (_FLEX, "torch._higher_order_ops.")
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


class Uncompiled(TorchDispatchMode):
    """Dispatch mode without effect, under which torch.compile does not compile Python code."""

    # Otherwise flex_attention, cond, while_loop and scan would raise NotImplementedError in this mode.
    supports_higher_order_operators = True
    _thread: int | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let higher-order operators compile, because they need a full graph even in eager mode (torch 2.15)."""
        frame: Any = sys._getframe()
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(
            _OPERATORS
        ):
            frame = frame.f_back
        return frame is not None

    def __enter__(self) -> Any:
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            # In older torch (2.8), each of these operators needs a rule for the mode.
            for operator in torch._ops._higher_order_ops.values():
                if type(self) not in operator.python_key_table:
                    operator.py_impl(type(self))(_without_mode(operator))
        super().__enter__()
        if dispatch._get_current_dispatch_mode_stack() == [self]:
            # The flags are shared by all threads, and a mode in another thread may be left before this one.
            for flags in _flags_to_restore(self):
                flags[-1] = False
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        # After Ctrl-C other modes may be on top of this one, or interrupted code may have hidden this one.
        if dispatch._get_current_dispatch_mode_stack()[-1:] == [self]:
            super().__exit__(*error)

    def hold(self) -> None:
        """Run functions that were compiled with ``fullgraph=True`` eagerly: they would raise in a dispatch mode."""
        self._thread = threading.get_ident()
        _run_eagerly(+1)

    def release(self) -> None:
        """Let this thread compile again; a second call has no effect."""
        if self._thread == threading.get_ident():
            self._thread = None
            _run_eagerly(-1)


def _run_eagerly(step: int) -> None:
    """Change the number of requests, in this thread, to run compiled functions eagerly."""
    # torch has this switch for code that it traces (private, torch 2.15).
    frames = sys.modules.get("torch._dynamo.eval_frame")
    switch = getattr(frames, "_force_eager_nested_compile", None)
    if switch is not None:
        switch.depth = max(0, getattr(switch, "depth", 0) + step)


def _without_mode(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's rule for a dispatch mode: run the operator, as torch has disabled the mode by then."""
    return lambda mode, *args, **kwargs: operator(*args, **kwargs)


def never_compiled_alone(function: Function) -> Function:
    """Mark a mode's ``__torch_function__``, so that torch.compile traces it only as a part of its caller."""
    # Otherwise torch.compile would compile one version for each kind of call, up to 256 of them. torch.compiler.disable
    # would break graphs that flex_attention requires to be unbroken.
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(
        frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    )
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def may_compile() -> bool:
    """Return whether torch.compile was called in this process, or a forward may call it, as flex_attention does."""
    # transformers compiles flex_attention in the first forward, perhaps after the recorder has asked.
    if _FLEX in sys.modules:
        return True
    backends = sys.modules.get("torch._dynamo.eval_frame")
    frames = sys.modules.get("torch._dynamo.utils")
    has_compiled = frames is not None and frames.counters["frames"]["total"] > 0
    # Functions under torch.compiler.disable have None as their backend.
    return has_compiled or any(
        backend is not None
        for backend in getattr(backends, "cached_backends", {}).values()
    )


def put_on(*modes: Mode) -> list[Mode]:
    """Enter modes, and also :class:`Uncompiled` if code may be compiled; return them for :func:`take_off`."""
    entered: list[Mode] = []
    for mode in (*modes, *([Uncompiled()] if may_compile() else [])):
        mode.__enter__()
        entered.append(mode)
        if isinstance(mode, Uncompiled):
            mode.hold()
    return entered


def take_off(modes: list[Mode]) -> None:
    """Leave modes, even if modes that were entered later are still on. The list is empty afterwards."""
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
    # torch can only leave the mode on top, so modes above are set aside and then put back in their order.
    while stack() and stack()[-1] is not mode:
        above.append(pop())
    if stack():
        if above and isinstance(mode, TorchDispatchMode):
            _exchange_flags(mode, above[-1])
        try:
            mode.__exit__(None, None, None)
        except IndexError:  # its __exit__ was interrupted after it had restored the flags: the mode is still on
            pop()
    for mode_above in reversed(above):
        push(mode_above)


def restore_flags() -> None:
    """Reset torch's flags after a thread ended with a dispatch mode on, unless this thread has one on."""
    if not dispatch._get_current_dispatch_mode_stack():
        with Uncompiled():
            pass


def _flags_to_restore(mode: TorchDispatchMode) -> list[deque[bool]]:
    """Return the queues whose last entries are the values that a dispatch mode restores when it is left, by flag."""
    # While a flag says that a mode is on, torch.compile does not compile (private, torch 2.8 to 2.15).
    names = [name for name in vars(mode) if name.endswith("dispatch_mode_flags")]
    return [vars(mode)[name] for name in sorted(names)]


def _exchange_flags(mode: TorchDispatchMode, above: TorchDispatchMode) -> None:
    """Exchange the flags that two modes restore, so that the lower mode can be left before the one above it."""
    for flags, flags_above in zip(
        _flags_to_restore(mode), _flags_to_restore(above), strict=True
    ):
        # A queue is empty if the mode's __exit__ was interrupted.
        if flags and flags_above:
            flags[-1], flags_above[-1] = flags_above[-1], flags[-1]


@contextmanager
def balanced_modes() -> Iterator[None]:
    """Leave all modes that the code inside leaves on, for example when Ctrl-C comes just after a mode was entered."""
    before = {id(mode) for mode in _modes()}
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
        take_off([mode for mode in _modes() if id(mode) not in before])


def _modes() -> list[Any]:
    """Return the function and dispatch modes that are on in this thread."""
    return [
        *_get_current_function_mode_stack(),
        *dispatch._get_current_dispatch_mode_stack(),
    ]


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
