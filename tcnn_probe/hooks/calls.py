"""Following the calls of a module, each thread by itself, with hooks that act on no copy of the module."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from tcnn_probe.hooks.modes import Mode, restore_flags, take_off

__all__ = [
    "Call",
    "Calls",
    "CopySafeHook",
    "add_hook",
    "balanced_hooks",
    "innermost_call",
    "is_under",
]


@dataclass(eq=False)
class Call:
    """A call of a module, or of a replica of it, in a frame of torch; ``modes`` are left when it is over."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    frame: FrameType
    thread: int = field(default_factory=threading.get_ident)
    modes: list[Mode] = field(default_factory=list)
    over: bool = False
    depth: int = 0  # calls of the module that are running within this one, of a module that calls itself

    @property
    def inputs(self) -> list[Any]:
        """Arguments, by position and then by keyword."""
        return [*self.args, *self.kwargs.values()]

    def goes_on(self) -> bool:
        """Return whether its thread is still in it."""
        return not self.over and thread_is_under(self.thread, self.frame)


C = TypeVar("C", bound=Call)


class Calls(Generic[C]):
    """Follows the calls of a module between :meth:`attach` and :meth:`detach`; calls within a call belong to it.

    Torch tells hooks of no ``KeyboardInterrupt`` and the like: what a call that ends so leaves in its thread is cleared
    by the module's next call there, or by :meth:`detach`.
    """

    def __init__(self, module: nn.Module, kind: type[C]) -> None:
        self.module = module
        self._kind = kind
        self._running: dict[int, C] = {}  # by thread
        self._handles: list[RemovableHandle] = []
        # Reentrant: detach() leaves the running call, and Forwards takes the lock for that, too.
        self._attached = False
        self._lock = threading.RLock()

    def begins(self, call: C) -> None:
        """Prepare, before the module runs."""

    def returns(self, call: C, output: Any) -> Any:
        """React to the output, which anything but None replaces."""

    def ends(self, call: C, output: Any) -> None:
        """Clean up when the call is over, also by an exception."""

    @property
    def attached(self) -> bool:
        """Flag that calls are still followed."""
        return self._attached

    def attach(self) -> None:
        """Add hooks to the module."""
        self._attached = True
        self._handles.append(add_hook(self.module, self._begin))
        self._handles.append(
            # Before all other hooks: they run without our modes, and see the edited output. The cleaning up comes last.
            add_hook(self.module, self._return, after=True, first=True)
        )
        self._handles.append(add_hook(self.module, self._end, after=True, always=True))

    def detach(self) -> None:
        """Remove the hooks, once calls that other threads are in the middle of have ended; may be repeated.

        If an exception ends one of these that torch tells no hook of (SystemExit), the module's next call removes them.
        """
        with self._lock:
            self._attached = False
            self._leave()
            for call in list(self._running.values()):
                # A call that a thread has left without a hook would keep the hooks for ever.
                call.over = not call.goes_on()
                if call.over:
                    restore_flags()
            # A call in another thread still needs the hook that ends it.
            while self._handles and all(
                call.over for call in list(self._running.values())
            ):
                self._handles.pop().remove()

    def current(self) -> C | None:
        """Return the call that is running in this thread."""
        call = self._running.get(threading.get_ident())
        return (
            call if call is not None and is_under(sys._getframe(), call.frame) else None
        )

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if (call := self.current()) is not None:
            call.depth += call.module is module
            return
        self._leave()  # what was interrupted
        if not self._attached:
            self.detach()
        elif (frame := innermost_call(sys._getframe())) is not None:
            self._running[threading.get_ident()] = call = self._kind(
                module, args, kwargs, frame
            )
            try:
                self.begins(call)
            # torch calls no hooks after a KeyboardInterrupt, so what has begun is undone here.
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
        take_off(call.modes)
        return self.returns(call, output)

    def _end(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any = None,
    ) -> None:
        call = self.current()
        if call is None or not self._is_of(call, module):
            if call is not None:
                call.depth -= call.module is module
            return
        try:
            self.ends(call, output)
        finally:
            self._leave()
            if not self._attached:
                self.detach()

    def _is_of(self, call: C, module: nn.Module) -> bool:
        """Return whether a hook is that of the call, not of one within it."""
        # Frames are compared only where they must be: torch.compile may end a call in another frame.
        return call.module is module and (
            not call.depth or innermost_call(sys._getframe()) is call.frame
        )

    def _leave(self) -> None:
        call = self._running.pop(threading.get_ident(), None)
        if call is not None:
            call.over = True
            take_off(call.modes)


