"""Several recordings as one, along ``run``, read when looked at."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core.indexing import IndexingSupport, LazilyIndexedArray, explicit_indexing_adapter
from zarr.abc.store import Store

from tcnn_probe.storage.commit import ALONG, COORDS, LAYERS, VERSION
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.reading import open_recording

__all__ = ["open_recordings"]

Target = str | os.PathLike[str] | Store
_Run = tuple[xr.Variable | None, Mapping[str, np.ndarray]]
"""A run's variable, if it has it; and by dimension, for each label of all runs, the place where it has it or -1."""

_BY_RUN = ("missing", "unsupported")
_NOT_OF_A_RUN = (ALONG, VERSION, COORDS, LAYERS, "writer", "images", "image_hashes")


def open_recordings(target: Target | Mapping[str, Target] | Iterable[Target]) -> xr.DataTree:
    """Open a recording, or several as one, for reading; nothing of them is changed. Others may be writing to them.

    ::

        tree = tcnn_probe.open("run.zarr")
        tree = tcnn_probe.open(sorted(Path("seeds").glob("*/recording.zarr")))
        tree["heads"].gate.groupby("recipe").mean(["run", "head"])

    Several are joined along ``run``. Attributes that differ between them, such as the seed, become coordinates on
    ``run`` (with ``run_`` before the name if a variable has the same one). Marks, layers, heads and groups that only
    some runs have are kept. What a run lacks is NaN, or -1 for integers; ``attrs["absent"]`` names it, in JSON by run.
    Nothing is loaded before it is looked at. ``tree.chunk(run=1)`` makes dask arrays of it, for reductions that are
    larger than memory: ``pip install "tcnn-probe[dask]"``.

    Args:
        target: path, URL or zarr store of a recording; or several of them. Runs are called after that part of their
            paths in which they differ; a mapping gives other names.

    Returns:
        A tree of lazily loaded groups, all over the same marks (and runs, of several). At its root are the attributes
        and the scalars that came with marks; in "heads" the numbers of each head; under their own paths, such as
        "maps/6x14x14", the other groups. ``xr.open_zarr`` alone gives scalars and numbers of heads of one recording as
        one dataset, which cannot be the root here: a :class:`xarray.DataTree` holds below a node only what is aligned
        with it, and maps are of other layers.

    Raises:
        StoreError: nothing is there, or no recording, or a damaged one, or one of another schema version; several
            whose marks or variables are of different kinds.
        ValueError: no recording, or two runs of one name.
    """
    if isinstance(target, str | os.PathLike | Store) or target is None:
        return open_recording(target)
    named = dict(target) if isinstance(target, Mapping) else _named(list(target))
    if not named:
        raise ValueError("expected one recording at least, got none")
    return _joined({name: open_recording(one) for name, one in named.items()})


def _named(targets: Sequence[Target]) -> dict[str, Target]:
    """Recordings by the part of their paths in which they differ."""
    if any(isinstance(one, Store) for one in targets):
        raise ValueError("stores have no names: give a mapping, open({'seed 0': store, ...})")
    paths = [re.split(r"[/\\]", os.fspath(one).rstrip("/\\").removesuffix(".zarr")) for one in targets]  # type: ignore[arg-type]
    while len(paths) > 1 and len({path[-1] for path in paths}) == 1 and all(len(path) > 1 for path in paths):
        paths = [path[:-1] for path in paths]
    names = [path[-1] for path in paths]
    names = names if len({*names}) == len(names) else ["/".join(path) for path in paths]
    if len({*names}) < len(names):
        raise ValueError(f"expected different recordings, got {names}: a mapping gives them names of their own")
    return dict(zip(names, targets, strict=True))


def _joined(trees: Mapping[str, xr.DataTree]) -> xr.DataTree:
    about = [{str(name): value for name, value in tree.attrs.items()} for tree in trees.values()]
    if len({attrs[ALONG] for attrs in about}) > 1:
        raise StoreError(f"expected the same marks in all, got marks along {[attrs[ALONG] for attrs in about]}")
    along = about[0][ALONG]
    marks = {along: _union([tree.coords[along].values for tree in trees.values()])}
    absent: dict[str, dict[str, list[Any]]] = {name: {} for name in trees}
    differing = _differing(about)
    groups: dict[str, xr.Dataset] = {}
    for path in dict.fromkeys(path for tree in trees.values() for path in tree.groups):
        members = {name: tree[path].to_dataset() if path in tree.groups else None for name, tree in trees.items()}
        group = _group(members, marks, absent, path.strip("/"))
        names = {name: f"run_{name}" if name in group.variables else name for name in differing}
        groups[path] = group.assign_coords({names[name]: ("run", values) for name, values in differing.items()})
    attrs = _shared(about)
    for what in (name for name in _BY_RUN if name not in attrs):
        told = {name: json.loads(one.get(what, "{}")) for name, one in zip(trees, about, strict=True)}
        attrs[what] = json.dumps(told)
    groups["/"].attrs = attrs | {"absent": json.dumps({name: told for name, told in absent.items() if told})}
    return xr.DataTree.from_dict(groups)


