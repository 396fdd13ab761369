"""Running compiled code eagerly while a forward is followed,
because hooks and function modes see nothing in graphs.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet, finalize

import torch
from torch import nn

from tcnn_probe.hooks.private_torch import (
    COMPILED_CALL,
    COMPILED_MODULE,
    UNCOMPILED_FUNCTION,
    _FrameAction,
    _FrameExecStrategy,
    count_compiled_frames,
    eager_switch,
    set_code_exec_strategy,
    set_eval_frame,
)

__all__ = [
    "ADVICE_FOR_WHOLE_GRAPHS",
    "Eagerness",
    "is_compiled",
    "is_eager",
    "never_compiled",
    "never_compiled_alone",
    "run_uncompiled",
]

ADVICE_FOR_WHOLE_GRAPHS = (
    "with fullgraph=True hooks inside the compiled call cannot let the model run eagerly, where "
    "they would see it: write compiled = torch.compile(model, fullgraph=True), give `compiled` to "
    "tcnn_probe, and call it"
)

Function = TypeVar("Function", bound=Callable[..., Any])

_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
_SKIP_WITH_CALLEES = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_FLEX = "torch.nn.attention.flex_attention"
_LOCK = threading.RLock()
_OPEN: "WeakSet[Eagerness]" = WeakSet()
_THREAD = threading.local()
_STANCES: list[Any] = []


class Eagerness:
    """Runs functions and modules that torch.compile has compiled eagerly in this thread,
    from :meth:`open` to :meth:`close`.

    If Ctrl-C interrupts this, compiled code may run eagerly until the next followed forward ends.
    """

    def __init__(self, model: nn.Module) -> None:
        self._thread = threading.get_ident()
        self._model = model

    def open(self) -> None:
        """Run compiled code eagerly from now on."""
        with _LOCK:
            _OPEN.add(self)
            _apply()
        if eager_switch() is None:
            # The stance holds in all threads, and this one may end within its forward.
            finalize(self, _apply).atexit = False

    def close(self) -> None:
        """Compile again; a second call has no effect."""
        with _LOCK:
            _OPEN.discard(self)
            _apply()

    def needs_stance(self) -> bool:
        """Return whether attention may run in compiled code, so that it would be missed."""
        return _FLEX in sys.modules or any(map(is_compiled, self._model.modules()))

    @property
    def is_of_this_thread(self) -> bool:
        """Whether it was opened in this thread."""
        return self._thread == threading.get_ident()


def _apply() -> None:
    """Tell torch whether compiled functions run eagerly. Repeated calls repair what an interrupted
    one has left.
    """
    _THREAD.depth = sum(eagerness.is_of_this_thread for eagerness in _OPEN)
    switch = eager_switch()
    if switch is not None:
        # This holds in this thread only, and operators that compile functions work.
        switch.depth = _THREAD.depth
        return
    # The public stance holds in all threads, and `cond` and `map` of torch refuse it.
    is_needed = any(eagerness.needs_stance() for eagerness in _OPEN)
    if is_needed and not _STANCES:
        _STANCES.append(torch.compiler.set_stance("force_eager"))
    elif not is_needed and _STANCES:
        _STANCES.pop().__exit__(None, None, None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of torch.compile,
    or was compiled in place, or by its forward.
    """
    return (
        COMPILED_MODULE in module._modules
        or getattr(module, COMPILED_CALL, None) is not None
        or hasattr(vars(module).get("forward"), UNCOMPILED_FUNCTION)
    )


def never_compiled_alone(function: Function) -> Function:
    """Mark a function that torch.compile does not compile by itself,
    but traces as a part of its caller.
    """
    # Otherwise a mode's __torch_function__ would be compiled for each kind of call, up to 256
    # times. With torch.compiler.disable it would break graphs that flex_attention requires to be
    # unbroken.
    set_code_exec_strategy(function.__code__, _SKIP)
    return function


def never_compiled(function: Function) -> Function:
    """Mark a function that torch.compile compiles neither
    by itself nor what it calls, and that it never traces.
    """
    # torch.compiler.disable takes 5 us for each call, and hooks of all modules call such functions.
    set_code_exec_strategy(function.__code__, _SKIP_WITH_CALLEES)
    return function


@never_compiled_alone
def run_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function that compiled code has called;
    if it opens an :class:`Eagerness`, its caller goes on eagerly.
    """
    # torch.compile runs hooks of whole models outside of its graphs, with this callback on, by
    # which it would compile the model's forward next. The function that torch.compile returns
    # resets the callback, whatever happens.
    callback = set_eval_frame(None)
    try:
        result = function(*args)
        if callback is not None and is_eager():
            _check_graph_is_optional()
        return result
    finally:
        if not is_eager():
            set_eval_frame(callback)


def is_eager() -> bool:
    """Return whether compiled code runs eagerly in this thread."""
    return getattr(_THREAD, "depth", 0) > 0


def _check_graph_is_optional() -> None:
    # torch 2.15 refuses a call with fullgraph=True that compiles no frame.
    if count_compiled_frames() == 0:
        raise RuntimeError(ADVICE_FOR_WHOLE_GRAPHS)
