"""Following the forwards of a model: their beginning and end, the modules that run, and the calls of torch in them.

Permanent hooks are only on the model and its direct children (through which a call of ``model.forward_features``
enters), so that forwards that are not followed are not slowed down. While a forward is followed, torch's global module
hooks tell which module runs, and :class:`Interception` sees its calls of torch. Both are removed when the forward
ends, also after an exception.
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
from torch.overrides import TorchFunctionMode

from tcnn_probe.hooks.calls import Call, Calls, add_hook, is_under
from tcnn_probe.hooks.interception import Answer, Interception, Seen
from tcnn_probe.hooks.modes import (
    hidden_depth,
    is_transformed,
    put_on,
    take_off,
    unseen,
)

__all__ = ["Forward", "Forwards", "Listener", "Running"]

Running = Sequence[tuple[nn.Module, Sequence[Any]]]
"""The modules that are running and their inputs, the outermost first."""


class Listener(Protocol):
    """Interface of an object that is notified of the forwards of a model, one at a time."""

    def begins(self, entry: nn.Module, inputs: Sequence[Any]) -> bool:
        """Return whether to follow the forward that begins with a call of ``entry``, the model or a part of it."""

    def modes(self) -> Sequence[TorchFunctionMode]:
        """Return function modes to enter during the forward that has begun."""

    def asked(self, forward: "Forward", request: Seen) -> Answer | None:
        """Handle a call of torch in the innermost running module, and return an edit of its output, or None."""

    def returned(
        self, forward: "Forward", module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Any:
        """Handle the return of a module; a result other than None replaces its output."""

    def ends(self, output: Any) -> None:
        """Handle the end of the forward, with the output of its entry."""

    def fails(self) -> None:
        """Handle a forward that an exception has ended."""


class Forwards(Calls["Forward"]):
    """Notifies a listener of the forwards of a model that it wants to follow, until :meth:`detach`."""

    def __init__(
        self, model: nn.Module, listener: Listener, *, first: bool = True
    ) -> None:
        super().__init__(model, Forward)
        self._listener = listener
        self._first = first
        self._names = {module: name for name, module in model.named_modules()}
        self._followed: Forward | None = None  # at most one forward at a time
        self._depth = hidden_depth()
        try:
            self.attach()
        except BaseException:
            self.detach()
            raise

    def attach(self) -> None:
        """Add hooks to the model and its parts."""
        self._attached = True
        for entry, is_whole in dict(_entries(self.module)).items():
            # torch.compile leaves out hooks of parts, which would break graphs; only the whole model keeps its hook.
            self._handles.append(
                add_hook(entry, self._begin, first=self._first, compiled=not is_whole)
            )
            self._handles.append(
                add_hook(
                    entry, self._end, after=True, always=True, compiled=not is_whole
                )
            )

    def begins(self, call: "Forward") -> None:
        """Follow the forward if no other one is followed and the listener wants it."""
        # Reading properties of tensors is a call of a torch function, which the user's modes must not see.
        with self._lock, torch._C.DisableTorchFunction():
            call.over = self._followed is not None or is_transformed(call.inputs)
            if call.over:
                return
            with call.unseen():
                call.over = not self._listener.begins(call.module, call.inputs)
            if call.over:
                return
            self._followed = call
        call.follow(self._names, self._listener)

    def ends(self, call: "Forward", output: Any) -> None:
        """Notify the listener of the end of a followed forward."""
        if call is not self._followed or not self._attached:
            return
        # An exception that was already being handled when the model was called is not a failure of the forward.
        has_failed, is_told = sys.exc_info()[1] is not call.handled, False
        call.leave()
        with call.unseen():
            try:
                if not has_failed:
                    # The entry is reported here, not by torch's global hook, which runs before the entry's own hooks,
                    # which may change the output.
                    self._listener.returned(call, call.module, call.inputs, output)
                    is_told = True
            finally:
                self._followed = None
                if is_told:
                    self._listener.ends(output)
                else:
                    self._listener.fails()

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        # A shallow copy of a module has the hook, too, but does not belong to the model.
        if module in self._names and hidden_depth() == self._depth:
            super()._begin(module, args, kwargs)

    def _leave(self) -> None:
        with self._lock:
            super()._leave()
            followed = self._followed
            # This includes a forward that was interrupted without running hooks: by Ctrl-C, or SystemExit in a thread.
            if followed is not None and (
                followed.thread == threading.get_ident() or not followed.goes_on()
            ):
                self._followed = None
                followed.over = True
                followed.leave()
                self._listener.fails()


@dataclass(eq=False)
class Forward(Call):
    """A forward of the model or of a part of it; if it is followed, it has the stack of running modules."""

    handled: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    """The exception in whose handler the model was called, if any."""

    def __post_init__(self) -> None:
        self._stack: list[tuple[nn.Module, Sequence[Any]]] = [
            (self.module, self.inputs)
        ]
        self._is_quiet = False
        self._depth = hidden_depth()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def running(self) -> Running:
        """The running modules, without an innermost nn.Softmax or nn.Dropout, which belongs to the module around it."""
        end = len(self._stack)
        while end > 1 and isinstance(self._stack[end - 1][0], (nn.Softmax, nn.Dropout)):
            end -= 1
        return self._stack[:end]

    def follow(self, names: Mapping[nn.Module, str], listener: Listener) -> None:
        """Notify a listener of the modules and calls of torch in this forward."""
        self._names = names
        self._listener = listener
        self._handles.append(
            # Global hooks are added for this forward only. Hooks on each module would slow down all forwards and break
            # compiled graphs.
            global_hooks.register_module_forward_pre_hook(self._called)
        )
        self._handles.append(
            global_hooks.register_module_forward_hook(
                self._returned, with_kwargs=True, always_call=True
            )
        )
        # The mode that is entered last sees a call first, so the listener's modes have seen a call before the listener
        # is notified of its attention.
        self.modes = put_on(Interception(self._asked), *listener.modes())

    def leave(self) -> None:
        """Stop notifying the listener."""
        for handle in self._handles:
            handle.remove()
            # Removing the handle of a global hook leaves this flag behind (torch 2.8 to 2.15).
            global_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        take_off(self.modes)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Hide computations of the listener inside the ``with`` from this forward."""
        self._is_quiet = True
        try:
            with unseen():
                yield
        finally:
            self._is_quiet = False

    # Higher-order operators compile their arguments, including these hooks, to an unbroken graph, so hooks do nothing
    # while compiling.
    def _called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling() and self._is_followed(module):
            self._stack.append((module, args))

    def _returned(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        return self._hand_on(module, args, *rest)

    @torch.compiler.disable
    def _hand_on(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        # After an exception torch passes no keyword arguments, and the output may be None.
        if not self._is_followed(module) or not any(
            running is module for running, _ in self._stack[:0:-1]
        ):
            return None
        # Modules above this one in the stack have ended by an exception after which torch ran no hooks.
        while self._stack.pop()[0] is not module:
            pass
        # The module inside a wrapper of torch.compile has been reported already.
        is_wrapper = "_orig_mod" in module._modules
        if len(rest) != 2 or is_wrapper or module not in self._names:
            return None
        inputs, output = [*args, *rest[0].values()], rest[1]
        with torch._C.DisableTorchFunction():
            return self._listener.returned(self, module, inputs, output)

    def _asked(self, request: Seen) -> Answer | None:
        if self._is_quiet or hidden_depth() > self._depth:
            return None
        # If the call is outside this forward's frame, the forward was interrupted, and other code runs now.
        if not is_under(sys._getframe(), self.frame):
            return None
        if self.running[-1][0] not in self._names:
            return None
        with self.unseen():
            return self._listener.asked(self, request)

    def _is_followed(self, module: nn.Module) -> bool:
        """Return whether a module belongs to the model, or has weights and runs inside the model's forward."""
        if (
            self._is_quiet
            or self.thread != threading.get_ident()
            or hidden_depth() > self._depth
        ):
            return False
        # A module without weights that was created in the forward, such as nn.Softmax(-1)(x), belongs to its layer.
        return module in self._names or next(module.parameters(), None) is not None


def _entries(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the model and its parts that may be called by themselves, each with whether it is the whole model."""
    yield model, True
    inner = list(model.children())
    while inner:
        part = inner.pop(0)
        is_whole = _wraps(model, part)
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)) or is_whole:
            inner += part.children()
        if not isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield part, is_whole


def _wraps(model: nn.Module, part: nn.Module) -> bool:
    """Return whether ``model`` is only a wrapper of ``part``, as in torch.nn.parallel."""
    # DataParallel, DistributedDataParallel and FullyShardedDataParallel all call it "module".
    return len(list(model.children())) == 1 and getattr(model, "module", None) is part
