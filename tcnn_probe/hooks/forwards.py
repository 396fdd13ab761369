"""Following the forwards of a model: their beginning and end,
the modules that run, and the calls of torch in them.

A forward is a call of the model, or successive calls of its parts from outside, as in
``model.forward_features(x)``, until a part that has run is called again. Permanent hooks are on the
model and on all parts that have parts of their own. While a call is followed, torch's global module
hooks tell which module runs, and a function mode sees its calls of torch. Both are removed when the
call ends, also after an exception.
"""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.overrides import TorchFunctionMode

from tcnn_probe.hooks.calls import (
    Call,
    Calls,
    is_running,
    outermost_call,
    without_nested,
)
from tcnn_probe.hooks.compilation import never_compiled
from tcnn_probe.hooks.interception import (
    NESTED,
    Answer,
    Seen,
    SeenUnmeasured,
    TorchCall,
)
from tcnn_probe.hooks.modes import (
    HIDDEN_DEPTHS,
    hidden_depth,
    is_nested,
    is_transformed,
    run_unseen,
)
from tcnn_probe.hooks.private_torch import (
    COMPILED_MODULE,
    forget_global_hook,
)

__all__ = ["Forward", "ForwardListener", "Forwards", "ModuleCall", "Running"]


class ModuleCall(NamedTuple):
    """A module that is called, and its inputs."""

    module: nn.Module
    inputs: Sequence[Any]


Running = Sequence[ModuleCall]
"""Modules that are running, the outermost first."""


