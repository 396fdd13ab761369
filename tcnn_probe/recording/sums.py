"""Sums of an epoch, and the numbers that follow from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tcnn_model.precision import widest, widest_dtype
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.probes.anatomy import ANATOMY, finish_information
from tcnn_probe.recording.measured import Key, Measured
from tcnn_probe.schema import Variable

__all__ = ["MIXED_SIZES", "EpochSums", "RunningSums", "Terms"]


class Terms(NamedTuple):
    """Sum of values of a variable, their number, and the largest, -inf if there are none."""

    total: Any
    count: Any
    largest: Any = -np.inf

    def plus(self, other: "Terms") -> "Terms":
        """Return the sum with other values."""
        largest = np.maximum(self.largest, other.largest)
        return Terms(self.total + other.total, self.count + other.count, largest)


# Names and shapes of an image's values of each layer.
_Columns = tuple[tuple[Key, tuple[tuple[str, torch.Size], ...]], ...]

MIXED_SIZES = "images of several sizes came between two marks: mark() after those of each size"
"""Reason why a layer is recorded without content information."""


@dataclass
class EpochSums:
    """Sums of a layer's measurements by a probe, in tensors while they grow, then in arrays.

    Attributes:
        images: Number of images that the layer saw.
        nonfinite: Number of images with a value that is NaN or infinite.
        sums: Sums over the images in which the value is finite.
        squares: Sums of squares over backward passes.
        patterns: Sums of attention over images; None if images have several sizes.
        state: Values that are read from the layer's parameters.
        maps: Maps of chosen images, by number of the image in the epoch and by variable.
    """

    images: int = 0
    nonfinite: int = 0
    sums: dict[str, Terms] = field(default_factory=dict)
    squares: dict[str, Terms] = field(default_factory=dict)
    patterns: dict[str, Pattern | None] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    maps: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, other: "EpochSums") -> None:
        """Add sums of other images, such as those of another rank."""
        self.images += other.images
        self.nonfinite += other.nonfinite
        # All ranks have the same parameters, or have gathered them.
        self.state = self.state or other.state
        self.maps |= other.maps
        for name, terms in other.sums.items():
            self.sums[name] = self.sums.get(name, Terms(0, 0)).plus(terms)
        # Passes of all ranks are counted, because hooks see a rank's gradients before they are
        # averaged.
        for name, terms in other.squares.items():
            self.squares[name] = self.squares.get(name, Terms(0, 0)).plus(terms)
        for name, pattern in other.patterns.items():
            if name not in self.patterns:
                self.patterns[name] = pattern and pattern.copy()
            elif total := self.patterns[name]:
                self.patterns[name] = pattern and total.plus(pattern)

    @classmethod
    def together(cls, parts: Iterable["EpochSums"]) -> "EpochSums":
        """Add up the sums of several ranks."""
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def finish(self, variables: Mapping[str, Variable]) -> dict[str, np.ndarray]:
        """Return the numbers of the epoch, which follow from sums or were read from parameters.

        Variables say how they are summed over images (:attr:`Variable.over_images`). Norms of
        gradients are root mean squares over backward passes. Sums of attention have a function of
        their own (:attr:`Pattern.finish`).
        """
        numbers = dict(self.state)
        for name, (total, count, largest) in self.sums.items():
            over_images = variables[name].over_images
            if over_images == "largest":
                numbers[name] = np.where(np.isneginf(largest), np.nan, largest)
                continue
            mean = total / np.where(count == 0, np.nan, count)
            if over_images == "shares":
                whole = mean.sum(-1, keepdims=True)
                mean = mean / np.where(whole == 0, np.nan, whole)
            numbers[name] = mean
        for name, (total, count, _) in self.squares.items():
            # Without a backward pass the value is NaN, as 0 would look like a measurement.
            numbers[name] = np.sqrt(total / (count or np.nan))
        statistics = self._statistics.items()
        return numbers | {name: value for name, value in statistics if not isinstance(value, str)}

    def reasons(self, variables: Mapping[str, Variable]) -> dict[str, str]:
        """Return the reasons why variables have no value, or may be NaN."""
        mixed = [name for name, pattern in self.patterns.items() if pattern is None]
        if "content_information" in mixed:
            mixed += [name for name in ANATOMY if name in variables]
        reasons = dict.fromkeys(mixed, MIXED_SIZES)
        for name, value in self._statistics.items():
            if isinstance(value, str):
                reasons[name] = value
        for name, value in self.state.items():
            if variables[name].nan_reason and np.isnan(value).any():
                reasons[name] = variables[name].nan_reason
        return reasons

    @cached_property
    def _statistics(self) -> dict[str, np.ndarray | str]:
        """Statistics of the patterns by variable, or the reasons why there are none."""
        statistics: dict[str, np.ndarray | str] = {}
        for name, pattern in self.patterns.items():
            if pattern is not None:
                finish = pattern.finish or finish_information
                statistics |= finish(name, pattern)
        return statistics


class RunningSums:
    """Sums over images, in float64 (float32 on devices without float64), and maps of chosen images.

    The numbers of all layers in a forward are concatenated, because each call of torch takes as
    long as all their sums.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[Key, str], torch.Size] = {}
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        # Sums and numbers of finite values (2, n), maxima (n,), and numbers of images that are not
        # finite, by layer.
        self._totals: dict[_Columns, tuple[Tensor, Tensor, Tensor]] = {}
        # Numbers of images, sums of attention, and maps.
        self._sums: dict[Key, EpochSums] = {}

    def images(self, key: Key) -> int:
        """Return the number of images that a layer has seen."""
        return self._sums[key].images if key in self._sums else 0

    def add(self, forward: Sequence[Measured]) -> None:
        """Add the measurements of a forward.

        Raises:
            ValueError: A variable has another shape than before, in this epoch or an earlier one.
        """
        together: dict[Any, list[Measured]] = {}
        for measured in forward:
            for value in measured.values.values():
                if len(value):  # layers may see different numbers of images
                    place = len(value), value.device
                    together.setdefault(place, []).append(measured)
                break
        for layers in together.values():
            self._add_numbers(layers)
        for measured in forward:
            sums = EpochSums(measured.images, patterns={**measured.patterns})
            total = self._sums.setdefault(measured.key, EpochSums())
            total.add(sums)
            for name, values in measured.maps.items():
                dtype = getattr(torch, measured.probe.variables[name].dtype)
                # MPS has no float64.
                dtype = widest_dtype(values.device) if dtype == torch.float64 else dtype
                for row, value in zip(measured.rows, values, strict=True):
                    # A copy, as a view would keep the whole batch in memory.
                    kept = value.to(dtype, copy=True)
                    total.maps.setdefault(measured.before + row, {})[name] = kept

    def _add_numbers(self, layers: Sequence[Measured]) -> None:
        columns = tuple(
            (layer.key, tuple((name, value.shape[1:]) for name, value in layer.values.items()))
            for layer in layers
        )
        rows = [_as_rows(x) for layer in layers for x in layer.values.values()]
        together = widest(torch.cat(rows, 1))
        finite = together.isfinite()
        # A value that is not finite is left out of its mean, and its image is counted.
        added = torch.stack([together.where(finite, 0).sum(0), finite.sum(0)])
        largest = together.where(finite, -torch.inf).amax(0)
        bad = finite.logical_not_().split([_size(shapes) for _, shapes in columns], 1)
        nonfinite = torch.stack([of_layer.any(1) for of_layer in bad]).sum(1)
        if columns in self._totals:
            totals, earlier_largest, earlier_nonfinite = self._totals[columns]
            totals += added
            earlier_nonfinite += nonfinite
            torch.maximum(earlier_largest, largest, out=earlier_largest)
        else:
            self._check_shapes(columns)
            self._totals[columns] = added, largest, nonfinite

    def _check_shapes(self, columns: _Columns) -> None:
        for key, shapes in columns:
            for name, shape in shapes:
                earlier = self._shapes.setdefault((key, name), shape)
                if earlier != shape:
                    raise ValueError(
                        f"expected {name!r} of shape {tuple(earlier)}, as of earlier images, got "
                        f"{tuple(shape)}: give images of one size, and record a model anew, under "
                        "another path, if you remove heads"
                    )

    def read(self) -> dict[Key, EpochSums]:
        """Return the sums of each layer, in arrays."""
        layers = {}
        for key, total in self._sums.items():
            patterns = {
                name: pattern and pattern.arrays() for name, pattern in total.patterns.items()
            }
            maps = {
                image: {name: value.cpu().numpy() for name, value in values.items()}
                for image, values in total.maps.items()
            }
            layers[key] = EpochSums(total.images, patterns=patterns, maps=maps)
        for columns, totals in self._totals.items():
            (sums, counts), largest, nonfinite = (
                values.double().cpu().numpy() for values in totals
            )
            end = 0
            for (key, shapes), count in zip(columns, nonfinite, strict=True):
                layer = EpochSums(nonfinite=int(count))
                for name, shape in shapes:
                    own = slice(end, end := end + shape.numel())
                    terms = (values[own].reshape(shape) for values in (sums, counts, largest))
                    layer.sums[name] = Terms(*terms)
                layers[key].add(layer)
        return layers


def _size(shapes: Iterable[tuple[str, torch.Size]]) -> int:
    return sum(shape.numel() for _, shape in shapes)


def _as_rows(value: Tensor) -> Tensor:
    """Return (B, *dims) as (B, n), in a dtype in which it can be concatenated with others."""
    value = value if value.is_floating_point() else widest(value)
    return value.reshape(len(value), -1)
