"""Maps: how they are cut, compacted, and continued after that."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import LocalStore

from tcnn_probe.schema import Group, Variable
from tcnn_probe.storage import EpochStore, StoreError, compact
from tcnn_probe.storage import chunks as layout
from tests.tcnn_probe.storage.crashes import Crash, Remote, crash_at_write
from tests.tcnn_probe.storage.tables import MAPS, add, assert_holds, create, values


def place(kind: str, folder: Path) -> Any:
    return folder / "run.zarr" if kind == "directory" else Remote()


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_MARKS_PER_COMPACT_SHARD", 6)
    monkeypatch.setattr(layout, "_MARKS_PER_COMPACT_CHUNK", 3)


def layout_of(path: Path, name: str = f"{MAPS}/saliency") -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    array = zarr.open_group(path, mode="r")[name]
    return array.shards, array.chunks


def files(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_one_shard_a_mark_with_a_chunk_for_each_head(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    for mark in range(3):
        add(store, mark)
    assert layout_of(tmp_path / "run.zarr") == ((1, 2, 2, 5, 3, 11), (1, 1, 2, 1, 3, 11))
    assert files(tmp_path / "run.zarr" / MAPS / "saliency") == [
        *(f"c/{mark}/0/0/0/0/0" for mark in range(3)),
        "zarr.json",
    ]


def test_compacted_layout(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    for mark in range(3):
        add(store, mark)
    store.close()
    seen: list[tuple[int, int]] = []
    compact(tmp_path / "run.zarr", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert layout_of(tmp_path / "run.zarr") == ((100, 1, 2, 5, 3, 11), (25, 1, 2, 1, 3, 11))
    assert files(tmp_path / "run.zarr" / MAPS / "saliency") == ["c.0.0.0.0.0.0", "c.0.1.0.0.0.0", "zarr.json"]
    assert_holds(tmp_path / "run.zarr", [0, 1, 2])
    own = xr.open_zarr(tmp_path / "run.zarr", group=MAPS, consolidated=False)
    np.testing.assert_array_equal(own.saliency[2], values(2)[MAPS]["saliency"])
    before = {name: (tmp_path / "run.zarr" / name).read_bytes() for name in files(tmp_path / "run.zarr")}
    compact(tmp_path / "run.zarr")
    assert before == {name: (tmp_path / "run.zarr" / name).read_bytes() for name in files(tmp_path / "run.zarr")}


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("kind", ["directory", "remote"])
@pytest.mark.parametrize("marks", [1, 5, 6, 7, 13])
def test_compacted_and_continued(tmp_path: Path, kind: str, marks: int) -> None:
    target = place(kind, tmp_path)
    store = create(target)
    for mark in range(marks):
        add(store, mark, top1=mark / 7)
    store.close()
    compact(target)
    store = create(target)
    assert_holds(store, list(range(marks)))
    for mark in (marks, marks + 1):
        add(store, mark, top1=mark / 7, wait=mark > marks)
        store.flush()
        assert_holds(store, list(range(mark + 1)))
    store.close()
    compact(target)
    top1 = {mark: mark / 7 for mark in range(marks + 2)}
    assert_holds(create(target), list(range(marks + 2)), {"top1": top1})


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("then", ["read", "resumed", "compacted again"])
@pytest.mark.parametrize("kind", ["directory", "remote"])
def test_crash_at_every_write_of_compacting(tmp_path: Path, kind: str, then: str) -> None:
    number = 0
    while True:
        (tmp_path / str(number)).mkdir()
        target = place(kind, tmp_path / str(number))
        store = create(target)
        for mark in range(8):
            add(store, mark)
        store.close()
        with crash_at_write(number) as asked:
            try:
                compact(target)
                break
            except Crash:
                number += 1
        if kind == "directory":
            assert_holds(target, list(range(8)))
        if then == "compacted again":
            compact(target)
        again = create(target)
        assert_holds(again, list(range(8)))
        if then == "resumed":
            assert_one_layout(target)
            add(again, 8)
            assert_holds(create(target), list(range(9)))
        if then != "read":
            assert_one_layout(target)
    assert number == len(asked) == 2 * 2 + 2  # shards, the commit, the array's own metadata


def assert_one_layout(target: Any) -> None:
    names = files(target) if isinstance(target, Path) else list(target._store_dict)
    kinds = {key.removeprefix(f"{MAPS}/saliency/c")[0] for key in names if key.startswith(f"{MAPS}/saliency/c")}
    assert len(kinds) == 1


@pytest.mark.usefixtures("small_shards")
def test_crash_at_every_write_of_continuing_after_compacting(tmp_path: Path) -> None:
    path, number = tmp_path / "run.zarr", 0
    store = create(path)
    for mark in range(8):
        add(store, mark)
    store.close()
    while True:
        compact(path)
        store = create(path)
        with crash_at_write(number) as asked:
            try:
                add(store, 8)
                break
            except Crash:
                number += 1
        assert_holds(path, list(range(8)))
        assert_holds(create(path), list(range(8)))
    assert number == len(asked) > 8 + 2
    assert_holds(path, list(range(9)))


def test_compacting_what_is_written_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    store = create(path)
    for mark in range(2):
        add(store, mark)
    with pytest.raises(StoreError, match=r"run.zarr was written to by something else: its maps are left as they were"):
        compact(path, progress=lambda done, total: add(store, 1 + done))
    assert_holds(path, [0, 1, 2, 3])
    add(store, 4)
    assert_holds(create(path), [0, 1, 2, 3, 4])
    assert_one_layout(path)


def test_writer_notices_that_its_store_was_compacted(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0)
    compact(tmp_path / "run.zarr")
    with pytest.raises(StoreError, match=r"another recorder writes to this store: .*and other metadata"):
        add(store, 1)
    assert_holds(tmp_path / "run.zarr", [0])


def test_compacting_without_maps_or_marks(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    store = EpochStore(path)
    store.create({"": Group({"g": Variable(("layer",), "1", "g", "g")}, {"a": {}})}, {})
    store.append(0, {"": {"g": np.array([0.5])}}, {})
    before = (path / "zarr.json").read_bytes()
    compact(path)
    assert (path / "zarr.json").read_bytes() == before
    create(tmp_path / "empty.zarr").close()
    compact(tmp_path / "empty.zarr")
    add(create(tmp_path / "empty.zarr"), 0)
    assert_holds(tmp_path / "empty.zarr", [0])


@pytest.mark.parametrize(
    ("dims", "sizes", "shards", "chunks", "compact_shards"),
    [
        (("layer", "y", "x"), {"y": 3, "x": 7}, (1, 2, 3, 7), (1, 1, 3, 7), (100, 1, 3, 7)),
        (("image", "y"), {"image": 5, "y": 3}, (1, 5, 3), (1, 5, 3), (100, 5, 3)),
        ((), {}, (1,), (1,), (100,)),
    ],
)
def test_maps_of_other_dimensions(
    tmp_path: Path,
    dims: tuple[str, ...],
    sizes: dict[str, int],
    shards: tuple[int, ...],
    chunks: tuple[int, ...],
    compact_shards: tuple[int, ...],
) -> None:
    path = tmp_path / "run.zarr"
    group = Group({"m": Variable(dims, "1", "m", "m", dtype="float16")}, {"a": {}, "b": {}}, sizes, maps=True)
    store = EpochStore(path)
    store.create({"": Group({}, {}), "maps/m": group}, {})
    rows = np.arange(3 * np.prod(group.shape("m"), dtype=int)).reshape(3, *group.shape("m")).astype("float16")
    for mark in range(3):
        store.append(mark, {"maps/m": {"m": rows[mark]}}, {})
    assert layout_of(path, "maps/m/m") == (shards, chunks)
    np.testing.assert_array_equal(xr.open_zarr(path, group="maps/m").m, rows)
    compact(path)
    assert layout_of(path, "maps/m/m") == (compact_shards, (25, *chunks[1:]))
    np.testing.assert_array_equal(xr.open_zarr(path, group="maps/m").m, rows)


def test_a_head_of_many_marks_is_read_from_few_objects(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    store = create(path)
    for mark in range(30):
        add(store, mark)
    store.close()
    counts = []
    for prepare in (lambda: None, lambda: compact(path)):
        prepare()
        with counted_reads() as keys:
            head = xr.open_zarr(path, group=MAPS, chunks=None).saliency.isel(layer=1, head=3).values
        np.testing.assert_array_equal(head, [values(mark)[MAPS]["saliency"][1, :, 3] for mark in range(30)])
        counts.append(len({key for key in keys if "saliency" in key}))
    assert counts == [30, 1]


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    keys: list[str] = []
    original = LocalStore.get

    async def get(self: LocalStore, key: str, *args: Any, **kwargs: Any) -> Any:
        keys.append(key)
        return await original(self, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "get", get)
        yield keys


def test_own_metadata_after_a_crash_is_repaired(tmp_path: Path) -> None:
    """The commit of a compaction was made, and the array's own metadata still states the old layout."""
    path = tmp_path / "run.zarr"
    store = create(path)
    add(store, 0)
    store.close()
    with crash_at_write(2 + 1), pytest.raises(Crash):
        compact(path)
    assert json.loads((path / MAPS / "saliency" / "zarr.json").read_text())["chunk_key_encoding"] == {
        "name": "default",
        "configuration": {"separator": "/"},
    }
    assert_holds(path, [0])
    create(path).close()
    own = xr.open_zarr(path, group=MAPS, consolidated=False)
    np.testing.assert_array_equal(own.saliency[0], values(0)[MAPS]["saliency"])
