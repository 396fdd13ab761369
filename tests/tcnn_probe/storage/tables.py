"""Recordings for tests of the store; every value follows from a number of the mark."""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from tcnn_probe.schema import Group, Variable
from tcnn_probe.storage import EpochStore

MAPS = "maps/5x3x11"
LAYERS = {
    name: {"kind": "gpsa", "heads": heads}
    # Two names are not ASCII, and one has a "#", which could be taken for a URL's fragment. One
    # layer has fewer heads.
    for name, heads in (("a.conv", 5), ("слой#1", 3), ("層", 5))
}
GROUPS = {
    "": Group(
        {
            "gate": Variable(("layer", "head"), "1", "gate", "The gate."),
            "entropy": Variable(("layer", "head"), "nat", "entropy", "The entropy."),
            "images": Variable(("layer",), "1", "images", "How many.", dtype="int64"),
        },
        LAYERS,
        {"head": 5},
    ),
    "layer_scale": Group(
        {"scale": Variable(("layer", "channel"), "1", "scale", "The scale.")},
        # The name is empty if the model itself is the layer.
        {"a.ls1": {"kind": "scale"}, "": {"kind": "scale"}},
        {"channel": 7},
        coords={"channel": list("abcdefg")},
    ),
    MAPS: Group(
        {
            "saliency": Variable(
                ("layer", "image", "head", "y", "x"), "1", "saliency", "The map.", dtype="float16"
            )
        },
        {"a.conv": LAYERS["a.conv"], "層": LAYERS["層"]},
        {"image": 2, "head": 5, "y": 3, "x": 11},
        coords={"image": [3, 17]},
    ),
}


class Crash(BaseException):
    """An error that no code handles."""


class Remote(MemoryStore):
    """A store that is not a directory."""


def values(seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Return values by group and variable, distinct everywhere and for every seed, and exact."""
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for path, group in GROUPS.items():
        arrays[path] = {}
        for number, (name, about) in enumerate(group.variables.items()):
            index = np.arange(np.prod(group.shape(name))).reshape(group.shape(name))
            wide = (
                # Whole numbers up to 2,048 are exact in float16; both factors are primes, so that
                # different seeds have different values everywhere.
                (index + 661 * seed) % 2039
                if group.maps
                # Numbers below 2^53 are exact in float64 and int64.
                else 1e6 * seed + 1e3 * number + index
            )
            arrays[path][name] = wide.astype(about.dtype)
    arrays[""]["gate"][1, 3:] = np.nan
    return arrays


def create(target: Any, **options: Any) -> EpochStore:
    """Return a store that is new, or has the groups."""
    store = EpochStore(target, **options)
    assert store.groups in (None, GROUPS)
    return store


def add(store: EpochStore, mark: float, seed: int | None = None, **scalars: float) -> None:
    """Add a mark with the values of a seed, by default the mark itself."""
    rows = values(int(mark) if seed is None else seed)
    store.append(mark, GROUPS, rows, scalars, attrs={"made_by": "a test"})


def recording(path: Path, marks: int = 1, **options: str) -> EpochStore:
    """Make a recording with some marks and close it."""
    store = create(path, **options)
    for mark in range(marks):
        add(store, mark, top1=mark / 7)
    store.close()
    return store


def contents(root: Path) -> dict[str, bytes | None]:
    """Return the contents of all files under a directory."""
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else None
        for p in sorted(root.rglob("*"))
    }


def assert_holds(
    source: Any,
    seeds: Mapping[Any, int] | list[int],
    scalars: Mapping[str, Mapping[Any, float]] | None = None,
    *,
    along: str = "epoch",
) -> None:
    """Assert that a store, path or URL holds exactly these marks with the values of their seeds.

    It is read through the root's metadata, as xarray does. Scalars are NaN for marks that are not
    listed; with None, scalars are not checked.
    """
    seeds = seeds if isinstance(seeds, Mapping) else {mark: mark for mark in seeds}
    target = source._place.store if isinstance(source, EpochStore) else source
    members = zarr.open_group(target, mode="r", use_consolidated=True).members(max_depth=None)
    arrays = {
        path: (array.metadata.dimension_names, array[...])
        for path, array in members
        if isinstance(array, zarr.Array)
    }
    rows = [values(seed) for seed in seeds.values()]
    for path, group in GROUPS.items():
        labels = {
            "layer": group.layers,
            **{dim: range(n) for dim, n in group.sizes.items()},
            **group.coords,
        }
        for name, expected in {along: seeds, **labels}.items():
            assert arrays.pop(f"{path}/{name}".strip("/"))[1].tolist() == list(expected)
        for name, about in group.variables.items():
            dims, array = arrays.pop(f"{path}/{name}".strip("/"))
            assert dims == (along, *about.dims)
            assert array.dtype == about.dtype
            np.testing.assert_array_equal(array, [row[path][name] for row in rows])
    if scalars is not None:
        assert arrays.keys() == scalars.keys()
        for name, expected_scalars in scalars.items():
            np.testing.assert_array_equal(
                arrays[name][1], [expected_scalars.get(mark, np.nan) for mark in seeds]
            )


@contextmanager
def steps(
    crash_at: int | None = None,
    on: str = "^(fsync|replace|set) ",
    error: Any = Crash,
    before: Callable[[int, str], object] = lambda number, step: None,
) -> Iterator[list[str]]:
    """Record the steps of writing that match a pattern, and let one step and all after it fail.

    Steps are "set KEY" in a remote store, and in directories "fsync PATH", "mkdir PATH" and the
    like, and "replace PATH" with the new name. A function is called with the number of each.
    """
    done: list[str] = []
    # Chunks are written by several threads; while a step is begun, the others make none.
    lock = threading.Lock()

    def step(what: str) -> None:
        if re.search(on, what):
            before(len(done), what)
            done.append(what)
            if crash_at is not None and len(done) > crash_at:
                raise error()

    def watched(name: str) -> Callable[..., object]:
        original = getattr(os, name)

        def change(path: Any, *others: Any, **options: Any) -> object:
            with lock:
                step(f"{name} {others[0] if name == 'replace' else path}")
                return original(path, *others, **options)

        return change

    original = Remote.set

    async def remote_set(self: Any, key: str, value: Any) -> None:
        step(f"set {key}")
        await original(self, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda file: step(f"fsync {Path(f'/proc/self/fd/{file}').readlink()}")
        )
        for name in ("mkdir", "replace", "rmdir", "unlink"):
            patch.setattr(os, name, watched(name))
        patch.setattr(Remote, "set", remote_set)
        yield done


def kills(
    source: Any, folder: Path, work: Callable[[], object], every: int, also: str
) -> tuple[list[str], list[Any]]:
    """Do some work; return its changes, and copies of a place as kills before them leave it.

    The place, with what lies beside it, is copied into a folder before every so many changes, and
    before those that match a pattern.
    """
    copies: list[Any] = []

    def copy(number: int, change: str) -> None:
        if number % every and not re.search(also, change):
            return
        if isinstance(source, Path):
            # Another process copies, because its own changes would count here.
            subprocess.run(["cp", "-r", source.parent, folder / str(number)], check=True)
            copies.append(folder / str(number) / source.name)
        else:
            copies.append(Remote(dict(source._store_dict)))

    with steps(on="^(?!fsync)", before=copy) as changes:
        work()
    return changes, copies
