"""Sums over the forwards since the previous mark,
on the devices of the layers, and maps of chosen images.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tcnn_model.precision import widest, widest_dtype
from tcnn_probe.probes import Probe
from tcnn_probe.recording.measured import Measured
from tcnn_probe.recording.sums import EpochSums, Key

__all__ = ["RunningSums"]

# Names and shapes of an image's values of each layer.
_Columns = tuple[tuple[Key, tuple[tuple[str, torch.Size], ...]], ...]


class RunningSums:
    """Sums over images, in float64 (float32 on devices without float64), and maps of chosen images.

    The numbers of all layers in a forward are concatenated, because each call of torch takes as
    long as all their sums.

    Attributes:
        maps: Maps by layer and probe, number of the image in the epoch, and variable.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[Key, str], torch.Size] = {}
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        # Sums and numbers of finite values (2, n), maxima (n,), and numbers of images that are not
        # finite, by layer.
        self._totals: dict[_Columns, tuple[Tensor, Tensor, Tensor]] = {}
        # Numbers of images, and sums of attention.
        self._sums: dict[Key, EpochSums] = {}
        self.maps: dict[Key, dict[int, dict[str, Tensor]]] = {}

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
            self._sums.setdefault(measured.key, EpochSums()).add(sums)

    def add_maps(
        self, key: Key, probe: Probe, images: Iterable[int], maps: Mapping[str, Tensor]
    ) -> None:
        """Keep copies of maps, (images, *dims), by number of the image,
        in the dtype in which they are stored.
        """
        by_image = self.maps.setdefault(key, {})
        for name, values in maps.items():
            dtype = getattr(torch, probe.variables[name].dtype)
            # MPS has no float64.
            dtype = widest_dtype(values.device) if dtype == torch.float64 else dtype
            for image, value in zip(images, values, strict=True):
                # Without copy=True, to() would return the model's own tensor if the dtype is the
                # same.
                by_image.setdefault(image, {})[name] = value.to(dtype, copy=True)

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
                        f"{tuple(shape)}: give images of one size"
                    )

    def read(self) -> dict[Key, EpochSums]:
        """Return the sums of each layer, in arrays."""
        layers = {}
        for key, total in self._sums.items():
            patterns = {
                name: pattern and pattern.arrays() for name, pattern in total.patterns.items()
            }
            layers[key] = EpochSums(total.images, patterns=patterns)
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
                layers[key].add(layer)
        return layers


def _size(shapes: Iterable[tuple[str, torch.Size]]) -> int:
    return sum(shape.numel() for _, shape in shapes)


def _as_rows(value: Tensor) -> Tensor:
    """Return (B, *dims) as (B, n), in a dtype
    that holds all values when it is concatenated with others.
    """
    value = value if value.is_floating_point() else widest(value)
    return value.reshape(len(value), -1)
