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
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from tcnn_probe.hooks.calls import Call, Calls
from tcnn_probe.hooks.copy_safe import add_hook
from tcnn_probe.hooks.interception import Interception, Seen
from tcnn_probe.hooks.modes import aside_depth, is_transformed, put_on, take_off, unseen
from tcnn_probe.hooks.running import is_under

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


class Forwards(Calls["_Forward"]):
    """Tells a listener of each forward of a model that it wants, from its making until :meth:`detach`."""

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        super().__init__(model, _Forward)
        self._listener = listener
        self._names = {module: name for name, module in model.named_modules()}
        self._followed: _Forward | None = None  # one of those that are running
        self._aside = aside_depth()
        try:
            self.attach()
        except BaseException:
            self.detach()
            raise

    def attach(self) -> None:
        """Hook the model and its parts."""
        self._attached = True
        for entry, whole in dict(_entries(self.module)).items():
            # Compiled away from parts, it breaks no graph; the hook of the whole model stops to look.
            self._handles.append(add_hook(entry, self._begin, first=True, compiled=not whole))
            self._handles.append(add_hook(entry, self._end, after=True, always=True, compiled=not whole))

    def begins(self, call: "_Forward") -> None:
        """Follow it if no other one is followed, and the listener wants it."""
        inputs = call.inputs
        with self._lock, torch._C.DisableTorchFunction():
            unwanted = self._followed is not None or is_transformed(inputs)
            call.over = unwanted or not self._listener.wants(call.module, inputs)
            if call.over:
                return
            self._followed = call
        with call.unseen():
            self._listener.begins(call.module, inputs)
        call.follow(self._names, self._listener)

    def ends(self, call: "_Forward", output: Any) -> None:
        """Tell the listener how it ended, if it was followed to its end."""
        if call is not self._followed or not self._attached:
            return
        failed, whole = sys.exc_info()[1] is not call.handled, False
        call.leave()
        with call.unseen():
            try:
                if not failed and self._listener.returned(call.module, call.inputs, output):
                    self._listener.ran(call.module, call.inputs, output)
                whole = not failed
            finally:
                self._followed = None
                self._listener.ends(whole=whole, output=output)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module in self._names and aside_depth() == self._aside:  # not in a shallow copy
            super()._begin(module, args, kwargs)

    def _leave(self) -> None:
        with self._lock:
            super()._leave()
            followed = self._followed
            # Also one that was interrupted by what torch tells no hook of: Ctrl-C, SystemExit in a thread.
            if followed is not None and (followed.thread == threading.get_ident() or not followed.goes_on()):
                self._followed = None
                followed.over = True
                followed.leave()
                self._listener.ends(whole=False)


@dataclass(eq=False)
class _Forward(Call):
    """A forward of the model or of a part of it; if it is followed, with the stack of running modules."""

    handled: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    """The exception in whose handler the model was called, if any; at the end another one means failure."""

    def __post_init__(self) -> None:
        self._running: list[tuple[nn.Module, Sequence[Any]]] = [(self.module, self.inputs)]
        self._quiet, self._aside = False, aside_depth()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def follow(self, names: Mapping[nn.Module, str], listener: Listener) -> None:
        """Tell a listener of what runs in it."""
        self._names, self._listener = names, listener
        self._handles.append(global_hooks.register_module_forward_pre_hook(self._called))
        self._handles.append(
            global_hooks.register_module_forward_hook(self._returned, with_kwargs=True, always_call=True)
        )
        self.modes = put_on(Interception(self._asked))

    def leave(self) -> None:
        """No longer."""
        for handle in self._handles:
            handle.remove()
            global_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)  # which torch forgets
        self._handles = []
        take_off(self.modes)

    def _called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._mine(module):
            self._running.append((module, args))

    @torch.compiler.disable
    def _returned(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        # With an exception torch leaves out the keyword arguments, and the output may be None.
        if not self._mine(module) or not any(running is module for running, _ in self._running[:0:-1]):
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
        if not is_under(sys._getframe(), self.frame):  # interrupted: what runs now is something else
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
