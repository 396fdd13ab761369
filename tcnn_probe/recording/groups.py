"""A dataset: the numbers and maps of an epoch, as arrays of the groups of a recording."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tcnn_probe.probes import Probe
from tcnn_probe.recording.collector import Collector
from tcnn_probe.recording.measured import Key
from tcnn_probe.recording.measured_layer import MeasuredLayer
from tcnn_probe.recording.sums import EpochSums
from tcnn_probe.schema import COUNTS, Group, Variable, missing_value

__all__ = [
    "MAPS_OF_CLASSES",
    "Groups",
    "LayerValues",
    "assemble",
    "groups_of",
    "layer_values",
]

Groups = Mapping[str, Group]
MAPS_OF_CLASSES = "maps/classes/"
"""Prefix of the paths of groups with maps of classes."""


@dataclass(frozen=True)
class LayerValues(Group):
    """The values of one layer at a mark, as a group that has this layer only.

    Args:
        place: Path of the group.
        layer: Name of the layer.
        values: Values of the variables that were measured, with their dimensions but "layer".
    """

    place: str = ""
    layer: str = ""
    values: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def has_run(self) -> bool:
        """True unless no image has reached the layer; what is read from parameters needs none."""
        return self.maps or bool(self.values.get("images", True))


def _values(
    place: str,
    layer: str,
    probes: Sequence[Probe],
    variables: Mapping[str, Variable],
    values: Mapping[str, np.ndarray],
    table: Mapping[str, Any],
    coords: Mapping[str, Sequence[Any]],
) -> LayerValues:
    """Return values that several probes have measured of a layer, with the sizes of their axes."""
    sizes: dict[str, int] = {}
    for name, value in values.items():
        for dim, size in zip(variables[name].dims[1:], value.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise ValueError(
                    f"{layer!r} has values of {sizes[dim]} and of {size} along {dim!r}"
                )
    # A layer may have fewer heads than its group. One without values yet has their number in the
    # table only.
    heads = {"heads": sizes["head"]} if "head" in sizes else {}
    table = {"kind": probes[0].kind, **heads, **table}
    if "heads" in table and any("head" in variable.dims for variable in variables.values()):
        sizes.setdefault("head", table["heads"])
    labels = {dim: probe.coords[dim] for probe in probes for dim in probe.coords if dim in sizes}
    return LayerValues(variables, {layer: table}, sizes, {**labels, **coords}, place, layer, values)


def layer_values(collector: Collector, sums: Mapping[Key, EpochSums]) -> list[LayerValues]:
    """Return the values of all layers, in the model's order: first numbers, then maps."""
    return _number_values(collector, sums) + _map_values(collector, sums)


def _number_values(collector: Collector, sums: Mapping[Key, EpochSums]) -> list[LayerValues]:
    """Return the numbers of each layer, without maps."""
    members: dict[tuple[str, str], list[MeasuredLayer]] = {}
    # Several probes of one group can measure the same layer.
    for layer in collector.layers.values():
        members.setdefault((layer.probe.place, layer.name), []).append(layer)
    entries = []
    for (place, name), layers in members.items():
        variables: dict[str, Variable] = {}
        values: dict[str, np.ndarray] = {}
        table: dict[str, Any] = {}
        for layer in layers:
            probe = layer.probe
            total = sums[name, probe.kind]
            table |= layer.facts()
            values |= total.finish(probe.variables)
            variables |= {
                name: variable
                for name, variable in probe.variables.items()
                if name not in probe.image_variables
            }
            if probe.runs:
                variables |= COUNTS
                # A probe may see fewer images than another: tokens of an unknown kind are in no
                # class attention.
                counts = {"images": total.images, "nonfinite_images": total.nonfinite}
                for count, seen in counts.items():
                    values[count] = np.maximum(values.get(count, 0.0), float(seen))
        probes = [layer.probe for layer in layers]
        entries.append(_values(place, name, probes, variables, values, table, {}))
    return entries


