"""What one probe finds of one layer between two marks: sums on the layer's device, and maps of chosen images."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_model.gpsa.precision import widest, widest_dtype
from tcnn_probe.attention.head_editor import edited
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.heads.static_pattern import information, translation_equivariance
from tcnn_probe.hooks.modes import named_in_errors
from tcnn_probe.probes import Probe

__all__ = ["Accumulator", "EpochSums", "checked"]

_Found = TypeVar("_Found", bound=Tensor | Pattern)


@dataclass
class EpochSums:
    """What is known of a layer when an epoch is marked: plain arrays by variable, which ranks can send each other."""

    images: int = 0  # that the layer saw
    nonfinite: int = 0  # of these, that gave a NaN or an infinity
    sums: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)  # over images, and over how many
    squares: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)  # over backward passes, and how many
    patterns: dict[str, Pattern | None] = field(default_factory=dict)  # None where images have several sizes
    state: dict[str, np.ndarray] = field(default_factory=dict)  # of the layer's parameters

    @classmethod
    def together(cls, several: Iterable["EpochSums"]) -> "EpochSums":
        """The sums of several ranks added up."""
        total = cls()
        for one in several:
            total.images += one.images
            total.nonfinite += one.nonfinite
            total.state = total.state or one.state
            _add_patterns(total.patterns, one.patterns)
            # Of passes too: hooks see a rank's own gradients, before they are averaged.
            for mine, other in ((total.sums, one.sums), (total.squares, one.squares)):
                for name, (value, number) in other.items():
                    before, earlier = mine.get(name, (0, 0))
                    mine[name] = before + value, earlier + number
        return total

    def means(self) -> dict[str, np.ndarray]:
        """Mean of each variable over the images that gave it, root mean square over backward passes, and patterns'."""
        means = {name: total / number for name, (total, number) in self.sums.items()}
        means |= {name: np.sqrt(total / (number or np.nan)) for name, (total, number) in self.squares.items()}
        for name, one in self.patterns.items():
            if one is not None:
                mean = one.attention / one.images
                means[name] = information(mean, one.entropy / one.images)
                if one.queries is not None and one.keys is not None:
                    equivariance = translation_equivariance(mean, one.queries, one.keys)
                    if not np.isnan(equivariance).all():  # as on a grid of one cell
                        means["translation_equivariance"] = equivariance
        return means


