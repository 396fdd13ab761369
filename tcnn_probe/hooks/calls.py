"""Following the calls of a module, separately in each thread,
with hooks that have no effect in copies of it.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from tcnn_probe.hooks.compilation import (
    ADVICE_FOR_WHOLE_GRAPHS,
    never_compiled_alone,
    run_uncompiled,
)
from tcnn_probe.hooks.modes import end_interrupted_contexts
from tcnn_probe.hooks.private_torch import hook_tables
from tcnn_probe.hooks.scope import Scope

__all__ = [
    "Call",
    "Calls",
    "CopySafeHook",
    "add_hook",
    "balanced_hooks",
    "innermost_call",
    "is_running",
    "outermost_call",
    "without_nested",
]


_NUMBERING = threading.Lock()


@dataclass(eq=False)
class Call:
    """A call of a module or of its replica, in a frame of torch; its ``scope`` ends with it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    frame: FrameType
    thread: int = field(default_factory=threading.get_ident)
    scope: Scope = field(default_factory=Scope)
    over: bool = False
    depth: int = 0  # number of calls within this one, if the module calls itself

    @property
    def inputs(self) -> list[Any]:
        """Positional arguments, followed by keyword arguments."""
        return without_nested(*self.args, *self.kwargs.values())

    def close(self) -> None:
        """End the call, also after Ctrl-C. This may be repeated."""
        self.over = True
        self.scope.close()

    def is_open(self) -> bool:
        """Return whether the call is neither over nor interrupted,
        or still has modes to leave at its end.
        """
        return (not self.over or self.scope.has_modes) and is_running(self.frame)


def without_nested(*values: Any) -> list[Any]:
    """Return inputs or outputs of a module,
    None in place of nested tensors, whose shapes cannot be read.
    """
    # One guard for all values, because hooks of all modules call this.
    with torch.DisableTorchFunction():
        return [
            None if isinstance(value, Tensor) and value.is_nested else value for value in values
        ]


C = TypeVar("C", bound=Call)


