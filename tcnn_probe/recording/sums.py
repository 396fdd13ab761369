"""Sums of an epoch: what a layer's measurements add up to between two marks,
and how numbers follow from them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.probes.anatomy import ANATOMY, finish_information
from tcnn_probe.schema import Variable

__all__ = ["MIXED_SIZES", "EpochSums", "Key", "Sums"]

Key = tuple[str, str]  # layer and kind of probe
Sums = dict[str, tuple[Any, Any]]
"""Sums by variable, each with the number of terms of each value."""

MIXED_SIZES = "images of several sizes came between two marks: mark() after those of each size"
"""Reason why a layer is recorded without content information."""


@dataclass
class EpochSums:
    """Sums of a layer's measurements by a probe,
    in arrays that ranks can exchange, or in tensors while they grow.

    Attributes:
        images: Number of images that the layer saw.
        nonfinite: Number of images with a value that is NaN or infinite.
        sums: Sums over the images in which the value is finite, each with their number.
        largest: Maxima over these images; minus infinity if there are none.
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

    def add(self, other: "EpochSums") -> None:
        """Add sums of other images, such as those of another rank."""
        self.images += other.images
        self.nonfinite += other.nonfinite
        # All ranks have the same parameters, or have gathered them.
        self.state = self.state or other.state
        _add_terms(self.sums, other.sums)
        # Passes of all ranks are counted, because hooks see a rank's gradients before they are
        # averaged.
        _add_terms(self.squares, other.squares)
        for name, value in other.largest.items():
            self.largest[name] = np.maximum(self.largest.get(name, value), value)
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
        """Return the numbers of the epoch: those read from parameters,
        and those that follow from sums.

        Variables say how they are summed over images (:attr:`Variable.over_images`). Norms of
        gradients are root mean squares over backward passes. Sums of attention have a function of
        their own (:attr:`Pattern.finish`).
        """
        numbers = dict(self.state)
        for name, (total, count) in self.sums.items():
            over_images = variables[name].over_images
            if over_images == "largest":
                value = self.largest[name]
                numbers[name] = np.where(np.isneginf(value), np.nan, value)
                continue
            mean = total / np.where(count == 0, np.nan, count)
            if over_images == "shares":
                whole = mean.sum(-1, keepdims=True)
                mean = mean / np.where(whole == 0, np.nan, whole)
            numbers[name] = mean
        for name, (total, count) in self.squares.items():
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


def _add_terms(totals: Sums, sums: Sums) -> None:
    for name, (value, number) in sums.items():
        total, count = totals.get(name, (0, 0))
        totals[name] = total + value, count + number
