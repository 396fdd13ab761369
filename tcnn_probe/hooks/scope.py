"""What is on while a module is called: the mode that sees calls of torch,
other modes, and eager execution.
"""

from collections.abc import Sequence

from torch import nn
from torch.overrides import TorchFunctionMode

from tcnn_probe.hooks.compilation import Eagerness, is_eager
from tcnn_probe.hooks.interception import Interception, Observer
from tcnn_probe.hooks.modes import leave_mode

__all__ = ["Scope"]


class Scope:
    """Function modes that are on, and compiled code that runs eagerly,
    from :meth:`open` to :meth:`close`.

    Torch runs no hooks after Ctrl-C, so a scope can stay open until the next forward of its thread,
    or the end of the ``with``. Whatever switches something off for the time of a forward, a mode or
    a gradient, is therefore never in a scope, but in a ``with`` of C++ guards, which no signal can
    interrupt (:func:`unseen`).
    """

    def __init__(self) -> None:
        self._observed: list[tuple[Interception, Observer]] = []
        self._modes: list[TorchFunctionMode] = []
        self._eagerness: Eagerness | None = None

    def open(
        self,
        module: nn.Module,
        observer: Observer | None = None,
        modes: Sequence[TorchFunctionMode] = (),
    ) -> None:
        """Run compiled parts of a module eagerly,
        tell an observer of calls of torch, and enter modes.

        The mode that is entered last sees a call first, so that modes have seen a call before the
        observer is told.
        """
        if not is_eager():  # as in a layer of a model that is followed itself
            self._eagerness = Eagerness(module)
            self._eagerness.open()  # it is kept before, so that close() ends it after Ctrl-C
        self.enter(observer, modes)

    def enter(self, observer: Observer | None, modes: Sequence[TorchFunctionMode] = ()) -> None:
        """Tell an observer of calls of torch, and enter modes."""
        if observer is not None:
            interception = Interception.of_this_thread()
            # This order leaves a mode that Ctrl-C has interrupted while it was entered.
            self._observed.append((interception, observer))
            interception.join(observer)
        for mode in modes:
            self._modes.append(mode)
            mode.__enter__()

    @property
    def has_modes(self) -> bool:
        """Whether modes are still to be left."""
        return bool(self._modes or self._observed)

    def close(self) -> None:
        """Leave the modes, even if others that were entered later are still on. This may be
        repeated.
        """
        self.leave_modes()
        if self._eagerness is not None:
            self._eagerness.close()

    def leave_modes(self) -> None:
        """Leave the modes, but still run compiled code eagerly."""
        # While a mode handles a call, torch has set it aside, and puts it back afterwards. A
        # recorder can be removed, or collected as garbage, just then; its modes are left when this
        # is repeated.
        for mode in self._modes[::-1]:
            if leave_mode(mode):
                self._modes.remove(mode)
        self._observed = [
            (mode, observer) for mode, observer in self._observed if not mode.leave(observer)
        ]
