"""Following the forwards of a model: when one begins and ends, which module is running, and what it asked torch for.

Hooks stay on the model and its direct children only (whoever calls ``model.forward_features`` enters through these),
so forwards that nobody wants to see cost nothing more. While one is followed, torch's global module hooks tell which
module runs, and :class:`Interception` sees what it asks for. Both are taken away when the forward ends, however it
does.
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from tcnn_probe.hooks.copy_safe import after_call, before_call
from tcnn_probe.hooks.interception import Interception, Seen
from tcnn_probe.hooks.modes import Mode, aside_depth, is_transformed, put_on, take_off, unseen
from tcnn_probe.hooks.running import innermost_call, is_under, thread_is_under

__all__ = ["Forwards", "Listener", "Running"]

Running = Sequence[tuple[nn.Module, Sequence[Any]]]
"""The modules that are running and their inputs, the outermost first."""


class Listener(Protocol):
    """What is told of the forwards of a model, of one at a time."""

    def wants(self, entry: nn.Module, inputs: Sequence[Any]) -> bool:
        """Whether to follow the forward that begins with a call of ``entry``, the model or a part of it."""

    def begins(self, entry: nn.Module, inputs: Sequence[Any]) -> None:
        """A forward begins."""

    def asked(self, running: Running, seen: Seen) -> None:
        """A module, the last of those running, has asked torch for attention or a matrix product."""

    def returned(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> bool:
        """A module has returned; whether :meth:`ran` should be called."""

    def ran(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """What it returned."""

    def ends(self, *, whole: bool, output: Any = None) -> None:
        """The forward has ended: whole, with the output of its entry, or by an exception."""


class Forwards:
    """Tells a listener of each forward of a model that it wants, from its making until :meth:`remove`."""

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        self._listener = listener
        self._names = {module: name for name, module in model.named_modules()}
        self._outermost: dict[int, _Forward] = {}  # by thread
        self._followed: _Followed | None = None  # one of these
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._attached, self._aside = True, aside_depth()
        self._lock = threading.Lock()
        try:
            for entry, whole in dict(_entries(model)).items():
                # Compiled away from parts, it breaks no graph; the hook of the whole model stops to look.
                self._handles.append(before_call(entry, self._called, first=True, compiled=not whole))
                self._handles.append(after_call(entry, self._returned, always=True, compiled=not whole))
        except BaseException:
            self.remove()
            raise

    @property
    def attached(self) -> bool:
        """Whether forwards are still followed."""
        return self._attached

    def remove(self) -> None:
        """Detach; may be called more than once, also in the middle of a forward.

        A forward that another thread is in the middle of takes the hooks away when it ends; if an exception ends it
        that torch tells no hook of (SystemExit), the next call of the model or of this method does.
        """
        self._attached = False
        followed = self._followed
        if followed is None or followed.thread == threading.get_ident() or not followed.goes_on():
            self._take_away()

    def _take_away(self) -> None:
        self._abandon()
        self._outermost.clear()
        while self._handles:
            self._handles.pop().remove()

    def _called(self, entry: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        caller, inputs = innermost_call(sys._getframe()), [*args, *kwargs.values()]
        if not self._attached:
            self.remove()
            return
        if entry not in self._names or aside_depth() != self._aside:  # not in a shallow copy
            return
        thread = threading.get_ident()
        outermost = self._outermost.get(thread)
        if outermost is not None and outermost.is_running(caller):
            outermost.depth += outermost.entry is entry
            return
        with self._lock, torch._C.DisableTorchFunction():
            if self._followed is not None and (self._followed is outermost or not self._followed.goes_on()):
                self._abandon()  # it was interrupted by what torch tells no hook of: Ctrl-C, SystemExit in a thread
            if self._followed is not None or is_transformed(inputs) or not self._listener.wants(entry, inputs):
                self._outermost[thread] = _Forward(entry, caller)
                return
            self._followed = followed = _Followed(entry, caller, inputs, self._names, self._listener)
            self._outermost[thread] = followed
        try:
            with followed.unseen():
                self._listener.begins(entry, inputs)
            followed.enter()
        except BaseException:
            self._abandon()
            raise

    def _returned(self, entry: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        forward = self._outermost.get(threading.get_ident())
        if forward is None or forward.entry is not entry:
            return
        if forward.depth:
            forward.depth -= 1
        elif not isinstance(forward, _Followed):
            del self._outermost[forward.thread]
        elif not self._attached:
            self._take_away()
        else:
            self._end(forward, [*args, *kwargs.values()], output)

    def _end(self, forward: "_Followed", inputs: Sequence[Any], output: Any) -> None:
        failed, whole = sys.exc_info()[1] is not forward.handled, False
        forward.leave()
        with forward.unseen():
            try:
                if not failed and self._listener.returned(forward.entry, inputs, output):
                    self._listener.ran(forward.entry, inputs, output)
                whole = not failed
            finally:
                try:
                    self._listener.ends(whole=whole, output=output)
                finally:
                    self._forget()

    def _abandon(self) -> None:
        if self._followed is not None:
            self._followed.leave()
            try:
                self._listener.ends(whole=False)
            finally:
                self._forget()

    def _forget(self) -> None:
        followed, self._followed = self._followed, None
        if followed is not None:
            self._outermost.pop(followed.thread, None)


class _Forward:
    """A forward of the model or of a part of it, from the outermost call on; calls inside it belong to it."""

    def __init__(self, entry: nn.Module, caller: FrameType | None) -> None:
        self.entry, self.thread = entry, threading.get_ident()
        self.handled = sys.exc_info()[1]
        """The exception in whose handler the model was called, if any; at the end another one means failure."""
        self.depth = 0
        """How many calls of the entry are running within this one, of a model that calls itself."""
        self._caller = caller

    def is_running(self, frame: FrameType | None) -> bool:
        """Whether ``frame`` was called, directly or not, from the call of the entry."""
        return is_under(frame, self._caller)

    def goes_on(self) -> bool:
        """Whether its thread is still in it."""
        return self._caller is not None and thread_is_under(self.thread, self._caller)


class _Followed(_Forward):
    """One that is followed: the stack of running modules, and the modes and hooks that keep it."""

    def __init__(
        self, entry: nn.Module, caller: FrameType | None, inputs: Sequence[Any], names: Any, listener: Listener
    ) -> None:
        super().__init__(entry, caller)
        self._names: Mapping[nn.Module, str] = names
        self._listener = listener
        self._running: list[tuple[nn.Module, Sequence[Any]]] = [(entry, inputs)]
        self._quiet, self._aside = False, aside_depth()
        self._modes: list[Mode] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def enter(self) -> None:
        self._handles.append(global_hooks.register_module_forward_pre_hook(self._called))
        self._handles.append(
            global_hooks.register_module_forward_hook(self._returned, with_kwargs=True, always_call=True)
        )
        self._modes = put_on(Interception(self._asked))

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
            global_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)  # which torch forgets
        self._handles = []
        take_off(self._modes)

    def _called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._mine(module):
            self._running.append((module, args))

    @torch.compiler.disable
    def _returned(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        # With an exception torch leaves out the keyword arguments, and the output may be None.
        if not self._mine(module) or not any(running is module for running, _ in self._running[1:]):
            return
        while self._running.pop()[0] is not module:
            pass
        if len(rest) == 2 and module in self._names:
            inputs, output = [*args, *rest[0].values()], rest[1]
            with torch._C.DisableTorchFunction():
                wanted = self._listener.returned(module, inputs, output)
            if wanted:
                with self.unseen():
                    self._listener.ran(module, inputs, output)

    def _asked(self, seen: Seen) -> None:
        if self._quiet or aside_depth() > self._aside:
            return
        if not self.is_running(sys._getframe()):  # interrupted: what runs now is something else
            return
        place = len(self._running) - 1
        while place > 0 and isinstance(self._running[place][0], (nn.Softmax, nn.Dropout)):
            place -= 1
        if self._running[place][0] in self._names:
            with self.unseen():
                self._listener.asked(self._running[: place + 1], seen)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What the listener computes is not followed itself."""
        self._quiet = True
        try:
            with unseen():
                yield
        finally:
            self._quiet = False

    def _mine(self, module: nn.Module) -> bool:
        """Whether it is a module of the model, or one with weights of its own that runs in the middle of it."""
        if self._quiet or self.thread != threading.get_ident() or aside_depth() > self._aside:
            return False
        return module in self._names or next(module.parameters(), None) is not None


def _entries(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The model, and the parts of it that may be called by themselves; and whether it is the whole of it."""
    yield model, True
    inner = list(model.children())
    while inner:
        part = inner.pop(0)
        whole = _wraps(model, part)
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)) or whole:
            inner += part.children()
        if not isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield part, whole


def _wraps(model: nn.Module, part: nn.Module) -> bool:
    """Whether ``model`` is but a wrapper of ``part``, as those of torch.nn.parallel are."""
    return len(list(model.children())) == 1 and getattr(model, "module", None) is part
