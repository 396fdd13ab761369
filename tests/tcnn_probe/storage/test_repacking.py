"""Recordings repacked for reading."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import LocalStore

from tcnn_probe.storage import StoreError, repack
from tests.tcnn_probe.storage.tables import MAPS, Crash, Remote, add, assert_holds, contents, create, steps, values


@contextmanager
def reads() -> Iterator[set[str]]:
    keys: set[str] = set()
    original = LocalStore.get

    async def get(self: LocalStore, key: str, *args: Any, **kwargs: Any) -> Any:
        keys.add(key)
        return await original(self, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "get", get)
        yield keys


def test_a_head_of_many_marks_is_read_from_few_objects(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    for mark in range(30):
        add(store, mark, top1=mark / 7)
    before = contents(tmp_path)
    repack(tmp_path / "run.zarr", tmp_path / "packed.zarr")
    assert {name: data for name, data in contents(tmp_path).items() if not name.startswith("packed")} == before
    assert not list((tmp_path / "packed.zarr").glob(".*"))
    top1 = {mark: mark / 7 for mark in range(30)}
    assert_holds(tmp_path / "packed.zarr", list(range(30)), {"top1": top1})
    own = xr.open_zarr(tmp_path / "packed.zarr", group=MAPS, consolidated=False)
    np.testing.assert_array_equal(own.saliency[29], values(29)[MAPS]["saliency"])
    counts, cuts = [], []
    for name in ("run.zarr", "packed.zarr"):
        with reads() as keys:
            head = xr.open_zarr(tmp_path / name, group=MAPS, chunks=None).saliency.isel(layer=1, head=3).values
        np.testing.assert_array_equal(head, [values(mark)[MAPS]["saliency"][1, :, 3] for mark in range(30)])
        counts.append(len({key for key in keys if "saliency" in key}))
        array = zarr.open_group(tmp_path / name, mode="r")[f"{MAPS}/saliency"]
        cuts.append((array.shards, array.chunks))
    assert counts == [30, 1]
    assert cuts == [((1, 2, 2, 5, 3, 11), (1, 1, 2, 1, 3, 11)), ((100, 1, 2, 5, 3, 11), (25, 1, 2, 1, 3, 11))]


def test_into_and_out_of_other_stores(tmp_path: Path) -> None:
    source, target = Remote(), Remote()
    store = create(source)
    for mark in (0, 1):
        add(store, mark)
    repack(source, target)
    repack(target, tmp_path / "run.zarr")
    assert_holds(tmp_path / "run.zarr", [0, 1])
    for place in (source, target, tmp_path / "run.zarr"):
        with pytest.raises(StoreError, match="holds a recording already"):
            repack(source, place)


def test_killed_on_the_way_there_is_none(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0)
    with steps(20), pytest.raises(Crash):
        repack(tmp_path / "run.zarr", tmp_path / "packed.zarr")
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]
    assert_holds(store, [0])
