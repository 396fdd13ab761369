"""Places for a recording, and places that are refused without changes."""

import asyncio
import inspect
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zarr
from zarr.buffer import default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore, ZipStore

from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tcnn_probe.storage.place import run, uninterrupted
from tests.tcnn_probe.storage.tables import Remote, add, assert_holds, contents, create, recording


@pytest.mark.parametrize(
    "kind", ["memory", "path", "text", "file URL", "URL", "zarr directory", "zarr store"]
)
def test_all_kinds_of_places_hold_the_same(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.zarr"
    target = {
        "memory": None,
        "path": path,
        "text": str(path),
        "file URL": f"file://{path}",
        "URL": f"memory://{path}",
        "zarr directory": LocalStore(path),
        # This store is no directory of zarr, so nothing may depend on paths.
        "zarr store": Remote(),
    }[kind]
    # No float holds sevenths exactly, so equality is to the bit.
    expected = {"top1": {k: k / 7 for k in (0, 1, 5)}}
    store = recording(target, 2)
    store.close()
    assert_holds(store, [0, 1], expected)
    if target is not None:
        again = create(target)
        # 5 follows 1, as marks need not be consecutive.
        add(again, 5, top1=5 / 7)
        assert_holds(again, [0, 1, 5], expected)
        assert open_recording(target).epoch.values.tolist() == [0, 1, 5]
    # Places in memory leave nothing on the disk.
    assert path.exists() == (kind in ("path", "text", "file URL", "zarr directory"))


def with_version(path: Path) -> None:
    recording(path)
    root = json.loads((path / "zarr.json").read_text())
    # This is the version before the current one.
    root["attributes"]["tcnn_probe_schema"] = 2
    (path / "zarr.json").write_text(json.dumps(root))


def with_notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("precious")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: path.write_text("precious"),
            "holds no recording: nothing is there|expected .*run.zarr to be a folder",
        ),
        (with_notes, r"something else than a recording \(\['notes.txt'\]\)"),
        (
            lambda path: zarr.create_array(path, shape=(3,), dtype="float64"),
            "something else than a recording",
        ),
        (with_version, "schema version 2, expected 3: read it with .* or record anew, at another"),
        (
            lambda path: recording(path, along="step"),
            "has its marks along 'step', expected 'epoch'",
        ),
    ],
)
def test_unsuitable_places_are_refused_and_unchanged(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "run.zarr")
    # Contents are compared byte by byte, so that a repair or change by a refusal is noticed.
    before = contents(tmp_path)
    # A recording along another coordinate can be read.
    for read in (EpochStore, open_recording)[: 1 + ("along" not in message)]:
        with pytest.raises(StoreError, match=message):
            read(tmp_path / "run.zarr")
    assert contents(tmp_path) == before


def test_missing_recordings_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run.zarr"
    store = EpochStore(path)
    assert store.groups is None
    assert store.attrs == {}
    assert store.marks == ()
    with pytest.raises(StoreError, match=r"run.zarr holds no recording: nothing is there"):
        open_recording(path)
    # Reading must not create the missing directory.
    assert list(tmp_path.iterdir()) == []


def test_empty_directories_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path keeps its meaning after a change of the working directory."""
    for name in ("empty", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    # One directory is new and one is there and empty.
    stores = {name: create(name) for name in ("run.zarr", "empty")}
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name, store in stores.items():
        add(store, 0)
        assert_holds(tmp_path / name, [0])
    assert list(Path.cwd().iterdir()) == []


def test_impossible_targets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording(tmp_path / "run.zarr")
    (tmp_path / "file").write_text("")
    only_read = LocalStore(tmp_path / "run.zarr", read_only=True)
    assert open_recording(only_read).epoch.values.tolist() == [0]
    occupied = MemoryStore({"mine/c/0": default_buffer_prototype().buffer.from_bytes(b"precious")})
    # Tests may run as root, who has all rights.
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path)
    # None makes an import fail, as if the package were not installed. (fsspec remembers s3fs, which
    # other tests use.)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for target, message in (
        ("", "expected the path of a directory, got an empty path"),
        (only_read, "expected a store that can be written"),
        (ZipStore(tmp_path / "run.zip", mode="w"), "listed and deleted from, got zip:"),
        (occupied, r"holds something else than a recording \(\['mine'"),
        (tmp_path / "file" / "a" / "run.zarr", "expected .*file to be a folder"),
        (tmp_path / "run.zarr", "cannot be written: expected .*run.zarr to be a folder"),
        # The parents are missing too; the first existing one decides.
        ("/a/b/run.zarr", "cannot be written: expected / to be a folder"),
        ("nonsense://bucket/run.zarr", "Protocol not known: nonsense"),
        ("gs://bucket/run.zarr", "install gcsfs"),
    ):
        with pytest.raises((ValueError, ImportError), match=message):
            EpochStore(target)
    # The check must not refuse a folder that can be written.
    assert EpochStore(tmp_path / "c" / "run.zarr").marks == ()


def test_contents_of_the_user_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    recording(path)
    # A user might do this, with zarr alone and without the package's metadata.
    users = zarr.open_group(path, mode="r+", use_consolidated=False)
    users.create_array("mine", shape=(2,), dtype="float64")[:] = 7
    users.create_group("more")
    # Earlier recordings had shards, too.
    shards = {"shape": (4, 3), "chunks": (1, 3), "shards": (4, 3), "dtype": "float64"}
    users.create_array("sharded", **shards, dimension_names=["image", "x"])[:] = 5
    store = create(path)
    for name in ("mine", "more", "sharded"):
        with pytest.raises(ValueError, match=f"exists in store .* at path '{name}'"):
            add(store, 1, **{name: 1.0})
    add(store, 1)
    store.close()
    assert_holds(path, [0, 1])
    # The values are compared in addition to the names.
    assert users["mine"][:].tolist() == [7, 7]
    assert (users["sharded"][:] == 5).all()
    assert "more" in users


def test_links_are_not_followed(tmp_path: Path) -> None:
    recording(path := tmp_path / "run.zarr")
    shutil.move(path / "gate", tmp_path / "gate")
    (path / "gate").symlink_to(tmp_path / "gate")
    (path / ".zarr.json.partial").symlink_to(tmp_path / "precious")
    before = contents(tmp_path / "gate")
    store = create(path)
    with pytest.raises(StoreError, match="got a link: it is not followed"):
        add(store, 1)
    assert contents(tmp_path / "gate") == before
    (path / "gate").unlink()
    shutil.move(tmp_path / "gate", path / "gate")
    add(store, 1)
    assert_holds(path, [0, 1])
    assert not (tmp_path / "precious").exists()


def test_without_another_thread_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        uninterrupted(print)


def test_ctrl_c_is_raised_after_the_work_has_ended() -> None:
    """Ctrl-C comes after each step of Python's in turn, as signals do."""
    for step in itertools.count(1):
        ended, steps = [], itertools.count(1)

        async def work(ended: list[bool] = ended) -> None:
            await asyncio.sleep(0.001)
            ended.append(True)

        def interrupt(
            frame: FrameType,
            event: str,
            argument: Any,
            steps: Iterator[int] = steps,
            at: int = step,
        ) -> None:
            if event != "c_call" and next(steps) == at:
                raise KeyboardInterrupt

        task = work()
        sys.setprofile(interrupt)
        try:
            run(task)
            break
        except KeyboardInterrupt:
            assert ended or inspect.getcoroutinestate(task) == inspect.CORO_CREATED
            task.close()
        finally:
            sys.setprofile(None)
    assert step > 3
