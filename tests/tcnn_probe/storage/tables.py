"""Recordings for the store whose every value follows from a number given with the mark."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from tcnn_probe.schema import Group, Variable
from tcnn_probe.storage import EpochStore

__all__ = ["GROUPS", "MAPS", "add", "assert_holds", "create", "datasets", "values"]

MAPS = "maps/5x3x11"
LAYERS = {name: {"kind": "gpsa", "heads": heads} for name, heads in (("a.conv", 5), ("b.conv", 3), ("c.conv", 5))}
GROUPS = {
    "": Group(
        {
            "gate": Variable(("layer", "head"), "1", "gate", "The gate."),
            "entropy": Variable(("layer", "head"), "nat", "entropy", "The entropy."),
            "images": Variable(("layer",), "1", "images", "How many."),
        },
        LAYERS,
        {"head": 5},
    ),
    "layer_scale": Group(
        {"scale": Variable(("layer", "channel"), "1", "scale", "The scale.")},
        {"a.ls1": {"kind": "scale"}, "a.ls2": {"kind": "scale"}},
        {"channel": 7},
    ),
    MAPS: Group(
        {"saliency": Variable(("layer", "image", "head", "y", "x"), "1", "saliency", "The map.", dtype="float16")},
        {"a.conv": LAYERS["a.conv"], "c.conv": LAYERS["c.conv"]},
        {"image": 2, "head": 5, "y": 3, "x": 11},
        maps=True,
    ),
}


def values(seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Of each group and variable: distinct for every seed, variable, layer, head, ... and exact in its dtype."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, group in GROUPS.items():
        found[path] = {}
        for number, (name, about) in enumerate(group.variables.items()):
            shape = group.shape(name)
            index = np.arange(np.prod(shape)).reshape(shape)
            wide = 1e6 * seed + 1e3 * number + index
            found[path][name] = (index + 661 * seed) % 2039 if group.maps else wide
            found[path][name] = found[path][name].astype(about.dtype)
    found[""]["gate"][1, 3:] = np.nan
    return found


def create(target: Any, **options: Any) -> EpochStore:
    """A store with the groups, made or resumed."""
    store = EpochStore(target, **options)
    if store.groups is None:
        store.create(GROUPS, {"made_by": "a test"})
    else:
        store.check(GROUPS)
    return store


def add(store: EpochStore, mark: float, seed: int | None = None, *, wait: bool = True, **scalars: float) -> None:
    """A mark with the values of a seed, which is the mark itself unless another is given."""
    store.append(mark, values(int(mark) if seed is None else seed), scalars, wait=wait)


def datasets(source: EpochStore | Path) -> dict[str, xr.Dataset]:
    """Each group as plain xarray opens it; of a store that is not a directory, as its tree has it."""
    if isinstance(source, Path):
        return {path: xr.open_zarr(source, group=path or None, chunks=None) for path in GROUPS}
    tree = source.tree()
    return {path: source.dataset() if path == "" else tree[path].to_dataset() for path in GROUPS}


def assert_holds(
    source: EpochStore | Path,
    seeds: Mapping[Any, int] | list[int],
    scalars: Mapping[str, Mapping[Any, float]] | None = None,
    *,
    along: str = "epoch",
) -> None:
    """A store or directory holds these marks with the values of their seeds, and nothing else.

    Args:
        source: what to read.
        seeds: by mark; a list is of marks that are their own seeds.
        scalars: for each name the values by mark, and NaN for other marks. None: those there are not looked at.
        along: name of the marks' coordinate.
    """
    seeds = seeds if isinstance(seeds, Mapping) else {mark: mark for mark in seeds}
    for path, ds in datasets(source).items():
        group = GROUPS[path]
        assert ds[along].values.tolist() == list(seeds)
        assert ds.layer.values.tolist() == list(group.layers)
        assert all(ds[dim].values.tolist() == list(range(size)) for dim, size in group.sizes.items())
        for name, about in group.variables.items():
            there = ds[name]
            assert there.dims == (along, *about.dims)
            assert there.dtype == about.dtype
            expected = [values(seed)[path][name] for seed in seeds.values()]
            np.testing.assert_array_equal(there.values, np.stack(expected) if expected else there.values[:0])
        further = set(ds.data_vars) - set(group.variables)
        if path or scalars is not None:
            assert further == (set() if path else set(scalars or {}))
        for name in further & set(scalars or {}):
            np.testing.assert_array_equal(ds[name].values, [scalars[name].get(mark, np.nan) for mark in seeds])
