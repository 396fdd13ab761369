"""One writer at a time, and readers that change nothing."""

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tcnn_probe.storage.directory import LOCK
from tests.tcnn_probe.storage.soak import Child
from tests.tcnn_probe.storage.tables import (
    GROUPS,
    Remote,
    add,
    assert_holds,
    contents,
    create,
    recording,
)

# "20.*" matches the century at the start of the time.
HELD = "run.zarr is being written by process {} since 20.*: one recorder at a time"


def child(work: Callable[[], object]) -> Child:
    """Fork a process that does some work and lives until it is killed."""

    def stay(tell: Callable[[int], object]) -> None:
        result = work()
        tell(1)
        signal.pause()
        del result

    process = Child(stay)
    assert process.numbers(1) == [1]
    return process


def test_second_recorder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    first = create(path)
    add(first, 0)
    second = create(path)
    for use in (second.hold, lambda: add(second, 1, 7), create(path, mode="w").hold):
        with pytest.raises(StoreError, match=HELD.format(os.getpid())):
            use()
    add(first, 1)
    first.close()
    with pytest.raises(
        StoreError,
        match=r"another recorder writes to .*: 1 marks were left in it, 2 are there",
    ):
        second.hold()
    second.close()
    assert not (path / LOCK).exists()
    third = create(path)
    third.hold()
    with pytest.raises(StoreError, match="is being written by"):
        add(create(path), 2)
    del third  # the recorder is forgotten instead of closed
    assert not (path / LOCK).exists()


def refused(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_lock_is_freed_even_if_its_file_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(OSError, match="Read-only file system"):
            store.close()
    add(create(tmp_path / "run.zarr"), 1)
    assert_holds(tmp_path / "run.zarr", [0, 1])


def test_forked_process_may_not_write_and_leaves_the_lock(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.zarr"
    store = create(path)
    add(store, 0)

    def work() -> None:
        with pytest.raises(StoreError, match=HELD.format(os.getppid())):
            add(store, 1, 7)
        store.close()

    forked = child(work)
    add(store, 1)
    store.close()
    add(create(path), 2)  # the child is still alive
    forked.end(kill=True)
    assert_holds(path, [0, 1, 2])


def test_process_forked_after_a_mark_ends(tmp_path: Path) -> None:
    """Workers of a DataLoader end like this, by running the registered exit functions."""
    store = create(tmp_path / "run.zarr")
    add(store, 0)
    worker = multiprocessing.get_context("fork").Process(target=store.dataset().load)
    worker.start()
    # A worker that hangs, like zarr's threads in forked processes, would never end.
    worker.join(10)
    assert worker.exitcode == 0
    assert (tmp_path / "run.zarr" / LOCK).exists()


def test_two_recorders_that_begin_the_same_store(tmp_path: Path) -> None:
    for target in (tmp_path / "run.zarr", Remote()):
        first, second = create(target), create(target)
        add(first, 0)
        with pytest.raises(
            StoreError, match=r"another recorder writes .*created in the meantime"
        ):
            add(second, 0, 7)
        assert_holds(first, [0])
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


@pytest.mark.parametrize("remote", [False, True], ids=["no locks", "remote"])
def test_without_locks_the_root_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    # Some network disks answer like this.
    monkeypatch.setattr(fcntl, "flock", unsupported)
    target = Remote() if remote else tmp_path / "run.zarr"
    first = create(target)
    add(first, 0)
    second = create(target)
    add(first, 1)
    with pytest.raises(
        StoreError,
        match=r"another recorder writes to .*: 1 marks were left in it, 2 are there",
    ):
        add(second, 1, 7)
    second.close()
    add(first, 2)
    assert_holds(first, [0, 1, 2])


def test_reading_changes_nothing(tmp_path: Path) -> None:
    """Neither reading nor a refused or successful mark deletes files that resemble leftovers."""
    path = tmp_path / "run.zarr"
    recording(path)
    precious = [
        path / name
        for name in (
            ".0.partial",
            "epoch.partial",
            "ckpt/c.0",
            "c.0",
            "gate/c/.tcnn_probe.init",
        )
    ]
    for name in precious:
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(b"precious")
    before = contents(path)
    store = create(path)
    store.dataset().load()
    open_recording(path).load()
    with pytest.raises(StoreError, match="later than the last"):
        add(store, 0)
    store.close()
    assert contents(path) == before
    store = create(path)
    add(store, 1)
    store.close()
    assert all(name.read_bytes() == b"precious" for name in precious)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    "instead", ["nothing", "an empty directory", "another recording", "something else"]
)
def test_store_that_vanished(tmp_path: Path, instead: str, resumed: bool) -> None:
    path = tmp_path / "run.zarr"
    away = tmp_path / "away.zarr"
    store = create(path)
    add(store, 0)
    if resumed:
        store.close()
        store = create(path)
    path.rename(away)
    if instead == "another recording":
        foreign = EpochStore(path)
        foreign.create(GROUPS, {"made_by": "another"})
        add(foreign, 0)
    elif instead != "nothing":
        path.mkdir()
        (path / "notes.txt").write_text("") if instead == "something else" else None
    before = contents(tmp_path)
    with pytest.raises(
        StoreError, match=r"deleted or moved|another recorder writes to|something else"
    ):
        add(store, 1)
    assert contents(tmp_path) == before


def test_stale_lock_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's file can be read, and deleted if a group may write; while its process lives, it is respected."""
    recording(path := tmp_path / "run.zarr")
    (path / LOCK).write_text("process 1 since 2026")
    # Permissions are simulated, as root may open any file.
    inode = (path / LOCK).stat().st_ino
    open_as_owner = os.open

    def open_as_other(file: object, flags: int, *mode: int) -> int:
        if (
            file == path / LOCK
            and flags & os.O_RDWR
            and (path / LOCK).exists()
            and (path / LOCK).stat().st_ino == inode
        ):
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_as_owner(file, flags, *mode)

    monkeypatch.setattr(os, "open", open_as_other)
    with (path / LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            StoreError, match=r"run\.zarr is being written by process 1 since 2026"
        ):
            create(path).hold()
    # Here the file cannot be deleted; the lock is not held afterwards.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(OSError, match="Read-only file system"):
            create(path).hold()
    store = create(path)
    add(store, 1)
    assert (path / LOCK).read_text().startswith(f"process {os.getpid()} ")
    store.close()
    assert_holds(path, [0, 1])
