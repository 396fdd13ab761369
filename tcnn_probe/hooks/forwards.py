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
from tcnn_probe.hooks.interception import Interception, SeenAttention, SeenProduct
from tcnn_probe.hooks.modes import Mode, aside_depth, is_transformed, put_on, take_off, unseen

__all__ = ["Forwards", "Listener", "call_of_a_module"]


class Listener(Protocol):
    """Who follows the forwards of a model."""

    def wants(self, entry: nn.Module, inputs: Sequence[Any]) -> bool:
        """Whether to follow the forward that begins with a call of ``entry``, the model or a part of it."""
        ...

    def begins(self, entry: nn.Module, inputs: Sequence[Any]) -> None:
        """A forward begins."""
        ...

    def asked(self, running: Sequence[tuple[nn.Module, Sequence[Any]]], seen: SeenAttention | SeenProduct) -> None:
        """A module has asked torch for attention or a matrix product: the last of those running, with their inputs."""
        ...

    def returned(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> bool:
        """A module has returned; whether :meth:`ran` should be called."""
        ...

    def ran(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """What it returned."""
        ...

    def ends(self, *, whole: bool, output: Any = None) -> None:
        """The forward has ended: whole, with the output of its entry, or by an exception."""
        ...


class Forwards:
    """Attached from its making until :meth:`remove`.

    Args:
        model: to follow.
        listener: called for each forward that it wants.
    """

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

        A forward that another thread is in the middle of takes its own mode away when it ends.
        """
        self._attached = False
        followed = self._followed
        if followed is None or followed.thread == threading.get_ident():
            self._take_away()

    def _take_away(self) -> None:
        self._abandon()
        self._outermost.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _called(self, entry: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A call of the model, or of one of its children."""
        caller, inputs = call_of_a_module(sys._getframe()), [*args, *kwargs.values()]
        if not self._attached or entry not in self._names:  # a copy, such as a moving average of the weights
            return
        if aside_depth() > self._aside:
            return
        thread = threading.get_ident()
        outermost = self._outermost.get(thread)
        if outermost is not None and outermost.is_running(caller):
            outermost.depth += outermost.entry is entry
            return
        if outermost is not None and outermost is self._followed:
            self._abandon()  # it was interrupted by something that torch's hooks are not told of (Ctrl-C)
        with self._lock, torch._C.DisableTorchFunction():
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
        """The return from such a call."""
        forward = self._outermost.get(threading.get_ident())
        if forward is None or forward.entry is not entry:
            return
        if forward.depth:
            forward.depth -= 1
            return
        if not isinstance(forward, _Followed):
            del self._outermost[forward.thread]
            return
        if not self._attached:
            self._take_away()
            return
        failed = sys.exc_info()[1] is not forward.handled
        forward.leave()
        with forward.unseen():
            try:
                whole = False
                inputs = [*args, *kwargs.values()]
                if not failed and self._listener.returned(entry, inputs, output):
                    self._listener.ran(entry, inputs, output)
                whole = not failed
            finally:
                self._forget()
                self._listener.ends(whole=whole, output=output)

    def _abandon(self) -> None:
        if self._followed is not None:
            self._followed.leave()
            self._forget()
            self._listener.ends(whole=False)

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
        while frame is not None and frame is not self._caller:
            frame = frame.f_back
        return frame is self._caller


class _Followed(_Forward):
    """One that is followed: the stack of running modules, and the modes and hooks that keep it."""

    def __init__(
        self,
        entry: nn.Module,
        caller: FrameType | None,
        inputs: Sequence[Any],
        names: Mapping[nn.Module, str],
        listener: Listener,
    ) -> None:
        super().__init__(entry, caller)
        self._names, self._listener = names, listener
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

    def _asked(self, seen: SeenAttention | SeenProduct) -> None:
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


def call_of_a_module(frame: FrameType | None) -> FrameType | None:
    """The innermost frame in which torch calls a module."""
    while frame is not None and frame.f_code.co_filename != global_hooks.__file__:
        frame = frame.f_back
    return frame


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
