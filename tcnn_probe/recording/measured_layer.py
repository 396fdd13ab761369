"""A measured layer: what a probe reads of its parameters
and of their gradients, apart from forwards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_model.precision import widest
from tcnn_probe.attention.head_editor import run_with_gates
from tcnn_probe.hooks.modes import named_in_errors
from tcnn_probe.probes import Probe
from tcnn_probe.probes.probe import GradientNorms
from tcnn_probe.recording.measured import check_measured
from tcnn_probe.recording.sums import Sums

__all__ = ["MeasuredLayer"]


class GradientSums:
    """Sums over backward passes of the squares that a probe computes from gradients.

    Args:
        layer: Name of the layer, for errors.
        gradients: Parameters and functions of their gradients, see
            :meth:`tcnn_probe.Probe.gradients`.
        ignores: Function that returns True while gradients are to be left out.
    """

    def __init__(self, layer: str, gradients: GradientNorms, ignores: Callable[[], bool]) -> None:
        self._layer = layer
        self._ignores = ignores
        self._sums: dict[str, Tensor] = {}
        self._passes: dict[tuple[str, int], Tensor] = {}
        self._hooked: list[tuple[nn.Parameter, torch.utils.hooks.RemovableHandle]] = []
        self._unhooked = [
            (parameter, variable, squares)
            for variable, pairs in gradients.items()
            for parameter, squares in pairs
        ]

    def follow(self) -> None:
        """Add hooks to all parameters that are not frozen;
        frozen ones get theirs in a later call, once unfrozen.
        """
        frozen = []
        for parameter, variable, squares in self._unhooked:
            if parameter.requires_grad:
                # Several parameters can belong to one variable, so passes are counted for each
                # parameter.
                hook = partial(self._add, variable, squares, id(parameter))
                self._hooked.append((parameter, parameter.register_hook(hook)))
            else:
                frozen.append((parameter, variable, squares))
        self._unhooked = frozen

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for parameter, handle in self._hooked:
            handle.remove()
            if not parameter._backward_hooks:
                # None is the value of a parameter that never had a hook.
                parameter._backward_hooks = None
        self._hooked = []
        self._unhooked = []

    def reset(self) -> None:
        """Start the next epoch."""
        self._passes.clear()
        self._sums.clear()

    def read(self) -> Sums:
        """Return the sums and the numbers of passes."""
        # A pass may reach only some parameters of a variable, so the largest count is the number of
        # passes.
        passes: dict[str, int] = {}
        for (variable, _), number in self._passes.items():
            passes[variable] = max(int(number), passes.get(variable, 0))
        return {
            variable: (_as_array(self._sums[variable]), number)
            for variable, number in passes.items()
        }

    @torch.compiler.disable
    @torch.no_grad()
    def _add(
        self,
        variable: str,
        squares: Callable[[Tensor], Tensor],
        parameter: int,
        gradient: Tensor,
    ) -> None:
        """Add a parameter's gradient of one backward pass,
        unless it overflowed, as under a gradient scaler.
        """
        if self._ignores():
            return
        with named_in_errors(self._layer):
            total = squares(gradient)
            # This stays a tensor, because reading its value would wait for the device.
            finite = total.isfinite().all()
            squared = widest(torch.where(finite, total, 0))
            previous = self._sums.get(variable)
            self._sums[variable] = squared if previous is None else previous + squared
            self._passes[variable, parameter] = (
                self._passes.get((variable, parameter), 0) + finite.long()
            )


class MeasuredLayer:
    """A layer and the probe that measures it.

    Args:
        name: Name of the layer.
        module: Module that is measured.
        probe: Probe that measures it.
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
        self.gradients = GradientSums(name, probe.gradients(module), ignores)

    def facts(self) -> dict[str, Any]:
        """Return further entries of the layer table."""
        return dict(self.probe.facts(self.module)) if self.probe.facts else {}

    @torch.no_grad()
    def read_state(self) -> dict[str, np.ndarray]:
        """Read values from the layer's parameters, with the edits under which its forwards run.

        If parameters are sharded over ranks, all ranks must call this together.
        """
        if self.probe.state is None:
            return {}
        with named_in_errors(self.name):
            read = partial(self.probe.state, self.module)
            measured = run_with_gates(self.module, read)
            state = check_measured(self.probe, measured, by_image=False)
            # A DTensor is sharded over ranks.
            return {
                name: _as_array(value.full_tensor() if hasattr(value, "full_tensor") else value)
                for name, value in state.items()
            }


def _as_array(value: Tensor) -> np.ndarray:
    return value.detach().double().cpu().numpy()
