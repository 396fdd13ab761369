"""Several recordings joined along ``run``, with values that are read lazily."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray

# xarray has no public names for lazily indexed arrays; its documentation uses these.
from xarray.core.indexing import IndexingSupport, LazilyIndexedArray, explicit_indexing_adapter
from zarr.abc.store import Store

from tcnn_probe.schema import StoreError, missing_value
from tcnn_probe.storage.place import Source
from tcnn_probe.storage.reading import open_recording
from tcnn_probe.storage.root import ALONG, BY_RUN, LAYERS, OWN_ATTRIBUTES

__all__ = ["open_recordings"]


def open_recordings(target: Source | Mapping[str, Source] | Iterable[Source]) -> xr.DataTree:
    """Open a recording, or several joined, for reading. They are not changed,
    and may be written meanwhile.

    ::

        tree = tcnn_probe.open("run.zarr")
        tree = tcnn_probe.open(sorted(Path("seeds").glob("*/recording.zarr")))
        tree["heads"].gate.groupby("recipe").mean(["run", "head"])

    Several recordings are joined along ``run``. Attributes that differ between them, such as the
    seed, become coordinates on ``run`` (with the prefix ``run_`` if a variable or a group has the
    same name, and with dots in place of slashes). Marks, layers, heads and groups that only some
    runs have are kept; missing values are NaN, or -1 for integers, and ``attrs["absent"]`` names
    them, in JSON by run. Values are loaded lazily. ``tree.chunk(run=1)`` turns them into dask
    arrays, for reductions that exceed the memory: ``pip install "tcnn-probe[dask]"``.

    Args:
        target: Path, URL or zarr store of a recording, or several of them. Runs are named by the
            part of their paths in which they differ; a mapping gives other names, and those of
            stores.

    Returns:
        A tree of lazily loaded groups, all over the same marks (and runs, if there are several).
        The root has the attributes and the scalars that were given to ``mark()``, "heads" has the
        variables of heads, and other groups have their own paths, such as "maps/6x14x14".
        ``xr.open_zarr`` returns scalars and variables of heads of one recording as one dataset.
        This dataset cannot be the root here: a :class:`xarray.DataTree` requires children that are
        aligned with their parents, and maps have other layers.

    Raises:
        StoreError: A place is empty, holds something else, or holds a recording that is damaged or
            has another schema version; or several recordings have marks of different kinds.
        ValueError: No recording is given, or two runs have the same name.
    """
    if isinstance(target, str | os.PathLike | Store):
        return open_recording(target)
    targets = target if isinstance(target, Mapping) else _by_name([*target])
    if not targets:
        raise ValueError("expected at least one recording, got none")
    return _joined({name: open_recording(recording) for name, recording in targets.items()})


def _by_name(targets: Sequence[Source]) -> dict[str, Source]:
    """Name recordings by the part of their paths in which they differ."""
    texts = [
        os.fspath(target).rstrip("/\\").removesuffix(".zarr")  # type: ignore[arg-type]
        for target in targets
    ]
    # From the last part: seeds/0/recording.zarr and seeds/1/recording.zarr are called 0 and 1.
    parts = [*zip(*(PurePath(text).parts[::-1] for text in texts), strict=False)]
    last = parts[0] if parts else ()
    names = [*next((names for names in parts if len({*names}) > 1), last)]
    if len({*names}) < len(names):
        names = texts
    if len({*names}) < len(names):
        raise ValueError(
            f"expected different recordings, got {names}: a mapping gives them names of their own"
        )
    return dict(zip(names, targets, strict=True))


def _joined(trees: Mapping[str, xr.DataTree]) -> xr.DataTree:
    attributes = [
        {str(name): value for name, value in tree.attrs.items()} for tree in trees.values()
    ]
    # Recordings along epochs and recordings along steps cannot be joined.
    alongs = [attrs[ALONG] for attrs in attributes]
    if len({*alongs}) > 1:
        raise StoreError(f"expected the same marks in all, got marks along {alongs}")
    marks = {alongs[0]: _union([tree.coords[alongs[0]].values for tree in trees.values()])}
    absent: dict[str, dict[str, list[Any]]] = {name: {} for name in trees}
    differing = _differing(attributes)
    paths = dict.fromkeys(path for tree in trees.values() for path in tree.groups)
    group_names = {part for path in paths for part in path.split("/")}
    groups: dict[str, xr.Dataset] = {}
    for path in paths:
        members = {
            name: tree[path].to_dataset() if path in tree.groups else xr.Dataset()
            for name, tree in trees.items()
        }
        group = _group(members, marks, absent, path.strip("/"))
        coordinates = {}
        for name, values in differing.items():
            is_taken = name in group_names or name in group.variables
            # A name with a slash would be a path in a tree.
            coordinate = f"run_{name}" if is_taken else name.replace("/", ".")
            coordinates[coordinate] = ("run", values)
        groups[path] = group.assign_coords(coordinates)
    shared = _shared(attributes)
    for name in BY_RUN:
        if name not in shared:
            tables = [json.loads(attrs.get(name, "{}")) for attrs in attributes]
            shared[name] = json.dumps(dict(zip(trees, tables, strict=True)))
    shared["absent"] = json.dumps({name: labels for name, labels in absent.items() if labels})
    groups["/"].attrs = shared
    return xr.DataTree.from_dict(groups)


def _group(
    members: Mapping[str, xr.Dataset],
    marks: dict[str, np.ndarray],
    absent: Mapping[str, dict[str, list[Any]]],
    path: str,
) -> xr.Dataset:
    """Join a group of all runs, and note in ``absent`` what a run lacks."""
    datasets = [*members.values()]
    dims = dict.fromkeys(str(dim) for ds in datasets for dim in ds.dims)
    # Every group gets the marks of all runs, because a tree aligns its nodes with the root.
    labels = {
        dim: _union([ds[dim].values for ds in datasets if dim in ds.dims]) for dim in dims
    } | marks
    has_values = any(ds.data_vars for ds in datasets)
    for name, ds in members.items():
        if has_values and not ds.variables:
            absent[name].setdefault("groups", []).append(path)
        for dim in labels.keys() & ds.dims:
            lacking = ~np.isin(labels[dim], ds[dim].values)
            if lacking.any():
                place = dim if dim in marks else f"{path}/{dim}"
                absent[name][place] = labels[dim][lacking].tolist()
    names = dict.fromkeys(key for ds in datasets for key in ds.variables if key not in ds.dims)
    # A scalar may have the name of the dimension of runs.
    variables = {
        "run_run" if key == "run" else key: _variable([ds.get(key) for ds in datasets], labels)
        for key in names
    }
    first = next(ds for ds in datasets if ds.variables)
    coords = {
        dim: xr.Variable(dim, labels[dim], first[dim].attrs if dim in first else {})
        for dim in labels
    }
    group = xr.Dataset(variables, {**coords, "run": [*members]})
    group = group.set_coords(name for name in names if name in first.coords)
    if tables := [json.loads(ds.attrs[LAYERS]) for ds in datasets if LAYERS in ds.attrs]:
        layers = dict.fromkeys(layer for table in tables for layer in table)
        # Facts that differ between runs, such as a number of classes, are left out, as they would
        # be wrong for some.
        facts = {
            layer: _shared([table[layer] for table in tables if layer in table]) for layer in layers
        }
        # Enough for health and plots to take one run of this group.
        group.attrs = {LAYERS: json.dumps(facts), ALONG: next(iter(marks))}
    return group


def _variable(runs: Sequence[xr.DataArray | None], labels: Mapping[str, np.ndarray]) -> xr.Variable:
    first = next(part for part in runs if part is not None)
    array = _Joined(runs, {str(dim): labels[str(dim)] for dim in first.dims})
    # As of a single recording, copies of float16 are in float32, which netCDF has.
    encoding = {"dtype": "float32"} if array.dtype == "float16" else {}
    data = LazilyIndexedArray(array)
    return xr.Variable(("run", *first.dims), data, first.attrs, encoding)


class _Joined(BackendArray):
    """A variable of several runs; indexing reads only the runs and parts that are needed."""

    def __init__(
        self, runs: Sequence[xr.DataArray | None], labels: Mapping[str, np.ndarray]
    ) -> None:
        self._runs = runs
        self._labels = labels
        self.dtype = np.result_type(*(run.dtype for run in runs if run is not None))
        self.shape = (len(runs), *map(len, labels.values()))

    def __getitem__(self, key: Any) -> Any:
        return explicit_indexing_adapter(key, self.shape, IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        # Dimensions that are indexed by an integer are kept with size 1 at first.
        rows, *indices = (
            np.atleast_1d(np.arange(size)[index])
            for size, index in zip(self.shape, key, strict=True)
        )
        labels = {
            dim: values[index]
            for (dim, values), index in zip(self._labels.items(), indices, strict=True)
        }
        fill = missing_value(self.dtype)
        values = np.full((len(rows), *map(len, indices)), fill, self.dtype)
        for row, number in enumerate(rows):
            run = self._runs[number]
            if run is not None:
                values[row] = run.reindex(labels, fill_value=fill).values
        single = (isinstance(index, int | np.integer) for index in key)
        return values.squeeze(tuple(axis for axis, is_one in enumerate(single) if is_one))


def _union(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Return the labels of all runs: numbers ascending, text in the order of appearance."""
    joined = np.concatenate(labels)
    return (
        np.unique(joined)
        if joined.dtype.kind in "iuf"
        else np.array([*dict.fromkeys(joined.tolist())])
    )


def _shared(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries that are the same in all tables."""
    first, *rest = tables
    return {
        name: value
        for name, value in first.items()
        if all(name in t and t[name] == value for t in rest)
    }


def _differing(attributes: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return the attributes that differ between runs, as arrays of numbers or else of text."""
    shared = _shared(attributes)
    names = dict.fromkeys(name for attrs in attributes for name in attrs)
    differing = {}
    for name in (name for name in names if name not in OWN_ATTRIBUTES | shared.keys()):
        values = [attrs.get(name) for attrs in attributes]
        if {type(value) for value in values} <= {int, float, type(None)}:
            values = [np.nan if value is None else value for value in values]
        else:
            texts = ["" if value is None else value for value in values]
            values = [text if isinstance(text, str) else json.dumps(text) for text in texts]
        differing[name] = np.array(values)
    return differing