class ForwardListener(Protocol):
    """Interface of an object that is notified of the forwards of a model, one at a time."""

    may_edit: bool
    """Whether :meth:`torch_computes` may return answers."""

    def call_begins(self, entry: nn.Module, inputs: Sequence[Any], *, continues: bool) -> bool:
        """Return whether to follow a call of ``entry``, the model or a part of it.

        Args:
            entry: Module that was called from outside of the model.
            inputs: Inputs of this call.
            continues: Whether the call belongs to the forward of the previous call.
        """

    def modes(self) -> Sequence[TorchFunctionMode]:
        """Return function modes to enter during the forward that has begun."""

    def module_called(self, module: nn.Module, args: Sequence[Any]) -> None:
        """Handle the call of a module, before it runs, with its positional arguments."""

    def torch_computes(self, forward: "Forward", seen: Seen) -> Sequence[Answer]:
        """Handle a call of torch in the innermost running module,
        and return edits of its output.
        """

    def torch_ran(self, call: TorchCall, output: Any) -> None:
        """Handle the output of the call of torch about
        which :meth:`torch_computes` was called last, and its edited output.
        """

    def module_returned(
        self, forward: "Forward", module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> None:
        """Handle the return of a module. Inputs and output can be nested tensors."""

    def call_ends(self, output: Any) -> None:
        """Handle the end of the call, with its output."""

    def call_fails(self) -> None:
        """Handle a call that an exception has ended."""


def _frames_of_threads() -> dict[int, FrameType]:
    """Return the running frame of each thread."""
    # Python before 3.12 can deadlock if it collects garbage in this call (CPython issue 106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


class Forwards(Calls["Forward"]):
    """Notifies a listener of the forwards of a model that it wants to follow,
    from :meth:`attach` to :meth:`detach`.

    Args:
        model: Model to follow.
        listener: Listener to its forwards.
        names: Names of the modules to follow, "" for the model and its wrappers.
        attending: Modules in which the listener has seen attention so far.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: ForwardListener,
        names: Mapping[nn.Module, str],
        attending: Set[nn.Module],
    ) -> None:
        super().__init__(model, Forward)
        self._listener = listener
        self._names = names
        self._followed: Forward | None = None  # at most one call at a time
        self._depth = hidden_depth()
        self._sequence = _Sequence()
        self._begun: dict[int, FrameType] = {}  # by thread
        self._attending = attending

    def attach(self) -> None:
        """Add hooks to the model and its parts."""
        self._attached = True
        # Forwards that are running already are not followed, as their beginning was not.
        for thread, frame in _frames_of_threads().items():
            if (begun := outermost_call(self._names, frame)) is not None:
                self._begun[thread] = begun
        for entry in _entries(self.module):
            # torch.compile leaves out hooks of parts, which would break graphs; only the outermost
            # one keeps its hook.
            is_part = entry is not self.module
            self._add(entry, self._begin, first=True, compiled=is_part)
            self._add(entry, self._end, after=True, always=True, compiled=is_part)

    @property
    def followed(self) -> "Forward | None":
        """The forward that is followed, in whichever thread."""
        return self._followed

    def follows(self, module: nn.Module) -> bool:
        """Return False in hidden code, and for a shallow copy,
        which has the hooks but does not belong to the model.
        """
        return module in self._names and hidden_depth() == self._depth

    def enter_call(self, call: "Forward") -> None:
        """Follow the call if no other one is followed and the listener wants it."""
        # Reading properties of tensors is a call of a torch function, which the user's modes must
        # not see.
        with self._lock, torch.DisableTorchFunction():
            begun = self._begun.get(call.thread)
            if begun is not None and not is_running(begun):
                begun = None
                del self._begun[call.thread]
            call.over = (
                begun is not None or self._followed is not None or is_transformed(call.inputs)
            )
            if call.over:
                return
            continues = self._continues(call)
            begins = partial(self._listener.call_begins, continues=continues)
            call.over = not call.run_unseen(begins, call.module, call.inputs)
            if call.over:
                return
            self._followed = call
        call.follow(self._names, self._listener)

    def _continues(self, call: "Forward") -> bool:
        """Return whether a call belongs to the forward of the previous call,
        and note it as a part of its forward.
        """
        entry, sequence = call.module, self._sequence
        is_whole = self._names[entry] == ""
        modules = set() if is_whole else set(entry.modules())
        continues = (
            not is_whole
            and sequence.first not in (None, entry)
            and sequence.thread == call.thread
            and sequence.training == self.module.training
            and (entry not in sequence.ran or entry in sequence.called)
            # Norms and activations may be called several times in a forward, as on several
            # intermediate outputs.
            and not sequence.ran & self._attending & modules
        )
        if not continues:
            # Calls after that of the whole model, in which all parts may have run, belong to the
            # next forward.
            first = None if is_whole else entry
            sequence = _Sequence(first, call.thread, self.module.training)
            self._sequence = sequence
        sequence.called.add(entry)
        sequence.ran |= modules
        return continues

    def exit_call(self, call: "Forward", output: Any) -> None:
        """Notify the listener of the end of a followed call."""
        if call is not self._followed or not self._attached:
            return
        # An exception that was already being handled when the model was called is not a failure of
        # the forward.
        has_failed, is_told = sys.exc_info()[1] is not call.handled, False
        # It is not over yet, lest another thread takes it for an abandoned forward.
        call.leave()
        try:
            if not has_failed:
                # The entry is reported here, not by torch's global hook, which runs before the
                # entry's own hooks, which may change the output.
                inputs = call.inputs
                call.run_unseen(self._listener.module_returned, call, call.module, inputs, output)
                is_told = True
        finally:
            try:
                if is_told:
                    call.run_unseen(self._listener.call_ends, *without_nested(output))
                else:
                    call.run_unseen(self._listener.call_fails)
            finally:
                # Only now may another thread begin a forward, because the listener may still have
                # measured this one.
                self._followed = None

    def _leave(self) -> None:
        with self._lock:
            super()._leave()
            followed = self._followed
            # This includes a forward that was interrupted without running hooks: by Ctrl-C, or
            # SystemExit in a thread.
            if followed is not None and (followed.thread == get_ident() or not followed.is_open()):
                self._followed = None
                followed.close()
                self._listener.call_fails()


@dataclass
class _Sequence:
    """The forward of the latest call.

    Args:
        first: Part whose call began the forward; None if the model was called as a whole.
        thread: Thread of the calls.
        training: Mode of the model.
        called: Parts that were called.
        ran: Modules inside the parts that were called.
    """

    first: nn.Module | None = None
    thread: int = 0
    training: bool = False
    called: set[nn.Module] = field(default_factory=set)
    ran: set[nn.Module] = field(default_factory=set)


@dataclass(eq=False)
class Forward(Call):
    """A call of the model or of a part of it;
    if it is followed, it has the stack of running modules.
    """

    handled: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    """The exception in whose handler the model was called, if any."""

    def __post_init__(self) -> None:
        # Modules with their positional arguments.
        self._stack: list[tuple[nn.Module, Sequence[Any]]] = [(self.module, self.inputs)]
        self._is_closed = False
        self._has_paused = False  # inside a layer that needs to run without modes
        self._is_quiet = False  # also while a function of the listener runs
        self._depth = hidden_depth()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def running(self) -> Running:
        """The running modules, the last of which is :attr:`innermost`."""
        end = self._place_of_innermost() + 1
        return [ModuleCall(module, without_nested(*args)) for module, args in self._stack[:end]]

    @property
    def innermost(self) -> nn.Module:
        """The innermost running module, without an nn.Softmax or nn.Dropout,
        which belongs to the module around it.
        """
        return self._stack[self._place_of_innermost()][0]

    def _place_of_innermost(self) -> int:
        place = len(self._stack) - 1
        while place and isinstance(self._stack[place][0], (nn.Softmax, nn.Dropout)):
            place -= 1
        return place

    def follow(self, names: Mapping[nn.Module, str], listener: ForwardListener) -> None:
        """Notify a listener of the modules and calls of torch in this forward."""
        self._names = names
        self._listener = listener
        self._handles.append(
            # Global hooks are added for this forward only. Hooks on each module would slow down all
            # forwards and break compiled graphs.
            global_hooks.register_module_forward_pre_hook(self._called)
        )
        self._handles.append(
            global_hooks.register_module_forward_hook(
                self._returned, with_kwargs=True, always_call=True
            )
        )
        self._modes = listener.modes()
        self.scope.open(self.module, self, self._modes)

    def close(self) -> None:
        """End the call, and stop notifying the listener."""
        self.over = True
        self.leave()

    def leave(self) -> None:
        """Stop notifying the listener of modules and calls of torch;
        the call goes on until its end is handled.
        """
        self._is_closed = self._is_quiet = True
        while self._handles:
            self._handles[-1].remove()
            forget_global_hook(self._handles[-1].id)
            del self._handles[-1:]
        self.scope.close()

    def run_unseen(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the listener, hidden from this forward and from all modes."""
        self._is_quiet = True
        try:
            return run_unseen(function, *args)
        finally:
            self._is_quiet = self._is_closed

    # The next two methods are called for every module, so that each function call in them counts.
    # Higher-order operators compile their arguments, including these hooks, to an unbroken graph,
    # so hooks do nothing while compiling.
    @never_compiled
    def _called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not self.is_listening():
            return
        if module not in self._names and not _has_weights(module):
            return
        self._stack.append((module, args))
        self._listener.module_called(module, args)
        # torch runs this layer on nested tensors in its fast path only, which modes turn off.
        if isinstance(module, nn.MultiheadAttention) and any(map(is_nested, args)):
            if module in self._names:
                self.run_unseen(self._listener.torch_computes, self, SeenUnmeasured(NESTED))
            self.scope.leave_modes()
            self._has_paused = True

    @never_compiled
    def _returned(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_listening():
            return
        if module not in self._names and not _has_weights(module):
            return
        # Modules above this one in the stack have ended by an exception after which torch ran no
        # hooks.
        stack = self._stack
        place = len(stack) - 1
        while place and stack[place][0] is not module:
            place -= 1
        if not place:  # the entry is reported when it ends
            return
        del stack[place:]
        if self._has_paused:
            self._has_paused = False
            self.scope.enter(self, self._modes)
        # After an exception torch passes no keyword arguments, and the output may be None. The
        # module inside a wrapper of torch.compile has been reported already.
        if len(rest) == 2 and module in self._names and COMPILED_MODULE not in module._modules:
            kwargs, output = rest
            inputs = (*args, *kwargs.values()) if kwargs else args
            with torch.DisableTorchFunction():
                self._listener.module_returned(self, module, inputs, output)

    # The following methods implement tcnn_probe.hooks.interception.Observer.

    def may_edit(self) -> bool:
        """Return whether the listener may edit the attention that torch is about to compute."""
        return self._listener.may_edit and self.is_listening()

    def sees(self, call: TorchCall) -> Sequence[Answer]:
        """Pass a call of torch to the listener."""
        if not self.is_listening() or self.innermost not in self._names:
            return ()
        if not is_running(self.frame):  # it was interrupted, and other code runs now
            return ()
        # This looks for modes of tracers, which are hidden from the listener.
        objection = call.objection
        return self.run_unseen(self._ask, call, objection)

    def _ask(self, call: TorchCall, objection: str | None) -> Sequence[Answer]:
        seen = call.describe() if objection is None else call.unread(objection)
        return () if seen is None else self._listener.torch_computes(self, seen)

    def ran(self, call: TorchCall, output: Any, answers: Sequence[Answer]) -> None:
        """Pass the output of an attention to the listener."""
        if self.is_listening():
            self.run_unseen(self._listener.torch_ran, call, output)

    def is_listening(self) -> bool:
        """Return whether the code that runs belongs to this forward."""
        return not (
            self._is_quiet
            or self.thread != get_ident()
            # Nothing is hidden in most forwards, which is known sooner than the depth is.
            or (HIDDEN_DEPTHS and hidden_depth() > self._depth)
        )


def _has_weights(module: nn.Module) -> bool:
    """Return whether a module that was created in a forward is one to follow:
    nn.Softmax(-1)(x) belongs to the layer that calls it.
    """
    return next(module.parameters(), None) is not None


def _entries(model: nn.Module) -> list[nn.Module]:
    """Return the model and its parts that may be called by themselves."""
    entries = []
    for name, module in model.named_modules():
        # Deeper modules without parts of their own, such as projections, contain no attention.
        # Hooks on them would slow down forwards that are not followed, by a twentieth in a small
        # vision transformer. A patch embedding can be a single convolution, but lies at the top.
        is_deep = name.count(".") > 1 and not module._modules
        # torch's containers cannot be called, but a class made of one can: timm's
        # features_only=True returns a ModuleDict with a forward.
        is_container = getattr(module.forward, "__func__", None) is nn.Module.forward
        # A GPSA layer computes in another order, with other rounding, if there are hooks on the
        # place of its heads.
        is_place = isinstance(module, nn.Identity)
        if not (is_deep or is_container or is_place):
            entries.append(module)
    return entries
