"""``mode="w"`` keeps the old recording until the new one is there, and the user's files."""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from tcnn_probe.schema import Group
from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tests.tcnn_probe.storage.tables import (
    MAPS,
    Crash,
    Remote,
    add,
    assert_holds,
    contents,
    create,
    kills,
    recording,
    steps,
    values,
)


def replace(path: Path) -> EpochStore:
    """Replace a recording by one with a single mark, whose values differ from the old ones."""
    store = create(path, mode="w")
    add(store, 0, 9)
    return store


@pytest.mark.study
def test_a_kill_at_any_change_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    recording(source := tmp_path / "source" / "run.zarr", 2)
    # All changes around the two renamings are tried, and a sample of the others.
    renamings = r"^replace .*\.(old|zarr)$"
    changes, copies = kills(source, tmp_path, lambda: replace(source), 31, renamings)
    swap = changes.index(f"replace {source}")
    # There are enough changes on both sides for a meaningful sample; after the renamings, the old
    # files are deleted.
    assert len(changes) > swap + 30 > 60
    old = []
    for path in copies:
        EpochStore(path)
        if open_recording(path).sizes["epoch"] == 2:
            old.append(path)
            assert_holds(path, [0, 1])
            replace(path).close()
        assert_holds(path, {0: 9})
        store = create(path)
        store.hold()
        store.close()
        assert [entry.name for entry in path.parent.iterdir()] == ["run.zarr"]
    assert old == [path for path in copies if int(path.parent.name) <= swap]


@pytest.mark.parametrize(
    "on", ["fsync {}/.*init/gate/c/", "fsync {}$"], ids=["on the way", "after the exchange"]
)
def test_an_error_leaves_the_old_recording(tmp_path: Path, on: str) -> None:
    """Errors occur on the way and after the exchange; the same mark can then be repeated."""
    recording(path := tmp_path / "run.zarr", 2)
    store = create(path, mode="w")
    with (
        steps(0, on.format(tmp_path), lambda: OSError(errno.ENOSPC, "No space left")),
        pytest.raises(OSError, match="No space left"),
    ):
        add(store, 0, 9)
    assert_holds(path, [0, 1])
    assert {entry.suffix for entry in tmp_path.iterdir()} == {".zarr", ".lock"}
    add(store, 0, 9)
    assert_holds(path, {0: 9})


def test_a_recording_that_is_deleted_before_it_is_replaced(tmp_path: Path) -> None:
    recording(path := tmp_path / "run.zarr")
    store = create(path, mode="w")
    shutil.rmtree(path)
    add(store, 0, 9)
    assert_holds(path, {0: 9})


def test_killed_replacement_in_stores_without_renaming() -> None:
    """The old recording is deleted first; after a kill the place can be recorded to."""
    recording(target := Remote(), 2)
    delete = target.delete
    deleted = []

    async def once(key: str) -> None:
        # The crash is after some of the objects and before the others.
        if len(deleted) == 5:
            raise Crash
        deleted.append(key)
        await delete(key)

    target.delete = once  # type: ignore[method-assign]
    with pytest.raises(Crash):
        replace(target)
    assert deleted[0] == "zarr.json"
    with pytest.raises(StoreError, match="nothing is there"):
        open_recording(target)
    target.delete = delete  # type: ignore[method-assign]
    add(create(target), 0, 9)
    assert_holds(target, {0: 9})


def test_a_reader_of_the_old_recording_reads_no_new_values(tmp_path: Path) -> None:
    recording(path := tmp_path / "run.zarr", 2)
    before = open_recording(path)
    np.testing.assert_array_equal(before["heads"].gate[1], values(1)[""]["gate"])
    store = replace(path)
    for name, group in (("gate", "heads"), ("saliency", MAPS)):
        with pytest.raises(
            StoreError, match="was deleted, or replaced by another recording: open it again"
        ):
            before[group][name].load()
    add(store, 1)
    np.testing.assert_array_equal(store.dataset().gate[0], values(9)[""]["gate"])


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        *("array", "shards", "damaged", "group", "folder", "file", "link"),
        *("xarray's array", "xarray's group"),
    ],
)
def test_recordings_with_files_of_the_user_are_not_replaced(tmp_path: Path, kind: str) -> None:
    recording(path := tmp_path / "run.zarr")
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    mine = xr.Dataset({"mine": ("mine_x", [1.0, 2.0])}, attrs=xr.open_zarr(path).attrs)
    if kind == "array":
        root.create_array("mine", shape=(2,), dtype="float64")
    elif kind == "shards":
        options = {"shape": (4, 8), "chunks": (1, 8), "shards": (4, 8), "dtype": "float32"}
        root.create_array("mine", **options, dimension_names=["image", "x"])
    elif kind == "damaged":
        (path / "mine").mkdir()
        (path / "mine" / "zarr.json").write_text("half a docu")
    elif kind == "group":
        root.create_group("mine", attributes={"mine": 1})
    elif kind == "folder":
        (path / "mine" / "mine").mkdir(parents=True)
    elif kind == "file":
        (path / "mine").write_text("")
    elif kind == "link":
        (path / "mine").symlink_to(tmp_path)
    else:
        # xarray consolidates the metadata, so the root lists what it has written.
        mine.to_zarr(path, mode="a", group="mine" if kind == "xarray's group" else None)
    before = contents(path)
    with pytest.raises(StoreError, match=r"more than a recording.*: 'mine"):
        create(path, mode="w").hold()
    assert contents(path) == before


@pytest.mark.study
def test_leftovers_of_a_killed_mark_are_replaced_with_the_recording(tmp_path: Path) -> None:
    """The mark adds arrays, groups and their folders to a recording of scalars."""

    path = tmp_path / "scalars" / "run.zarr"
    store = EpochStore(path)
    store.append(0, {"": Group({}, {})}, {"": {}}, {"top1": 0.5})
    store.close()
    _, copies = kills(path, tmp_path, lambda: add(EpochStore(path), 1, fresh=1.0), 13, "x^")
    assert len(copies) > 5
    for copy in copies:
        replace(copy).close()
        assert_holds(copy, {0: 9}, {})
