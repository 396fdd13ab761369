"""Sums over images of the numbers of all layers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tcnn_model.precision import widest
from tcnn_probe.recording.sums import EpochSums

__all__ = ["ImageSums", "Key"]

Key = tuple[str, str]  # layer and kind of probe
# Names and shapes of an image's values of each layer.
_Columns = tuple[tuple[Key, tuple[tuple[str, torch.Size], ...]], ...]


class ImageSums:
    """Sums over images of the numbers of all layers, in float64 (float32 on devices without float64).

    The numbers of a forward are concatenated, because each call of torch takes as long as all their sums.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[Key, str], torch.Size] = {}
        # Sums and numbers of finite values (2, n), maxima (n,), and numbers of images that are not finite, by layer.
        self._totals: dict[_Columns, tuple[Tensor, Tensor, Tensor]] = {}

    def reset(self) -> None:
        """Start the next epoch."""
        self._totals.clear()

    def add(self, measured: Iterable[tuple[Key, Mapping[str, Tensor]]]) -> None:
        """Add the measurements of a forward, by layer: values of shape (B, *dims) by variable.

        Raises:
            ValueError: A variable has another shape than before, in this epoch or an earlier one.
        """
        groups: dict[Any, list[tuple[Key, Mapping[str, Tensor]]]] = {}
        for key, values in measured:
            for value in values.values():
                if len(value):  # layers may see different numbers of images
                    groups.setdefault((len(value), value.device), []).append(
                        (key, values)
                    )
                break
        for layers in groups.values():
            self._add_together(layers)

    def _add_together(self, layers: list[tuple[Key, Mapping[str, Tensor]]]) -> None:
        columns = tuple(
            (key, tuple((name, value.shape[1:]) for name, value in values.items()))
            for key, values in layers
        )
        rows = [_as_rows(value) for _, values in layers for value in values.values()]
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
                        f"expected {name!r} of shape {tuple(earlier)}, as of earlier images, got {tuple(shape)}: give "
                        f"images of one size"
                    )

    def read(self) -> dict[Key, EpochSums]:
        """Return the sums of each layer."""
        layers: dict[Key, EpochSums] = {}
        for columns, totals in self._totals.items():
            (sums, counts), largest, nonfinite = (
                values.double().cpu().numpy() for values in totals
            )
            end = 0
            for (key, shapes), count in zip(columns, nonfinite, strict=True):
                layer = EpochSums(nonfinite=int(count))
                for name, shape in shapes:
                    own = slice(end, end := end + shape.numel())
                    terms = sums[own].reshape(shape), counts[own].reshape(shape)
                    layer.sums[name] = terms
                    layer.largest[name] = largest[own].reshape(shape)
                layers.setdefault(key, EpochSums()).add(layer)
        return layers


def _size(shapes: Iterable[tuple[str, torch.Size]]) -> int:
    return sum(shape.numel() for _, shape in shapes)


def _as_rows(value: Tensor) -> Tensor:
    """Return (B, *dims) as (B, n), in a dtype that holds all values when it is concatenated with others."""
    value = value if value.is_floating_point() else widest(value)
    return value.reshape(len(value), -1)