class Accumulator:
    """Sums over images, in float64 (float32 where the device has no float64), and maps of chosen images.

    Args:
        name, module, probe: what is measured.
        ignores: whether a gradient that arrives now is not to be measured.

    Raises:
        NotMeasuredError: the probe cannot measure this layer.
    """

    def __init__(self, name: str, module: nn.Module, probe: Probe, ignores: Callable[[], bool] = lambda: False) -> None:
        self.name, self.module, self.probe, self._ignores = name, module, probe, ignores
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._patterns: dict[str, Pattern | None] = {}
        self._hooked: list[tuple[nn.Parameter, torch.utils.hooks.RemovableHandle]] = []
        self._unhooked = [
            (parameter, variable, squares)
            for variable, pairs in (probe.gradients(module) if probe.gradients else {}).items()
            for parameter, squares in pairs
        ]
        self._counts: Counter[str] = Counter()
        self._passes: dict[tuple[str, int], Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self.images = 0
        self.maps: dict[int, dict[str, Tensor]] = {}
        self._nonfinite: Tensor | None = None
        self._counts.clear()
        self._passes.clear()
        self._patterns.clear()
        for total in (*self._sums.values(), *self._squares.values()):
            total.zero_()

    def add(self, measured: Mapping[str, Tensor]) -> None:
        """Add the images of a forward, (B, *dims) of each variable."""
        values = list(measured.values())
        if not values or not len(values[0]):
            return
        rows = torch.cat([widest(one.reshape(len(one), -1)) for one in values], 1)
        sums = rows.sum(0).split([one[0].numel() for one in values])
        for name, one, total in zip(measured, values, sums, strict=True):
            _add(self._sums, name, total.view(one.shape[1:]))
            self._counts[name] += len(rows)
        broken = rows.isfinite().logical_not_().any(1).sum()
        self._nonfinite = broken if self._nonfinite is None else self._nonfinite + broken
        self.images += len(rows)

    def add_patterns(self, patterns: Mapping[str, Pattern]) -> None:
        """Add sums over images of a forward."""
        _add_patterns(self._patterns, patterns)

    def add_maps(self, which: Sequence[int], maps: Mapping[str, Tensor]) -> None:
        """Keep copies of maps of images, as narrow as they are stored, by the images' number in the epoch."""
        for name, values in maps.items():
            dtype = getattr(torch, self.probe.variables[name].dtype)
            dtype = widest_dtype(values.device) if dtype == torch.float64 else dtype
            for place, image in enumerate(which):
                self.maps.setdefault(image, {})[name] = values[place].to(dtype, copy=True)

    def follow_gradients(self) -> None:
        """Hook the parameters whose gradients the probe wants; those that are frozen once they no longer are."""
        waiting = []
        for parameter, variable, squares in self._unhooked:
            if parameter.requires_grad:
                hook = partial(self._add_gradient, variable, squares, id(parameter))
                self._hooked.append((parameter, parameter.register_hook(hook)))
            else:
                waiting.append((parameter, variable, squares))
        self._unhooked = waiting

    @torch.compiler.disable
    @torch.no_grad()
    def _add_gradient(self, variable: str, squares: Callable[[Tensor], Tensor], source: int, gradient: Tensor) -> None:
        """Add one parameter's gradient of one backward pass, unless it overflowed, as under a gradient scaler."""
        if self._ignores():
            return
        with named_in_errors(self.name):
            total = squares(gradient)
            finite = total.isfinite().all()
            _add(self._squares, variable, widest(torch.where(finite, total, 0)))
            self._passes[variable, source] = self._passes.get((variable, source), 0) + finite.long()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for parameter, handle in self._hooked:
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # as it was before anybody's hook
        self._hooked, self._unhooked = [], []

    def found(self) -> EpochSums:
        """All of it but the maps. Where parameters are spread over ranks, all ranks call this together."""
        passes: dict[str, int] = {}
        for (variable, _), number in self._passes.items():
            passes[variable] = max(int(number), passes.get(variable, 0))
        patterns = {
            name: one and replace(one, attention=_array(one.attention), entropy=_array(one.entropy))
            for name, one in self._patterns.items()
        }
        return EpochSums(
            images=self.images,
            nonfinite=0 if self._nonfinite is None else int(self._nonfinite),
            sums={name: (_array(self._sums[name]), number) for name, number in self._counts.items()},
            squares={name: (_array(self._squares[name]), number) for name, number in passes.items()},
            patterns=patterns,
            state=self._state(),
        )

    @torch.no_grad()
    def _state(self) -> dict[str, np.ndarray]:
        """What the layer's parameters are now, as its forwards see them."""
        if self.probe.state is None:
            return {}
        with named_in_errors(self.name), edited(self.module):
            state = checked(self.probe, self.probe.state(self.module), images=False)
            # All of a tensor that may be spread over ranks.
            whole = {n: value.full_tensor() if hasattr(value, "full_tensor") else value for n, value in state.items()}
            return {name: _array(value) for name, value in whole.items()}


def checked(probe: Probe, measured: Mapping[str, _Found], *, images: bool) -> Mapping[str, _Found]:
    """What a probe has measured, if it is what its variables say, and has a row for each image where there are some."""
    if not isinstance(measured, Mapping):
        raise TypeError(f"expected the probe {probe.kind!r} to give {{variable: tensor}}, got {measured!r}")
    rows = -1
    for name, value in measured.items():
        if name not in probe.variables:
            raise ValueError(f"the probe {probe.kind!r} measures {name!r}, which its variables do not describe")
        if images and isinstance(value, Pattern):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"expected the probe {probe.kind!r} to give a tensor for {name!r}, got {value!r}")
        dims = (*["image"] * images, *probe.variables[name].dims[1:])
        if value.ndim != len(dims):
            raise ValueError(
                f"expected the probe {probe.kind!r} to give {name!r} with the dimensions {dims}, got the shape "
                f"{tuple(value.shape)}"
            )
        if images and rows not in (-1, len(value)):
            raise ValueError(f"the probe {probe.kind!r} measures {rows} images, and {len(value)} for {name!r}")
        rows = len(value) if images else rows
    return measured


def _add_patterns(totals: dict[str, Pattern | None], others: Mapping[str, Pattern | None]) -> None:
    for name, other in others.items():
        if name in totals:
            before = totals[name]
            other = None if before is None or other is None else before.plus(other)
        totals[name] = other


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name not in totals:
        totals[name] = value.clone()
    elif totals[name].shape != value.shape:
        raise ValueError(
            f"expected {name!r} of shape {tuple(totals[name].shape)}, as of earlier images, got {tuple(value.shape)}: "
            f"give images of one size"
        )
    else:
        totals[name] += value.to(totals[name])


def _array(value: Tensor) -> np.ndarray:
    return value.detach().double().cpu().numpy()
