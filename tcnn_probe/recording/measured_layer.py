"""What a probe reads of a layer's parameters and of their gradients, apart from forwards."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_model.precision import widest
from tcnn_probe.attention.head_editor import run_with_gates
from tcnn_probe.hooks.modes import named_in_errors, without_gradients
from tcnn_probe.probes import Probe
from tcnn_probe.recording.measured import check_measured
from tcnn_probe.recording.sums import Terms

__all__ = ["MeasuredLayer"]


class MeasuredLayer:
    """A layer and the probe that measures it.

    Args:
        ignores: Function that says whether gradients that arrive now are left out.

    Raises:
        NotMeasuredError: The probe cannot measure this layer.
    """

    def __init__(
        self, name: str, module: nn.Module, probe: Probe, ignores: Callable[[], bool]
    ) -> None:
        self.name = name
        self.module = module
        self.probe = probe
        self._ignores = ignores
        self._handles: dict[nn.Parameter, list[torch.utils.hooks.RemovableHandle]] = {}
        self._unhooked = [
            (parameter, variable, squares)
            for variable, pairs in probe.gradients(module).items()
            for parameter, squares in pairs
        ]
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        # Several parameters can belong to one variable, so passes are counted for each of them.
        self._squares: dict[str, Tensor] = {}
        self._passes: dict[tuple[str, nn.Parameter], Tensor] = {}

    def facts(self) -> dict[str, Any]:
        """Return further entries of the layer table."""
        return dict(self.probe.facts(self.module)) if self.probe.facts else {}

    def follow_gradients(self) -> None:
        """Add hooks to the parameters whose gradients are measured, unless they are frozen."""
        frozen = []
        for parameter, variable, squares in self._unhooked:
            if parameter.requires_grad:
                hook = partial(self._add, variable, squares, parameter)
                self._handles.setdefault(parameter, []).append(parameter.register_hook(hook))
            else:
                frozen.append((parameter, variable, squares))
        self._unhooked = frozen

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for parameter, handles in self._handles.items():
            for handle in handles:
                handle.remove()
            if not parameter._backward_hooks:
                # None is the value of a parameter that never had a hook.
                parameter._backward_hooks = None
        self._handles, self._unhooked = {}, []

    @torch.compiler.disable
    @without_gradients
    def _add(
        self,
        variable: str,
        squares: Callable[[Tensor], Tensor],
        parameter: nn.Parameter,
        gradient: Tensor,
    ) -> None:
        """Add a parameter's gradient, unless it overflowed, as under a gradient scaler."""
        if self._ignores():
            return
        with named_in_errors(self.name):
            total = squares(gradient)
            # This stays a tensor, because reading its value would wait for the device.
            finite = total.isfinite().all()
            squared = widest(torch.where(finite, total, 0))
            self._squares[variable] = self._squares.get(variable, 0) + squared
            key = variable, parameter
            self._passes[key] = self._passes.get(key, 0) + finite.long()

    def read_squares(self) -> dict[str, Terms]:
        """Return the sums of squares over backward passes."""
        passes: dict[str, int] = {}
        for (variable, _), number in self._passes.items():
            # A pass may reach only some parameters of a variable.
            passes[variable] = max(int(number), passes.get(variable, 0))
        return {
            name: Terms(_as_array(self._squares[name]), count) for name, count in passes.items()
        }

    @without_gradients
    def read_state(self) -> dict[str, np.ndarray]:
        """Read values from the layer's parameters, with the edits under which its forwards run.

        If parameters are sharded over ranks, all ranks must call this together.
        """
        if self.probe.state is None:
            return {}
        with named_in_errors(self.name):
            measured = run_with_gates(self.module, partial(self.probe.state, self.module))
            state = check_measured(self.probe, measured, by_image=False)
            # A DTensor is sharded over ranks.
            return {
                name: _as_array(value.full_tensor() if hasattr(value, "full_tensor") else value)
                for name, value in state.items()
            }


def _as_array(value: Tensor) -> np.ndarray:
    return value.detach().double().cpu().numpy()
