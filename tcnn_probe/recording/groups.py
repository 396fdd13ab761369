"""Conversion of an epoch's report to the groups of a recording and the values of their arrays."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from tcnn_probe.probes import Probe
from tcnn_probe.recording.epoch import MAPS_OF_CLASSES, EpochReport, LayerReport
from tcnn_probe.schema import COUNTS, Group, Variable

__all__ = [
    "LayerValues",
    "assemble",
    "drop_unknown_layers",
    "groups_of",
    "map_values",
    "number_values",
    "variables_without_run",
    "warn_of_dropped",
    "warn_of_nonfinite",
    "with_joined",
]

Image = tuple[Variable, np.ndarray]


@dataclass
class LayerValues:
    """Values of a layer in one group.

    Args:
        place: Path of the group.
        layer: Name of the layer.
        maps: Whether the values are maps.
        table: Entries of the layer table.
        variables: Variables that the layer's probes have in this group.
        values: Values of the variables that were measured, with their dimensions but "layer".
        coords: Labels along dimensions.
    """

    place: str
    layer: str
    maps: bool
    table: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    coords: dict[str, Sequence[Any]] = field(default_factory=dict)

    def add(
        self,
        probe: Probe,
        variables: Mapping[str, Variable],
        values: Mapping[str, np.ndarray],
    ) -> None:
        """Add measurements of a probe."""
        self.table.setdefault("kind", probe.kind)
        self.variables |= variables
        self.values |= values
        sizes = self.sizes()
        self.coords |= {
            dim: labels for dim, labels in probe.coords.items() if dim in sizes
        }
        if "head" in sizes:  # a layer may have fewer heads than its group
            self.table["heads"] = sizes["head"]

    @property
    def has_run(self) -> bool:
        """True unless no image has reached the layer; what is read from parameters needs none."""
        return self.maps or bool(self.values.get("images", True))

    def sizes(self) -> dict[str, int]:
        """Return the sizes of dimensions, as far as the values determine them."""
        sizes: dict[str, int] = {}
        for name, value in self.values.items():
            dims = self.variables[name].dims[1:]
            if len(dims) != value.ndim:
                raise ValueError(
                    f"expected {name!r} of {self.layer!r} to have the dimensions {dims}, got the shape {value.shape}"
                )
            for dim, size in zip(dims, value.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"{self.layer!r} has values of {sizes[dim]} and of {size} along {dim!r}"
                    )
        if "heads" in self.table and any(
            "head" in variable.dims for variable in self.variables.values()
        ):
            # A layer without values yet has its number of heads in the table only.
            sizes.setdefault("head", self.table["heads"])
        return sizes


def number_values(layers: Iterable[LayerReport]) -> list[LayerValues]:
    """Return the numbers of each layer, without maps."""
    entries: dict[tuple[str, str], LayerValues] = {}
    for layer in layers:
        probe, sums = layer.probe, layer.sums
        key = probe.place, layer.name
        # Several probes of one group can measure the same layer; they share its entry.
        entry = entries.setdefault(key, LayerValues(*key, maps=False))
        values = sums.finish(probe.variables)
        variables = {
            name: probe.variables[name]
            for name in probe.variables
            if name not in probe.image_variables
        }
        if probe.runs:
            variables |= COUNTS
            values |= {
                "images": np.array(float(sums.images)),
                "nonfinite_images": np.array(float(sums.nonfinite)),
            }
        entry.add(probe, variables, values)
        entry.table |= layer.facts
    return list(entries.values())


def map_values(report: EpochReport) -> list[LayerValues]:
    """Return the maps of chosen images and their numbers; layers whose maps have the same shape share a group."""
    entries: dict[tuple[str, str], LayerValues] = {}
    for layer in report.layers:
        probe = layer.probe
        for number, maps in layer.maps.items():
            images = {
                name: _as_image(probe.variables[name], value)
                for name, value in maps.items()
            }
            # Maps of classes have an axis that other maps lack, so they belong to another group.
            for names in (
                maps.keys() - probe.class_variables,
                maps.keys() & probe.class_variables,
            ):
                place = (
                    probe.place
                    if probe.images
                    else _place_of_maps([images[name] for name in names])
                )
                entry = entries.setdefault(
                    (place, layer.name), LayerValues(place, layer.name, maps=True)
                )
                for name in sorted(names):
                    _add_image(entry, layer, name, number, images[name], report)
    return [entry for entry in entries.values() if entry.values]


def _add_image(
    entry: LayerValues,
    layer: LayerReport,
    name: str,
    number: int,
    image: Image,
    report: EpochReport,
) -> None:
    variable, array = image
    numbers = (
        report.sampling.images if layer.probe.images is None else layer.probe.images
    )
    if name not in entry.values:
        entry.add(
            layer.probe,
            {name: variable},
            {name: _empty((len(numbers), *array.shape), variable)},
        )
        entry.coords["image"] = list(numbers)
    if "class" in variable.dims:
        classes = report.sampling.classes
        entry.table["classes"] = classes.plain
        if classes.indices:
            entry.coords["class"] = classes.indices
    entry.values[name][numbers.index(number)] = array


def _as_image(variable: Variable, value: Tensor) -> Image:
    """Return a map of one image, without the axis of a single window."""
    dims, array = variable.dims, value.cpu().numpy()
    # The axis is dropped if the whole image is a single window.
    if "window" in dims[2:3] and len(array) == 1:
        return replace(variable, dims=(*dims[:2], *dims[3:])), array[0]
    if "window" not in dims and array.ndim == len(dims) - 1 and len(array) == 1:
        return variable, array[0]
    return variable, array


def _place_of_maps(images: Iterable[Image]) -> str:
    """Return the path of the group for maps of this shape."""
    sizes: dict[str, int] = {}
    for variable, array in images:
        sizes |= zip(variable.dims[2:], array.shape, strict=False)
    # Layers share an array only if their maps have the same numbers of heads and windows and the same grid.
    shape = "x".join(
        str(sizes[dim]) for dim in ("head", "window", "y", "x") if dim in sizes
    )
    return MAPS_OF_CLASSES + shape if "class" in sizes else f"maps/{shape}"


def _empty(shape: tuple[int, ...], variable: Variable) -> np.ndarray:
    # Integers have no NaN, and 0 is the index of a class.
    fill = np.nan if np.dtype(variable.dtype).kind == "f" else -1
    return np.full(shape, fill, dtype=variable.dtype)


def groups_of(
    entries: Iterable[LayerValues], order: Mapping[str, int]
) -> dict[str, Group]:
    """Return the groups that hold these layers, in the model's order."""
    groups = {"": Group({}, {})}
    places: dict[str, list[LayerValues]] = {}
    # Several attentions of a module have the same position, and are sorted by name.
    for entry in sorted(entries, key=lambda entry: (order[entry.layer], entry.layer)):
        places.setdefault(entry.place, []).append(entry)
    for place, members in places.items():
        sizes: dict[str, int] = {}
        coords: dict[str, Sequence[Any]] = {}
        variables: dict[str, Variable] = {}
        table: dict[str, dict[str, Any]] = {}
        for entry in members:
            # A group can have one entry of the layer's numbers and another of its maps.
            table[entry.layer] = table.get(entry.layer, {}) | entry.table
            variables |= entry.variables
            coords |= entry.coords
            for dim, size in entry.sizes().items():
                sizes[dim] = max(size, sizes.get(dim, 0))
        # Variables without a value in any layer are left out, because the sizes of their dimensions are unknown.
        variables = {
            name: variable
            for name, variable in variables.items()
            if {*variable.dims} <= {"layer", *sizes}
        }
        # A probe may have more labels than its layers have values.
        coords = {dim: labels[: sizes[dim]] for dim, labels in coords.items()}
        groups[place] = Group(
            variables, table, sizes, any(entry.maps for entry in members), coords
        )
    return groups


