"""From what was found of each layer to the groups of a recording and their values."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tcnn_probe.probes import Probe
from tcnn_probe.recording.accumulator import Accumulator, EpochSums
from tcnn_probe.recording.options import Sampling
from tcnn_probe.schema import COUNTS, Group, Variable

__all__ = [
    "MAPS_OF_CLASSES",
    "LayerValues",
    "assemble",
    "groups_of",
    "layer_values",
    "map_values",
    "nonfinite",
    "without_strangers",
]

MAPS_OF_CLASSES = "maps/classes/"
"""Where the groups of these are."""


@dataclass
class LayerValues:
    """What is to be stored of one layer in one group."""

    place: str  # path of the group
    layer: str
    maps: bool  # whether it is maps
    table: dict[str, Any] = field(default_factory=dict)  # what the layer table says of it
    variables: dict[str, Variable] = field(default_factory=dict)  # that its probes have in this group
    values: dict[str, np.ndarray] = field(default_factory=dict)  # where there are some, (*dims) without "layer"
    coords: dict[str, Sequence[Any]] = field(default_factory=dict)  # labels along dimensions

    def add(self, probe: Probe, variables: Mapping[str, Variable], values: Mapping[str, np.ndarray]) -> None:
        """Add what one probe found."""
        self.table.setdefault("kind", probe.kind)
        self.variables |= variables
        self.values |= values
        sizes = self.sizes()
        self.coords |= {dim: labels for dim, labels in probe.coords.items() if dim in sizes}
        self.table |= {"heads": sizes["head"]} if "head" in sizes else {}

    def sizes(self) -> dict[str, int]:
        """Lengths of the dimensions that the values show."""
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


def layer_values(sums: Iterable[Accumulator], found: Mapping[tuple[str, str], EpochSums]) -> list[LayerValues]:
    """The numbers of each layer, without maps."""
    layers: dict[tuple[str, str], LayerValues] = {}
    for each in sums:
        probe, one = each.probe, found[each.name, each.probe.kind]
        key = probe.place, each.name
        entry = layers.setdefault(key, LayerValues(*key, maps=False))
        values = one.state | one.means()
        variables = {name: about for name, about in probe.variables.items() if name not in probe.of_images}
        if probe.runs:
            variables |= COUNTS
            values |= {"images": np.array(float(one.images)), "nonfinite_images": np.array(float(one.nonfinite))}
        entry.add(probe, variables, values)
        if probe.facts is not None:
            entry.table |= dict(probe.facts(each.module))
    return list(layers.values())


def map_values(sums: Iterable[Accumulator], sampling: Sampling) -> list[LayerValues]:
    """The maps of chosen images, and numbers beside them; layers whose maps have one shape share a group."""
    classes = sampling.classes
    layers: dict[tuple[str, str], LayerValues] = {}
    for each in sums:
        images = sampling.images if each.probe.images is None else each.probe.images
        for image, maps in each.maps.items():
            found = {name: _of_image(each.probe.variables[name], value.cpu().numpy()) for name, value in maps.items()}
            for names in (maps.keys() - each.probe.of_classes, maps.keys() & each.probe.of_classes):
                place = each.probe.place if each.probe.images else _place_of_maps([found[name] for name in names])
                key = place, each.name
                for name in sorted(names):
                    about, array = found[name]
                    entry = layers.setdefault(key, LayerValues(*key, maps=True))
                    if name not in entry.values:
                        entry.add(each.probe, {name: about}, {name: _empty((len(images), *array.shape), about)})
                        entry.coords["image"] = list(images)
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
        table: dict[str, dict[str, Any]] = {}
        for entry in entries:
            table[entry.layer] = table.get(entry.layer, {}) | entry.table  # of its numbers, and of its maps
            variables |= entry.variables
            coords |= entry.coords
            for dim, size in entry.sizes().items():
                sizes[dim] = max(size, sizes.get(dim, 0))
        variables = {name: about for name, about in variables.items() if {*about.dims} <= {"layer", *sizes}}
        coords = {dim: labels[: sizes[dim]] for dim, labels in coords.items()}
        groups[place] = Group(variables, table, sizes, any(entry.maps for entry in entries), coords)
    return groups


def without_strangers(layers: list[LayerValues], groups: Mapping[str, Group]) -> list[str]:
    """Leave out the layers and variables that a recording began without, in place; and say so, in words."""
    told = []
    known = [entry for entry in layers if entry.place in groups and entry.layer in groups[entry.place].layers]
    if strange := [f"{e.layer} in {e.place}" if e.place else e.layer for e in layers if e not in known]:
        told.append(f"not recorded, because the recording began without them: {strange[:3]} (of {len(strange)})")
    for entry in known:
        if names := sorted(entry.values.keys() - groups[entry.place].variables.keys()):
            told.append(f"not recorded, because the recording began without them: {names} of {entry.layer!r}")
        for name in names:
            del entry.values[name]
    layers[:] = known
    return told


def nonfinite(entries: Iterable[LayerValues]) -> list[str]:
    """Layers with values that are not finite, in words."""
    numbers = [entry for entry in entries if not entry.maps]
    broken = [entry for entry in numbers if not all(np.isfinite(value).all() for value in entry.values.values())]
    bad = {entry.layer: int(entry.values.get("nonfinite_images", 0)) for entry in broken}
    if not bad:
        return []
    return [
        f"NaN or infinite values were recorded for these layers; the number of images that gave them (0: they are in "
        f"the layer's parameters or gradients): {bad}"
    ]


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
