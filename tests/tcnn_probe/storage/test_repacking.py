"""Recordings repacked for reading."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import LocalStore

from tcnn_probe.storage import StoreError, repack
from tests.tcnn_probe.storage.tables import (
    MAPS,
    Crash,
    Remote,
    add,
    assert_holds,
    contents,
    create,
    recording,
    steps,
    values,
)


def test_a_head_of_many_marks_is_read_from_few_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A repacked chunk has 25 marks, and there are more.
    recording(tmp_path / "run.zarr", 30)
    before = contents(tmp_path)
    repack(tmp_path / "run.zarr", tmp_path / "packed.zarr")
    assert {
        name: data
        for name, data in contents(tmp_path).items()
        if not name.startswith("packed")
    } == before
    assert not list((tmp_path / "packed.zarr").glob(".*"))
    top1 = {mark: mark / 7 for mark in range(30)}
    assert_holds(tmp_path / "packed.zarr", list(range(30)), {"top1": top1})
    unconsolidated = xr.open_zarr(
        tmp_path / "packed.zarr", group=MAPS, consolidated=False
    )
    np.testing.assert_array_equal(
        unconsolidated.saliency[29], values(29)[MAPS]["saliency"]
    )
    read: list[str] = []
    original = LocalStore.get

    async def get(self: LocalStore, key: str, *args: Any, **kwargs: Any) -> Any:
        read.append(key)
        return await original(self, key, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "get", get)
    for name, count, shards, chunks in (
        ("run.zarr", 30, (1, 2, 2, 5, 3, 11), (1, 1, 2, 1, 3, 11)),
        ("packed.zarr", 1, (100, 1, 2, 5, 3, 11), (25, 1, 2, 1, 3, 11)),
    ):
        head = xr.open_zarr(tmp_path / name, group=MAPS, chunks=None).saliency.isel(
            layer=1, head=3
        )
        read.clear()
        np.testing.assert_array_equal(
            head, [values(mark)[MAPS]["saliency"][1, :, 3] for mark in range(30)]
        )
        # Reading takes an object per mark before repacking and a single object after it.
        assert len(set(read)) == count
        array = zarr.open_group(tmp_path / name, mode="r")[f"{MAPS}/saliency"]
        assert array.shards == shards
        assert array.chunks == chunks


def test_into_and_out_of_other_stores(tmp_path: Path) -> None:
    source, target = Remote(), Remote()
    recording(source, 2)
    repack(source, target)
    repack(target, tmp_path / "run.zarr")
    assert_holds(tmp_path / "run.zarr", [0, 1])
    for place in (source, target, tmp_path / "run.zarr"):
        with pytest.raises(StoreError, match="holds a recording already"):
            repack(source, place)


def test_killed_repacking_leaves_no_recording(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0)
    # The copy crashes halfway.
    with steps(20), pytest.raises(Crash):
        repack(tmp_path / "run.zarr", tmp_path / "packed.zarr")
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]
    add(store, 1)
