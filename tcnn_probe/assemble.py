"""From what was found of each layer to the groups of a recording and their values."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tcnn_probe.probes import Probe
from tcnn_probe.schema import COUNTS, Group, Variable
from tcnn_probe.tally import Found, Tally

__all__ = ["LayerValues", "assemble", "groups_of", "layer_values", "map_values"]


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


def map_values(tallies: Iterable[Tally], images: Sequence[int]) -> list[LayerValues]:
    """The maps of chosen images; layers whose maps have one shape share a group."""
    layers: dict[tuple[str, str], LayerValues] = {}
    for tally in tallies:
        for image, maps in tally.maps.items():
            for name, value in maps.items():
                array = value.cpu().numpy()
                windows, heads, height, width = array.shape
                one_window = windows == 1
                place = "maps/" + "x".join(map(str, [heads, *([] if one_window else [windows]), height, width]))
                entry = layers.setdefault((place, tally.name), LayerValues(place, tally.name))
                about = tally.probe.variables[name]
                dims = tuple(dim for dim in about.dims if not (one_window and dim == "window"))
                about = Variable(dims, about.units, about.long_name, about.description, about.dtype)
                if name not in entry.values:
                    shape = (len(images), *(array[0] if one_window else array).shape)
                    empty = np.full(shape, np.nan, dtype=about.dtype)
                    entry.add(tally.probe, {name: about}, {name: empty})
                    entry.coords["image"], entry.maps = list(images), True
                entry.values[name][images.index(image)] = array[0] if one_window else array
    return list(layers.values())


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
    """Values of every variable of every group; NaN where a layer has none."""
    arrays = {
        place: {name: np.full(group.shape(name), np.nan, dtype=group.variables[name].dtype) for name in group.variables}
        for place, group in groups.items()
    }
    rows = {place: {layer: row for row, layer in enumerate(group.layers)} for place, group in groups.items()}
    for entry in layers:
        for name, value in entry.values.items():
            at: Any = rows[entry.place][entry.layer], *(slice(0, size) for size in value.shape)
            arrays[entry.place][name][at] = value
    return arrays
