"""Following the calls of a module, each thread by itself."""

import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from tcnn_probe.hooks.copy_safe import after_call, before_call
from tcnn_probe.hooks.modes import Mode, take_off

__all__ = ["Call", "Calls"]


class Call:
    """A call of a module that is running in some thread.

    Args:
        module: the module, or a replica of it, as torch calls it.
        args, kwargs: of the call.
        frame: in which torch calls it.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> None:
        self.module, self.args, self.kwargs, self.frame = module, args, kwargs, frame
        self.modes: list[Mode] = []
        """Entered for this call: they are left when it ends."""

    @property
    def inputs(self) -> Sequence[Any]:
        """All arguments."""
        return [*self.args, *self.kwargs.values()]


C = TypeVar("C", bound=Call)


class Calls(Generic[C]):
    """Follows the calls of a module from :meth:`attach` to :meth:`detach`; calls within a call belong to it.

    An exception of any kind ends a call. Torch tells hooks of no ``KeyboardInterrupt`` and the like: what such a one
    leaves is cleared when the module is called again in that thread, or at :meth:`detach`.

    Args:
        module: the module.
        kind: of the calls.
    """

    def __init__(self, module: nn.Module, kind: type[C]) -> None:
        self.module = module
        self._kind = kind
        self._running: dict[int, C] = {}  # by thread
        self._handles: list[RemovableHandle] = []
        self._attached, self._lock = False, threading.RLock()

    def begins(self, call: C) -> None:
        """Do what is to be done before the module runs."""

    def returns(self, call: C, output: Any) -> Any:
        """Do what is to be done after it; what is returned, if it is not None, replaces the output."""

    def attach(self) -> None:
        """Hook the module."""
        self._attached = True
        self._handles += [
            before_call(self.module, self._begin),
            after_call(self.module, self._done, first=True),
            after_call(self.module, self._end, always=True),
        ]

    def detach(self) -> None:
        """Take the hooks away; calls that other threads are in the middle of end as they began. May be repeated."""
        with self._lock:
            self._attached = False
            self._leave(threading.get_ident())
            frames = sys._current_frames()
            if not any(_is_under(frames.get(thread), call.frame) for thread, call in self._running.items()):
                self._running.clear()
                while self._handles:
                    self._handles.pop().remove()

    def current(self) -> C | None:
        """The call that is running in this thread."""
        call = self._running.get(threading.get_ident())
        return call if call is not None and _is_under(sys._getframe(), call.frame) else None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.current() is not None:  # the module calls itself
            return
        thread, frame = threading.get_ident(), _frame_of_the_call()
        self._leave(thread)  # it was interrupted
        if self._attached and frame is not None:
            self._running[thread] = call = self._kind(module, args, kwargs, frame)
            try:
                self.begins(call)
            except BaseException:
                self._leave(thread)
                raise

    def _done(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        call = self.current()
        if call is None or call.frame is not _frame_of_the_call():
            return None
        take_off(call.modes)
        return self.returns(call, output)

    def _end(self, module: nn.Module, *call: Any) -> None:
        running = self.current()
        if running is not None and running.frame is _frame_of_the_call():
            self._leave(threading.get_ident())
            if not self._attached:
                self.detach()

    def _leave(self, thread: int) -> None:
        call = self._running.pop(thread, None)
        if call is not None:
            take_off(call.modes)


def _frame_of_the_call() -> FrameType | None:
    """The innermost frame in which torch calls a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame


def _is_under(frame: FrameType | None, running: FrameType) -> bool:
    """Whether a frame was called, directly or not, from another one; if so, that one is running."""
    while frame is not None and frame is not running:
        frame = frame.f_back
    return frame is running