def with_joined(
    groups: Mapping[str, Group],
    entries: Iterable[LayerValues],
    order: Mapping[str, int],
) -> dict[str, Group]:
    """Return the groups of a recording with the layers that have run for the first time, after those that are there."""
    known = {
        (_kind_of_place(place), layer)
        for place, group in groups.items()
        for layer in group.layers
    }
    joining = [
        entry
        for entry in entries
        if entry.has_run and (_kind_of_place(entry.place), entry.layer) not in known
    ]
    extended = dict(groups)
    for place, group in groups_of(joining, order).items():
        stored = groups.get(place)
        if stored is None:
            extended[place] = group
        elif group.layers:
            sizes = {**group.sizes, **stored.sizes}
            sizes = {
                dim: max(size, group.sizes.get(dim, 0)) for dim, size in sizes.items()
            }
            extended[place] = Group(
                {**stored.variables, **group.variables},
                {**stored.layers, **group.layers},
                {dim: sizes[dim] for dim in (*stored.sizes, *group.sizes)},
                stored.maps,
                # The labels of the layer with more of them begin with those of the others.
                {
                    dim: max(
                        stored.coords.get(dim, ()), group.coords.get(dim, ()), key=len
                    )
                    for dim in {**stored.coords, **group.coords}
                },
            )
    return extended