class Calls(Generic[C]):
    """Follows the calls of a module between :meth:`attach` and :meth:`detach`;
    a nested call belongs to the outer one.

    Torch runs no hooks after a ``KeyboardInterrupt`` or ``SystemExit``. A call that ends in this
    way is cleaned up by the module's next call in the same thread, or by :meth:`detach`.
    """

    def __init__(self, module: nn.Module, kind: type[C]) -> None:
        self.module = module
        self._kind = kind
        self._running: dict[int, C] = {}  # by thread
        self._handles: list[RemovableHandle] = []
        # The lock is reentrant, because detach() calls _leave(), in which Forwards takes it again.
        self._attached = False
        self._is_adding = False  # stays True if Ctrl-C comes before a handle is kept
        self._lock = threading.RLock()

    def follows(self, module: nn.Module) -> bool:
        """Return whether to follow a call of a hooked module that is not within a followed one."""
        return True

    def enter_call(self, call: C) -> None:
        """Prepare, before the module runs."""

    def edit_output(self, call: C, output: Any) -> Any:
        """React to the output; a result other than None replaces it."""

    def exit_call(self, call: C, output: Any) -> None:
        """Clean up when the call is over, also after an exception."""

    @property
    def attached(self) -> bool:
        """True while calls are followed."""
        return self._attached

    def attach(self) -> None:
        """Add hooks to the module."""
        self._attached = True
        self._add(self.module, self._begin)
        # This hook runs before all others, which then run without our modes and see the edited
        # output. The hook that cleans up runs last.
        self._add(self.module, self._return, after=True, first=True)
        self._add(self.module, self._end, after=True, always=True)

    def _add(self, module: nn.Module, act: Callable[..., Any], **options: bool) -> None:
        """Add a hook that :meth:`detach` removes, see :func:`add_hook`."""
        self._is_adding = True
        self._handles.append(add_hook(module, act, **options))
        self._is_adding = False

    def detach(self) -> None:
        """Remove the hooks, as soon as calls that still run
        in other threads have ended. This may be repeated.

        If such a call ends by an exception after which torch runs no hooks (SystemExit), the
        module's next call removes them.
        """
        # Before modes are left, so that none is put back afterwards.
        end_interrupted_contexts()
        with self._lock:
            self._attached = False
            self._leave()
            for call in list(self._running.values()):
                # If a thread has left a call without running a hook, the hooks would otherwise
                # never be removed.
                call.over = not call.is_open()
            # While a call runs in another thread, the hook that ends it is still needed.
            while self._handles and all(call.over for call in list(self._running.values())):
                self._handles[-1].remove()
                del self._handles[-1:]
            if self._is_adding and not self._handles:
                self._remove_hooks_without_handles()

    def _remove_hooks_without_handles(self) -> None:
        """Remove hooks whose handles were not kept, as Ctrl-C came while they were added."""
        for module in self.module.modules():
            tables = hook_tables(module)
            others = {
                number
                for hooks in tables
                for number, hook in hooks.items()
                if callable(hook) and _owner_of(hook) is not self
            }
            for hooks in tables:
                for number in hooks.keys() - others:
                    del hooks[number]

    def current(self) -> C | None:
        """Return the call that is running in this thread."""
        call = self._running.get(threading.get_ident())
        return call if call is not None and is_running(call.frame) else None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if (call := self.current()) is not None:
            call.depth += call.module is module
            return
        if not self.follows(module):
            return
        self._leave()  # an earlier call that was interrupted
        if not self._attached:
            self.detach()
        elif (frame := innermost_call(sys._getframe())) is not None:
            self._running[threading.get_ident()] = call = self._kind(module, args, kwargs, frame)
            try:
                self.enter_call(call)
            # torch runs no hooks after a KeyboardInterrupt, so the call is ended here.
            except BaseException:
                self._leave()
                raise

    def _return(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Any:
        call = self.current()
        if call is None or not self._is_of(call, module):
            return None
        call.scope.leave_modes()
        return self.edit_output(call, output)

    def _end(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any = None,
    ) -> None:
        call = self._running.get(threading.get_ident())
        if call is None or call.module is not module or self.current() is None:
            return
        if not self._is_of(call, module):
            call.depth -= 1
            return
        try:
            self.exit_call(call, output)
        finally:
            self._leave()
            if not self._attached:
                self.detach()

    def _is_of(self, call: C, module: nn.Module) -> bool:
        """Return whether a hook runs for this call, not for a nested one."""
        # Frames are compared only for nested calls, because torch.compile may end a call in another
        # frame.
        return call.module is module and (
            not call.depth or innermost_call(sys._getframe()) is call.frame
        )

    def _leave(self) -> None:
        thread = threading.get_ident()
        call = self._running.get(thread)
        if call is not None:
            call.close()
            # It is forgotten last, so that this is repeated if Ctrl-C interrupts it. While a mode
            # handles a call of torch, the call of the module goes on, and the hook at its end
            # repeats this.
            if not call.is_open():
                self._running.pop(thread, None)


class CopySafeHook:
    """Hook that has no effect in a copy or pickle of its module,
    and removes itself when it is called there.
    """

    def __init__(self, act: Callable[..., Any] | None, *, after: bool = False) -> None:
        self._act = act
        self._after = after
        self.number = -1
        """Number under which torch keeps the hook."""

    @property
    def __name__(self) -> str:
        """No name: torch.jit.script asks for it before it compiles the hooks of a module,
        which these cannot be.
        """
        raise AttributeError(
            "torch.jit.script compiles the hooks of a model, and tcnn_probe's cannot be compiled: "
            "script the model while no recorder is attached; a copy of a recorded model drops its "
            "hooks in its first forward"
        )

    @never_compiled_alone
    def __call__(self, module: nn.Module, *call: Any) -> Any:
        """Run the hook."""
        if torch.compiler.is_compiling():
            return self._break_graph(module, *call)
        return run_uncompiled(self._do, module, *call)

    @torch.compiler.disable(reason=ADVICE_FOR_WHOLE_GRAPHS)
    def _break_graph(self, module: nn.Module, *call: Any) -> Any:
        return self._do(module, *call)

    def _do(self, module: nn.Module, *call: Any) -> Any:
        if self._act is not None:
            # Torch leaves out the keyword arguments while another thread adds or removes the hook.
            if len(call) == 1 + self._after:
                call = (call[0], {}, *call[1:])
            return self._act(module, *call)
        for hooks in hook_tables(module):
            hooks.pop(self.number, None)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopySafeHook":
        return _without_effect(type(self), self.number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_effect, (type(self), self.number)


def _owner_of(hook: Any) -> Any:
    """Return the object whose method a hook calls, if the hook is ours."""
    return getattr(hook._act, "__self__", None) if isinstance(hook, CopySafeHook) else None


class _CompiledAway(CopySafeHook):
    """Hook that torch.compile leaves out, so that it breaks no graph."""

    @never_compiled_alone
    def __call__(self, module: nn.Module, *call: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        return run_uncompiled(self._do, module, *call)


def _without_effect(kind: type[CopySafeHook], number: int) -> CopySafeHook:
    """Return a hook without effect for a copy."""
    hook = kind(None)
    hook.number = number
    return hook


def add_hook(
    module: nn.Module,
    act: Callable[..., Any],
    *,
    after: bool = False,
    first: bool = False,
    always: bool = False,
    compiled: bool = False,
) -> RemovableHandle:
    """Call ``act(module, args, kwargs)`` before a module is called,
    or ``act(module, args, kwargs, output)`` after it.

    Args:
        module: Module to hook.
        act: Function to call; after the module, a result other than None replaces the output.
        after: Whether the function is called after the module, not before it.
        first: Whether the function is called before the existing hooks.
        always: Whether a function after the module is also called if the module raised an
            exception.
        compiled: Whether torch.compile may leave out the hook.
    """
    hook = (_CompiledAway if compiled else CopySafeHook)(act, after=after)
    if after:
        handle = module.register_forward_hook(
            hook, prepend=first, with_kwargs=True, always_call=always
        )
    else:
        handle = module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)
    with _NUMBERING:
        hook.number = handle.id = _renumber(module, handle.id, first=first)
    return handle


def _renumber(module: nn.Module, number: int, *, first: bool) -> int:
    """Give a hook the highest number below zero that is free in its module, and return it."""
    # A graph of torch.compile is only valid for hooks of the same numbers, and torch never uses one
    # twice. Nor does it use these, so that a loaded copy keeps the numbers of its hooks to itself.
    tables: list[Any] = hook_tables(module)  # torch's annotation is dict, but they are OrderedDicts
    free = next(n for n in itertools.count(-1, -1) if not any(n in hooks for hooks in tables))
    for hooks in tables:
        if number in hooks:
            hooks[free] = hooks.pop(number)
            if first:
                hooks.move_to_end(free, last=False)
    return free


@contextmanager
def balanced_hooks(model: nn.Module) -> Iterator[None]:
    """Remove hooks that the code inside leaves on a model
    when Ctrl-C interrupts it, even while it removes hooks.
    """
    before = [(hooks, set(hooks)) for module in model.modules() for hooks in hook_tables(module)]
    try:
        yield
    except KeyboardInterrupt:
        for hooks, numbers in before:
            for number in set(hooks) - numbers:
                del hooks[number]
        raise


def is_running(frame: FrameType) -> bool:
    """Return whether a frame is still executed, in any thread."""
    try:
        # Only a frame that has ended can be cleared. This is faster than a search for the frame in
        # the thread's stack, and hooks of all parts ask it. Torch's frame of a call is of no use to
        # a debugger once the call has ended.
        frame.clear()
    except RuntimeError:
        return True
    return False


def outermost_call(modules: Container[nn.Module], frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame, from ``frame`` outwards,
    in which torch calls one of the modules.
    """
    outermost = None
    while (frame := innermost_call(frame)) is not None:
        if frame.f_locals.get("self") in modules:
            outermost = frame
        frame = frame.f_back
    return outermost


def innermost_call(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, from ``frame`` outwards,
    in which torch calls a module (the frame's ``self``).
    """
    while frame is not None and not _calls_a_module(frame):
        frame = frame.f_back
    return frame


def _calls_a_module(frame: FrameType) -> bool:
    # Frames are recognised by their file, because torch.compile resumes _call_impl under other
    # names. "inner" is excluded, because it ends before the last hooks run.
    return frame.f_code.co_filename == torch_module.__file__ and frame.f_code.co_name != "inner"