def _group(
    members: Mapping[str, xr.Dataset | None],
    marks: dict[str, np.ndarray],
    absent: Mapping[str, dict[str, list[Any]]],
    path: str,
) -> xr.Dataset:
    """One group of all runs, on the labels of all; notes what a run lacks."""
    there = {name: ds for name, ds in members.items() if ds is not None}
    every = [*there.values()]
    dims = dict.fromkeys(str(dim) for ds in every for dim in ds.dims)
    labels = {dim: _union([ds[dim].values for ds in every if dim in ds.dims]) for dim in dims} | marks
    for name in members.keys() - there.keys() if any(ds.data_vars for ds in every) else ():
        absent[name].setdefault("groups", []).append(path)
    places: dict[str, dict[str, np.ndarray]] = {}
    for name, ds in there.items():
        places[name] = {dim: ds.indexes[dim].get_indexer(some) for dim, some in labels.items() if dim in ds.dims}
        for dim, found in places[name].items():
            if (found < 0).any():
                absent[name][dim if dim in marks else f"{path}/{dim}"] = labels[dim][found < 0].tolist()
    variables = {}
    for each in dict.fromkeys(each for ds in every for each in ds.data_vars):
        parts = {name: ds[each].variable for name, ds in there.items() if each in ds}
        variables[each] = _variable(str(each), [(parts.get(name), places.get(name, {})) for name in members], labels)
    coords: dict[str, Any] = {
        dim: (dim, some, every[0][dim].attrs if dim in every[0] else {}) for dim, some in labels.items()
    }
    group = xr.Dataset(variables, coords | {"run": [*members]})
    if tables := [json.loads(ds.attrs[LAYERS]) for ds in every if LAYERS in ds.attrs]:
        names = dict.fromkeys(layer for table in tables for layer in table)
        group.attrs = {LAYERS: json.dumps({name: _shared([t[name] for t in tables if name in t]) for name in names})}
    return group


def _variable(name: str, runs: Sequence[_Run], labels: Mapping[str, np.ndarray]) -> xr.Variable:
    parts = [part for part, _ in runs if part is not None]
    if len({part.dims for part in parts}) > 1:
        raise StoreError(f"{name!r} has other dimensions in some runs: {sorted({part.dims for part in parts})}")
    array = _Joined(runs, [len(labels[str(dim)]) for dim in parts[0].dims])
    return xr.Variable(("run", *parts[0].dims), LazilyIndexedArray(array), parts[0].attrs)


class _Joined(BackendArray):
    """One variable of several runs; a part of it is read from those that it is of."""

    def __init__(self, runs: Sequence[_Run], shape: Sequence[int]) -> None:
        self._runs = runs
        self.dtype = np.result_type(*(part.dtype for part, _ in runs if part is not None))
        self.shape = (len(runs), *shape)

    def __getitem__(self, key: Any) -> Any:
        return explicit_indexing_adapter(key, self.shape, IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        wanted = [np.atleast_1d(np.arange(size)[one]) for size, one in zip(self.shape, key, strict=True)]
        found = np.full([len(one) for one in wanted], np.nan if self.dtype.kind == "f" else -1, self.dtype)
        for row, run in enumerate(wanted[0]):
            part, places = self._runs[run]
            if part is not None:
                at = [places[str(dim)][one] for dim, one in zip(part.dims, wanted[1:], strict=True)]
                chosen = {dim: _as_slice(one[one >= 0]) for dim, one in zip(part.dims, at, strict=True)}
                found[row][np.ix_(*(one >= 0 for one in at))] = part.isel(chosen).values
        return found.squeeze(tuple(axis for axis, one in enumerate(key) if isinstance(one, int | np.integer)))


def _as_slice(places: np.ndarray) -> Any:
    """What is read at one go, if it lies together."""
    together = len(places) > 0 and (np.diff(places) == 1).all()
    return slice(int(places[0]), int(places[-1]) + 1) if together else places


def _union(several: Iterable[np.ndarray]) -> np.ndarray:
    """Labels of all: numbers ascending, text in the order in which it comes."""
    every = np.concatenate(list(several))
    return np.unique(every) if every.dtype.kind in "iuf" else np.array([*dict.fromkeys(every.tolist())])


def _shared(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = several
    return {name: value for name, value in first.items() if all(name in o and o[name] == value for o in others)}


def _differing(several: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """What runs say of themselves and is not the same in all: numbers, or else text."""
    shared, found = _shared(several), {}
    for name in dict.fromkeys(name for attrs in several for name in attrs):
        if name not in (*shared, *_NOT_OF_A_RUN, *_BY_RUN):
            values = [attrs.get(name) for attrs in several]
            if all(value is None or type(value) in (int, float) for value in values):
                found[name] = np.array([np.nan if value is None else value for value in values])
            else:
                found[name] = np.array([_text(value) for value in values])
    return found


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