def _kind_of_place(place: str) -> str:
    """Return what groups of maps of different sizes have in common, "maps" or "maps/classes"; else the place."""
    return place.rpartition("/")[0] or place


def variables_without_run(
    entries: Iterable[LayerValues], groups: Mapping[str, Group], probes: Iterable[Probe]
) -> dict[str, Collection[str]]:
    """Return the variables that layers lack because no image has reached them, by layer."""
    of_kind = {probe.kind: probe.variables for probe in probes}
    by_layer = {(entry.place, entry.layer): entry for entry in entries}
    lacking: dict[str, Collection[str]] = {}
    for place, group in groups.items():
        for layer, table in group.layers.items() if not group.maps else ():
            entry = by_layer.get((place, layer))
            if entry is None or not entry.has_run:
                values = {} if entry is None else entry.values
                lacking[layer] = of_kind.get(table["kind"], {}).keys() - values.keys()
    return lacking


def drop_unknown_layers(
    entries: Iterable[LayerValues], groups: Mapping[str, Group]
) -> tuple[list[LayerValues], dict[str, list[str]]]:
    """Return the entries without what the recording began without: layers, and names of variables by layer."""
    known: list[LayerValues] = []
    dropped: dict[str, list[str]] = {}
    for entry in entries:
        group = groups.get(entry.place, Group({}, {}))
        if entry.layer not in group.layers:
            if entry.has_run:
                place = f" in {entry.place}" if entry.place else ""
                dropped[f"{entry.layer}{place}"] = []
            continue
        names = sorted(entry.values.keys() - group.variables.keys())
        if names:
            dropped[entry.layer] = [*dropped.get(entry.layer, ()), *names]
        values = {
            name: value for name, value in entry.values.items() if name not in names
        }
        known.append(replace(entry, values=values))
    return known, dropped


def warn_of_dropped(dropped: Mapping[str, Sequence[str]]) -> list[str]:
    """Return warnings of layers, and of variables, that the recording began without."""
    layers: dict[tuple[str, ...], list[str]] = {}
    for layer, names in dropped.items():
        layers.setdefault((*names,), []).append(layer)
    warned = []
    for names, group in layers.items():
        variables = f"{[*names]} of " if names else ""
        warned.append(
            "not recorded, because the recording began without them: "
            f"{variables}{group[:3]} (of {len(group)})"
        )
    return warned


def warn_of_nonfinite(entries: Iterable[LayerValues]) -> list[str]:
    """Return a warning that names the layers with NaN or infinite numbers; an empty list if there are none."""
    counts: dict[str, int] = {}
    broken: list[str] = []
    for entry in entries:
        images = int(entry.values.get("nonfinite_images", 0))
        if images:
            counts[entry.layer] = max(images, counts.get(entry.layer, 0))
        # Maps are not checked: they are NaN for images that were not seen.
        elif not entry.maps and not all(
            np.isfinite(value).all() or entry.variables[name].may_be_nan
            for name, value in entry.values.items()
        ):
            broken.append(entry.layer)
    warned = []
    if counts:
        warned.append(
            f"images gave NaN or infinite values, which are left out of the means; their number by layer: {counts}"
        )
    if broken:
        warned.append(
            f"NaN or infinite values were recorded for these layers, from their parameters or gradients: {broken}"
        )
    return warned


def assemble(
    entries: Collection[LayerValues], groups: Mapping[str, Group]
) -> dict[str, dict[str, np.ndarray]]:
    """Return arrays of every variable of every group, filled with NaN (integers: -1) where a layer has no value."""
    arrays: dict[str, dict[str, np.ndarray]] = {}
    rows: dict[str, dict[str, int]] = {}
    for place, group in groups.items():
        arrays[place] = {
            name: _empty(group.shape(name), variable)
            for name, variable in group.variables.items()
        }
        rows[place] = {layer: row for row, layer in enumerate(group.layers)}
    for entry in entries:
        row = rows[entry.place][entry.layer]
        for name, value in entry.values.items():
            # A layer can have fewer heads or classes than its group: the rest keeps the fill value.
            region: tuple[int | slice, ...] = (
                row,
                *(slice(0, size) for size in value.shape),
            )
            arrays[entry.place][name][region] = value
    return arrays