def _map_values(collector: Collector, sums: Mapping[Key, EpochSums]) -> list[LayerValues]:
    """Return the maps of chosen images; layers whose maps have the same shape share a group."""
    sampling, entries = collector.sampling, []
    for key, layer in collector.layers.items():
        probe, numbers = layer.probe, sampling.images_of(layer.probe)
        places: dict[str, tuple[dict[str, Variable], dict[str, np.ndarray]]] = {}
        for number, arrays in sums[key].maps.items():
            # Maps of classes have an axis that other maps lack, so they belong to another group.
            of_classes = arrays.keys() & probe.class_variables
            for names in filter(None, (arrays.keys() - of_classes, of_classes)):
                maps = {x: _as_image(probe.variables[x], arrays[x]) for x in sorted(names)}
                place = probe.place if probe.images else _place_of_maps(maps)
                variables, values = places.setdefault(place, ({}, {}))
                for name, (variables[name], array) in maps.items():
                    if name not in values:
                        values[name] = _empty((len(numbers), *array.shape), variables[name])
                    values[name][numbers.index(number)] = array
        for place, (variables, values) in places.items():
            coords: dict[str, Sequence[Any]] = {"image": list(numbers)}
            table = {}
            if place.startswith(MAPS_OF_CLASSES):
                table["classes"] = sampling.classes
                if sampling.class_indices:
                    coords["class"] = sampling.class_indices
            entries.append(_values(place, layer.name, [probe], variables, values, table, coords))
    return entries


def _as_image(variable: Variable, array: np.ndarray) -> tuple[Variable, np.ndarray]:
    """Return a map of one image, without the axis of a single window."""
    dims = tuple(dim for dim in variable.dims if dim != "window")
    # Besides the layer and the image.
    if array.shape[:1] == (1,) and array.ndim > len(dims) - 2:
        return replace(variable, dims=dims), array[0]
    return variable, array


def _place_of_maps(maps: Mapping[str, tuple[Variable, np.ndarray]]) -> str:
    """Return the path of the group for maps of this shape."""
    sizes: dict[str, int] = {}
    for variable, array in maps.values():
        sizes |= zip(variable.dims[2:], array.shape, strict=False)
    # Layers share an array only if their maps have the same numbers of heads and windows and the
    # same grid.
    dims = [dim for dim in ("head", "window", "y", "x") if dim in sizes]
    shape = "x".join(str(sizes[dim]) for dim in dims)
    return MAPS_OF_CLASSES + shape if "class" in sizes else f"maps/{shape}"


def _empty(shape: tuple[int, ...], variable: Variable) -> np.ndarray:
    return np.full(shape, missing_value(variable.dtype), dtype=variable.dtype)


def groups_of(entries: Iterable[LayerValues], stored: Groups | None = None) -> dict[str, Group]:
    """Return the groups that hold these layers.

    Args:
        entries: Values of the layers, in their order.
        stored: Groups of a recording that is continued: layers that it lacks join it, after those
            that are there, once they have run.
    """
    groups = {"": Group({}, {}), **(stored or {})}
    places: dict[str, list[Group]] = {}
    known = {(_kind_of_place(x), layer) for x, group in groups.items() for layer in group.layers}
    for entry in entries:
        joins = entry.has_run and (_kind_of_place(entry.place), entry.layer) not in known
        if stored is None or joins:
            before = [groups[entry.place]] if entry.place in groups else []
            places.setdefault(entry.place, before).append(entry)
    for place, members in places.items():
        group = Group.together(members)
        # Variables without a value in any layer are left out if the sizes of their dimensions are
        # unknown.
        sizes = {"layer", *group.sizes}
        variables = {
            name: variable
            for name, variable in group.variables.items()
            if sizes.issuperset(variable.dims)
        }
        # A probe may have more labels than its layers have values.
        coords = {dim: group.coords[dim][: group.sizes[dim]] for dim in group.coords}
        groups[place] = replace(group, variables=variables, coords=coords)
    return groups


def _kind_of_place(place: str) -> str:
    """Return what groups of maps of any size have in common; other places as they are."""
    return place.rpartition("/")[0] or place


def assemble(
    entries: Iterable[LayerValues], groups: Groups
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, list[str]]]:
    """Lay out the values of an epoch.

    Returns:
        Arrays of every variable of every group, filled with NaN (integers: -1) where a layer has no
        value; and what the groups lack, because the recording began without it: layers, and names
        of variables by layer.
    """
    arrays = {
        place: {name: _empty(group.shape(name), x) for name, x in group.variables.items()}
        for place, group in groups.items()
    }
    dropped: dict[str, list[str]] = {}
    for entry in entries:
        group = groups.get(entry.place, Group({}, {}))
        if entry.layer not in group.layers:
            if entry.has_run:
                place = f" in {entry.place}" if entry.place else ""
                dropped[f"{entry.layer}{place}"] = []
            continue
        row = [*group.layers].index(entry.layer)
        for name, value in sorted(entry.values.items()):
            if name not in group.variables:
                dropped.setdefault(entry.layer, []).append(name)
                continue
            # A layer can have fewer heads or classes than its group: the rest keeps the fill value.
            region: tuple[int | slice, ...] = (row, *map(slice, value.shape))
            arrays[entry.place][name][region] = value
    return arrays, dropped