class CopySafeHook:
    """Hook that does nothing in a copy or a pickle of its module but go away when it is called there."""

    def __init__(self, act: Callable[..., Any] | None, *, after: bool = False) -> None:
        self._act = act
        self._after = after
        self.number = -1
        """Number under which torch keeps the hook."""

    @torch.compiler.disable
    def __call__(self, module: nn.Module, *call: Any) -> Any:
        """Act, as torch asks."""
        return self._do(module, *call)

    def _do(self, module: nn.Module, *call: Any) -> Any:
        if self._act is not None:
            # Torch leaves keyword arguments out while another thread adds or removes the hook.
            if len(call) == 1 + self._after:
                call = (call[0], {}, *call[1:])
            return self._act(module, *call)
        for hooks in _forward_hooks(module):
            hooks.pop(self.number, None)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopySafeHook":
        return _without_effect(type(self), self.number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_effect, (type(self), self.number)


class _CompiledAway(CopySafeHook):
    """Hook that torch.compile leaves out, so that it breaks no graph."""

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._do(module, *call)


def _without_effect(kind: type[CopySafeHook], number: int) -> CopySafeHook:
    """Return a hook from a pickle, under a number that this process is to give to no other hook."""
    RemovableHandle.next_id = max(RemovableHandle.next_id, number + 1)
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
    """Call ``act(module, args, kwargs)`` before each call of a module, or ``act(module, args, kwargs, output)`` after.

    Args:
        module: Module to hook.
        act: Function to call; a tensor that it returns after the call replaces the output.
        after: Whether to call it after the module, not before.
        first: Whether to call it before the hooks that are there.
        always: Whether to call it, after the module, also if the module raised an exception.
        compiled: Whether torch.compile may leave the hook out.
    """
    hook = (_CompiledAway if compiled else CopySafeHook)(act, after=after)
    if after:
        handle = module.register_forward_hook(
            hook, prepend=first, with_kwargs=True, always_call=always
        )
    else:
        handle = module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)
    hook.number = handle.id
    return handle


def _forward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Return the tables in which torch keeps what it knows of a module's hooks, by their numbers."""
    return [
        # Private names of torch 2: RemovableHandle.remove() clears them all, but a copy of a hook has no handle.
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]


@contextmanager
def balanced_hooks(model: nn.Module) -> Iterator[None]:
    """Take off all hooks that code inside leaves on a model: Ctrl-C can fall where they are taken off."""
    before = [
        (hooks, set(hooks))
        for module in model.modules()
        for hooks in _forward_hooks(module)
    ]
    try:
        yield
    except KeyboardInterrupt:
        for hooks, numbers in before:
            for number in set(hooks) - numbers:
                del hooks[number]
        raise


# A stack is read while its thread runs on: a look that breaks off in the middle is repeated, and a few suffice.
_LOOKS = 100


def innermost_call(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, from ``frame`` outwards, in which torch calls a module, its local ``self``."""
    while frame is not None and not _calls_a_module(frame):
        frame = frame.f_back
    return frame


def is_under(frame: FrameType | None, call: FrameType | None) -> bool:
    """Return whether a frame was called, directly or not, from the frame of a call: then that call is running."""
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call


def thread_is_under(thread: int, call: FrameType) -> bool:
    """Return whether a thread is in a call; it goes on meanwhile, and may break off its stack while that is read."""
    for _ in range(_LOOKS):
        frame = sys._current_frames().get(thread)
        if frame is None:
            return False
        if is_under(frame, call):
            return True
        # The stack was read down to its outermost frame, without a break, and the call is not in it.
        if _bottom(frame) is _bottom(call):
            return False
    return False  # the call has ended


def _bottom(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _calls_a_module(frame: FrameType) -> bool:
    # By file, as torch.compile resumes _call_impl under other names; not "inner", which ends before the last hooks run.
    return (
        frame.f_code.co_filename == torch_module.__file__
        and frame.f_code.co_name != "inner"
    )
