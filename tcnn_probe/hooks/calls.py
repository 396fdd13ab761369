"""Following the calls of a module, each thread by itself."""

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from tcnn_probe.hooks.copy_safe import add_hook
from tcnn_probe.hooks.modes import Mode, take_off
from tcnn_probe.hooks.running import innermost_call, is_under, thread_is_under

__all__ = ["Call", "Calls"]


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
        """By position and then by keyword."""
        return [*self.args, *self.kwargs.values()]

    def goes_on(self) -> bool:
        """Whether its thread is still in it."""
        return not self.over and thread_is_under(self.thread, self.frame)


C = TypeVar("C", bound=Call)


class Calls(Generic[C]):
    """Follows the calls of a module between :meth:`attach` and :meth:`detach`; calls within a call belong to it.

    Torch tells hooks of no ``KeyboardInterrupt`` and the like: what a call that ends so leaves in its thread is cleared
    by the module's next call there, or by :meth:`detach`.
    """

    def __init__(self, module: nn.Module, kind: type[C]) -> None:
        self.module, self._kind = module, kind
        self._running: dict[int, C] = {}  # by thread
        self._handles: list[RemovableHandle] = []
        self._attached, self._lock = False, threading.RLock()

    def begins(self, call: C) -> None:
        """Called before the module runs."""

    def returns(self, call: C, output: Any) -> Any:
        """Called after it; anything but None replaces the output."""

    def ends(self, call: C, output: Any) -> None:
        """Called when it is over, also by an exception."""

    @property
    def attached(self) -> bool:
        """Whether calls are still followed."""
        return self._attached

    def attach(self) -> None:
        """Hook the module."""
        self._attached = True
        self._handles.append(add_hook(self.module, self._begin))
        self._handles.append(add_hook(self.module, self._return, after=True, first=True))
        self._handles.append(add_hook(self.module, self._end, after=True, always=True))

    def detach(self) -> None:
        """Remove the hooks, once calls that other threads are in the middle of have ended; may be repeated.

        If an exception ends one of these that torch tells no hook of (SystemExit), the module's next call removes them.
        """
        with self._lock:
            self._attached = False
            self._leave()
            for call in list(self._running.values()):
                call.over = not call.goes_on()
            while self._handles and all(call.over for call in list(self._running.values())):
                self._handles.pop().remove()

    def current(self) -> C | None:
        """The call that is running in this thread."""
        call = self._running.get(threading.get_ident())
        return call if call is not None and is_under(sys._getframe(), call.frame) else None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if (call := self.current()) is not None:
            call.depth += call.module is module
            return
        self._leave()  # what was interrupted
        if not self._attached:
            self.detach()
        elif (frame := innermost_call(sys._getframe())) is not None:
            self._running[threading.get_ident()] = call = self._kind(module, args, kwargs, frame)
            try:
                self.begins(call)
            except BaseException:
                self._leave()
                raise

    def _return(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        call = self.current()
        if call is None or not self._is_of(call, module):
            return None
        take_off(call.modes)
        return self.returns(call, output)

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any = None) -> None:
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
        """Whether a hook is that of the call, not of one within it; torch.compile may end a call in another frame."""
        return call.module is module and (not call.depth or innermost_call(sys._getframe()) is call.frame)

    def _leave(self) -> None:
        call = self._running.pop(threading.get_ident(), None)
        if call is not None:
            call.over = True
            take_off(call.modes)
