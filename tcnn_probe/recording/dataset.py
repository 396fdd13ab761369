"""From what was found of each layer to the groups of a recording and their values."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tcnn_probe.probes import Probe
from tcnn_probe.recording.accumulator import Found, Tally
from tcnn_probe.recording.classes import Classes
from tcnn_probe.schema import COUNTS, Group, Variable

__all__ = ["MAPS_OF_CLASSES", "LayerValues", "assemble", "groups_of", "layer_values", "map_values"]

MAPS_OF_CLASSES = "maps/classes/"
"""Where the groups of these are."""


class LayerValues:
    """What is to be stored of one layer in one group.

    Args:
        place: path of the group.
        layer: name.
        table: the layer's entry in the layer table.
        variables: those that the layer's probes have in this group.
        values: of those that have one, shape (*dims) without "layer".
        coords: labels along dimensions.
    """

    def __init__(self, place: str, layer: str) -> None:
        self.place, self.layer = place, layer
        self.table: dict[str, Any] = {}
        self.variables: dict[str, Variable] = {}
        self.values: dict[str, np.ndarray] = {}
        self.coords: dict[str, Sequence[Any]] = {}
        self.maps = False

    def add(self, probe: Probe, variables: Mapping[str, Variable], values: Mapping[str, np.ndarray]) -> None:
        """What one probe found."""
        self.table.setdefault("kind", probe.kind)
        self.variables |= variables
        self.values |= values
        self.coords |= {dim: labels for dim, labels in probe.coords.items() if dim in self.sizes()}
        heads = self.sizes().get("head")
        self.table |= {} if heads is None else {"heads": heads}

    def sizes(self) -> dict[str, int]:
        """Of the dimensions that the values show."""
        sizes: dict[str, int] = {}
        for name, value in self.values.items():
            dims = self.variables[name].dims[1:]
            if len(dims) != value.ndim:
                raise ValueError(
                    f"expected {name!r} of {self.layer!r} to have the dimensions {dims}, got the shape {value.shape}"
                )
            for dim, size in zip(dims, value.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(f"{self.layer!r} has values of {sizes[dim]} and of {size} along {dim!r}")
        if "heads" in self.table and any("head" in about.dims for about in self.variables.values()):
            sizes.setdefault("head", self.table["heads"])  # of a layer that has no value yet
        return sizes


def layer_values(tallies: Iterable[Tally], found: Mapping[tuple[str, str], Found]) -> list[LayerValues]:
    """The numbers, without maps."""
    layers: dict[tuple[str, str], LayerValues] = {}
    for tally in tallies:
        probe, one = tally.probe, found[tally.name, tally.probe.kind]
        entry = layers.setdefault((probe.place, tally.name), LayerValues(probe.place, tally.name))
        values = one.state | one.means()
        variables = {name: about for name, about in probe.variables.items() if name not in probe.of_images}
        if probe.runs:
            variables |= COUNTS
            values |= {"images": np.array(float(one.images)), "nonfinite_images": np.array(float(one.nonfinite))}
        entry.add(probe, variables, values)
        if probe.facts is not None:
            entry.table |= dict(probe.facts(tally.module))
    return list(layers.values())


def map_values(tallies: Iterable[Tally], images: Sequence[int], classes: Classes) -> list[LayerValues]:
    """The maps of chosen images, and numbers beside them; layers whose maps have one shape share a group."""
    layers: dict[tuple[str, str], LayerValues] = {}
    for tally in tallies:
        for image, maps in tally.maps.items():
            found = {name: _of_image(tally.probe.variables[name], value.cpu().numpy()) for name, value in maps.items()}
            for names in (maps.keys() - tally.probe.of_classes, maps.keys() & tally.probe.of_classes):
                place = _place_of_maps([found[name] for name in names])
                for name in sorted(names):
                    about, array = found[name]
                    entry = layers.setdefault((place, tally.name), LayerValues(place, tally.name))
                    if name not in entry.values:
                        entry.add(tally.probe, {name: about}, {name: _empty((len(images), *array.shape), about)})
                        entry.coords["image"], entry.maps = list(images), True
                    if "class" in about.dims:
                        entry.table["classes"] = classes.plain
                        entry.coords |= {"class": classes.chosen} if classes.chosen else {}
                    entry.values[name][images.index(image)] = array
    return list(layers.values())


def _of_image(about: Variable, array: np.ndarray) -> tuple[Variable, np.ndarray]:
    """What a probe has of one image, without the axis of a single window."""
    dims = about.dims
    if "window" in dims[2:3] and len(array) == 1:
        dims, array = (*dims[:2], *dims[3:]), array[0]
    elif "window" not in dims and array.ndim == len(dims) - 1 and len(array) == 1:
        array = array[0]
    return replace(about, dims=dims), array


def _place_of_maps(found: Iterable[tuple[Variable, np.ndarray]]) -> str:
    """Path of the group for maps of this shape."""
    sizes: dict[str, int] = {}
    for about, array in found:
        sizes |= zip(about.dims[2:], array.shape, strict=False)
    shape = "x".join(str(sizes[dim]) for dim in ("head", "window", "y", "x") if dim in sizes)
    return MAPS_OF_CLASSES + shape if "class" in sizes else f"maps/{shape}"


def _empty(shape: tuple[int, ...], about: Variable) -> np.ndarray:
    return np.full(shape, np.nan if np.dtype(about.dtype).kind == "f" else -1, dtype=about.dtype)


def groups_of(layers: Iterable[LayerValues], order: Mapping[str, int]) -> dict[str, Group]:
    """The groups that hold these layers, in the model's order."""
    groups = {"": Group({}, {})}
    places: dict[str, list[LayerValues]] = {}
    for entry in sorted(layers, key=lambda entry: (order[entry.layer], entry.layer)):
        places.setdefault(entry.place, []).append(entry)
    for place, entries in places.items():
        sizes: dict[str, int] = {}
        coords: dict[str, Sequence[Any]] = {}
        variables: dict[str, Variable] = {}
        for entry in entries:
            variables |= entry.variables
            coords |= entry.coords
            for dim, size in entry.sizes().items():
                sizes[dim] = max(size, sizes.get(dim, 0))
        variables = {name: about for name, about in variables.items() if {*about.dims} <= {"layer", *sizes}}
        coords = {dim: labels[: sizes[dim]] for dim, labels in coords.items()}
        table = {entry.layer: entry.table for entry in entries}
        groups[place] = Group(variables, table, sizes, any(entry.maps for entry in entries), coords)
    return groups


def assemble(layers: Collection[LayerValues], groups: Mapping[str, Group]) -> dict[str, dict[str, np.ndarray]]:
    """Values of every variable of every group; NaN, or -1 of integers, where a layer has none."""
    arrays = {
        place: {name: _empty(group.shape(name), about) for name, about in group.variables.items()}
        for place, group in groups.items()
    }
    rows = {place: {layer: row for row, layer in enumerate(group.layers)} for place, group in groups.items()}
    for entry in layers:
        for name, value in entry.values.items():
            at: Any = rows[entry.place][entry.layer], *(slice(0, size) for size in value.shape)
            arrays[entry.place][name][at] = value
    return arrays
