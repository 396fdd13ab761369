"""Sums of a layer's measurements between two marks, on the layer's device, and maps of chosen images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_model.precision import widest, widest_dtype
from tcnn_probe.attention.head_editor import run_with_gates
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.hooks.modes import named_in_errors
from tcnn_probe.probes import Probe
from tcnn_probe.probes.probe import GradientNorms
from tcnn_probe.recording.measured import check_measured
from tcnn_probe.recording.sums import EpochSums, Sums, add_patterns

__all__ = ["Accumulator", "GradientSums"]


class GradientSums:
    """Sums over backward passes of the squares that a probe computes from gradients.

    Args:
        layer: Name of the layer, for errors.
        gradients: Parameters and functions of their gradients, see :meth:`tcnn_probe.Probe.gradients`.
        ignores: Function that returns True while gradients are to be left out.
    """

    def __init__(
        self, layer: str, gradients: GradientNorms, ignores: Callable[[], bool]
    ) -> None:
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
        """Add hooks to all parameters that are not frozen; frozen ones get theirs in a later call, once unfrozen."""
        frozen = []
        for parameter, variable, squares in self._unhooked:
            if parameter.requires_grad:
                # Several parameters can belong to one variable, so passes are counted for each parameter.
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
        # A pass may reach only some parameters of a variable, so the largest count is the number of passes.
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
        """Add a parameter's gradient of one backward pass, unless it overflowed, as under a gradient scaler."""
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


class Accumulator:
    """Sums over images of attention, and maps of chosen images.

    Args:
        name: Name of the layer.
        module: Module that is measured.
        probe: Probe that measures it.
        ignores: Function that says whether gradients that arrive now are left out.

    Raises:
        NotMeasuredError: The probe cannot measure this layer.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        probe: Probe,
        ignores: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.module = module
        self.probe = probe
        self.gradients = GradientSums(name, probe.gradients(module), ignores)
        self._patterns: dict[str, Pattern | None] = {}
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self.images = 0
        self.maps: dict[int, dict[str, Tensor]] = {}
        self._patterns.clear()
        self.gradients.reset()

    def add(self, patterns: Mapping[str, Pattern], images: int) -> None:
        """Add the sums of attention over the images of a forward."""
        add_patterns(self._patterns, patterns)
        self.images += images

    def add_maps(self, images: Sequence[int], maps: Mapping[str, Tensor]) -> None:
        """Keep copies of maps, in the dtype in which they are stored.

        Args:
            images: Numbers of the images in the epoch.
            maps: Maps by variable, (images, *dims).
        """
        for name, values in maps.items():
            dtype = getattr(torch, self.probe.variables[name].dtype)
            # MPS has no float64.
            dtype = widest_dtype(values.device) if dtype == torch.float64 else dtype
            for image, value in zip(images, values, strict=True):
                # Without copy=True, to() would return the model's own tensor if the dtype is the same.
                self.maps.setdefault(image, {})[name] = value.to(dtype, copy=True)

    def read(self, numbers: EpochSums) -> EpochSums:
        """Return everything but the maps. If parameters are sharded over ranks, all ranks must call this together.

        Args:
            numbers: Sums of the numbers of this layer.
        """
        return replace(
            numbers,
            images=self.images,
            squares=self.gradients.read(),
            patterns={
                name: pattern and pattern.arrays()
                for name, pattern in self._patterns.items()
            },
            state=self._read_state(),
        )

    @torch.no_grad()
    def _read_state(self) -> dict[str, np.ndarray]:
        """Read values from the layer's parameters, with the edits under which its forwards run."""
        if self.probe.state is None:
            return {}
        arrays = {}
        with named_in_errors(self.name):
            measured = run_with_gates(
                self.module, partial(self.probe.state, self.module)
            )
            state = check_measured(self.probe, measured, by_image=False)
            for name, value in state.items():
                # This is a DTensor, which is sharded over ranks.
                if hasattr(value, "full_tensor"):
                    value = value.full_tensor()
                arrays[name] = _as_array(value)
        return arrays


def _as_array(value: Tensor) -> np.ndarray:
    return value.detach().double().cpu().numpy()
