"""Sums of a layer's measurements between two marks, on the layer's device, and maps of chosen images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_model.precision import widest, widest_dtype
from tcnn_probe.attention.head_editor import run_with_gates
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.hooks.modes import named_in_errors
from tcnn_probe.probes import Probe
from tcnn_probe.probes.anatomy import finish_information
from tcnn_probe.probes.probe import GradientNorms
from tcnn_probe.recording.image_sums import (
    LayerSums,
    Sums,
    add_sums,
    take_largest,
)
from tcnn_probe.recording.options import Classes

__all__ = [
    "MAPS_BY_CLASS",
    "Accumulator",
    "EpochSums",
    "GradientSums",
    "check_measured",
    "select_classes",
]

_Value = TypeVar("_Value", bound=Tensor | Pattern)
MAPS_BY_CLASS = "attention_by_class"
"""Variable with maps of all classes when it is measured, and only of the chosen classes when it is recorded."""


@dataclass
class EpochSums:
    """Sums of a layer when an epoch is marked, as plain arrays by variable that ranks can exchange.

    Attributes:
        images: Number of images that the layer saw.
        nonfinite: Number of images with a value that is NaN or infinite.
        sums: Sums over images, each with the number of images that count for each of its values.
        largest: Maxima over images.
        squares: Sums of squares over backward passes, each with the number of passes.
        patterns: Sums of attention over images; None if images have several sizes.
        state: Values that are read from the layer's parameters.
    """

    images: int = 0
    nonfinite: int = 0
    sums: Sums = field(default_factory=dict)
    largest: dict[str, np.ndarray] = field(default_factory=dict)
    squares: Sums = field(default_factory=dict)
    patterns: dict[str, Pattern | None] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def together(cls, ranks: Iterable["EpochSums"]) -> "EpochSums":
        """Add up the sums of several ranks."""
        total = cls()
        for rank in ranks:
            total.images += rank.images
            total.nonfinite += rank.nonfinite
            # All ranks have the same parameters, or have gathered them.
            total.state = total.state or rank.state
            _add_patterns(total.patterns, rank.patterns)
            add_sums(total.sums, rank.sums)
            take_largest(total.largest, rank.largest)
            # Passes of all ranks are counted, because hooks see a rank's gradients before they are averaged.
            add_sums(total.squares, rank.squares)
        return total

    def means(self) -> dict[str, np.ndarray]:
        """Return means and maxima over images, root mean squares over backward passes, and statistics of patterns."""
        means = {
            name: total / np.where(number == 0, np.nan, number)
            for name, (total, number) in self.sums.items()
        }
        for name, value in self.largest.items():
            # The maximum is minus infinity if no image counts.
            means[name] = np.where(np.isneginf(value), np.nan, value)
        for name, (total, number) in self.squares.items():
            # Without a backward pass the value is NaN, as 0 would look like a measurement.
            means[name] = np.sqrt(total / (number or np.nan))
        statistics = self.statistics.items()
        return means | {
            name: value for name, value in statistics if not isinstance(value, str)
        }

    @cached_property
    def statistics(self) -> dict[str, np.ndarray | str]:
        """Statistics of the patterns by variable, or the reasons why there are none."""
        statistics: dict[str, np.ndarray | str] = {}
        for name, pattern in self.patterns.items():
            if pattern is not None:
                finish = pattern.finish or finish_information
                statistics |= finish(name, pattern)
        return statistics


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
        _add_patterns(self._patterns, patterns)
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

    def read(self, numbers: LayerSums) -> EpochSums:
        """Return everything but the maps. If parameters are sharded over ranks, all ranks must call this together.

        Args:
            numbers: Sums of the numbers of this layer.
        """
        variables = self.probe.variables
        return EpochSums(
            images=self.images,
            nonfinite=numbers.nonfinite,
            sums={
                name: sums
                for name, sums in numbers.sums.items()
                if variables[name].over_images != "largest"
            },
            largest={
                name: values
                for name, values in numbers.largest.items()
                if variables[name].over_images == "largest"
            },
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


def check_measured(
    probe: Probe, measured: Mapping[str, _Value], *, by_image: bool
) -> Mapping[str, _Value]:
    """Return a probe's measurements after checking them against the probe's variables.

    Args:
        probe: Probe that measured.
        measured: Tensors by variable.
        by_image: Whether the first axis of the tensors is that of images.

    Raises:
        TypeError: The measurements are not a mapping from variables to tensors.
        ValueError: A variable is unknown, or has other dimensions or another number of images.
    """
    if not isinstance(measured, Mapping):
        raise TypeError(
            f"expected the probe {probe.kind!r} to return {{variable: tensor}}, got {measured!r}"
        )
    images = None
    for name, value in measured.items():
        if name not in probe.variables:
            raise ValueError(
                f"the probe {probe.kind!r} measures {name!r}, which its variables do not describe"
            )
        if by_image and isinstance(value, Pattern):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"expected the probe {probe.kind!r} to return a tensor for {name!r}, got {value!r}"
            )
        dims = (*["image"] * by_image, *probe.variables[name].dims[1:])
        if value.ndim != len(dims):
            raise ValueError(
                f"expected the probe {probe.kind!r} to return {name!r} with the dimensions {dims}, got the shape "
                f"{tuple(value.shape)}"
            )
        if by_image:
            if images not in (None, len(value)):
                raise ValueError(
                    f"the probe {probe.kind!r} measures {images} images, and {len(value)} for {name!r}"
                )
            images = len(value)
    return measured


def select_classes(
    maps: Mapping[str, Tensor],
    classes: Classes,
    output: Any,
    rows: Sequence[int],
    images: int,
) -> tuple[Mapping[str, Tensor], str]:
    """Keep only the maps of the chosen classes, and add the index and the score of each of these classes.

    Args:
        maps: Maps by variable; ``attention_by_class`` has those of all K classes, shape (n, K, height, width).
        classes: Classes to keep.
        output: Output of the model; None if only parts of the model were called.
        rows: Indices of the n images in the forward.
        images: Number of images in the forward.

    Returns:
        The maps of k classes, with ``class_index`` and ``class_score``, shape (n, k); and the reason if there are no
        maps of classes, else "".
    """
    maps = dict(maps)
    all_maps = maps.pop(MAPS_BY_CLASS)
    if not (classes.top or classes.indices):
        return maps, ""
    scores, expected = None, (images, all_maps.shape[1])
    if isinstance(output, Tensor) and tuple(output.shape) == expected:
        scores = output.detach()[list(rows)].to(all_maps)
    if classes.indices:
        index = torch.tensor(classes.indices, device=all_maps.device).expand(
            len(all_maps), -1
        )
    elif scores is not None:
        index = scores.topk(min(classes.top, scores.shape[1])).indices
    else:
        reason = f"its output does not have the shape {expected}"
        if output is None:
            reason = "the model was not called as a whole"
        return (
            maps,
            f"{reason}, so its best classes are unknown: classes=[...] keeps maps of the classes that it names",
        )
    score = (
        torch.full(index.shape, torch.nan).to(all_maps)
        if scores is None
        else scores.gather(1, index)
    )
    rows_of_maps = torch.arange(len(all_maps), device=all_maps.device)[:, None]
    # Indices of shape (n, 1) and (n, k) select k classes for each image: (n, k, height, width).
    selected = all_maps[rows_of_maps, index]
    return {
        **maps,
        MAPS_BY_CLASS: selected,
        "class_index": index,
        "class_score": score,
    }, ""


def _add_patterns(
    totals: dict[str, Pattern | None], patterns: Mapping[str, Pattern | None]
) -> None:
    for name, pattern in patterns.items():
        if name not in totals:
            totals[name] = pattern and pattern.copy()
        elif total := totals[name]:
            totals[name] = pattern and total.plus(pattern)


def _as_array(value: Tensor) -> np.ndarray:
    return value.detach().double().cpu().numpy()
