"""The background writer: in order, bounded, nothing dropped, nothing silent."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from zarr.storage import LocalStore

from tcnn_probe.storage import EpochStore, WriteError
from tests.tcnn_probe.storage.crashes import Crash, crash_when
from tests.tcnn_probe.storage.kills import IMPORTS
from tests.tcnn_probe.storage.tables import add, assert_holds, create, values

BYTES = sum(value.nbytes for group in values(0).values() for value in group.values()) + 3 * 8  # and three coordinates


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Writes wait until the event is set, at the latest when this ends."""
    go, original = threading.Event(), LocalStore.set

    async def held(self: LocalStore, key: str, value: Any) -> None:
        while not go.is_set():
            await asyncio.sleep(0.002)
        await original(self, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "set", held)
        try:
            yield go
        finally:
            go.set()


def test_marks_come_in_order(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    for mark in range(13):
        add(store, mark, wait=mark % 5 == 4, top1=mark / 7)
        assert store.marks == tuple(range(mark + 1))
        if mark % 5 == 4:
            assert_holds(tmp_path / "run.zarr", list(range(mark + 1)))
    store.flush()
    assert_holds(tmp_path / "run.zarr", list(range(13)), {"top1": {mark: mark / 7 for mark in range(13)}})


@pytest.mark.parametrize("end", ["flush", "close"])
def test_returns_before_it_is_written(tmp_path: Path, end: str) -> None:
    store = create(tmp_path / "run.zarr")
    with held_up() as go:
        for mark in range(3):
            add(store, mark, wait=False)
        assert store.marks == (0, 1, 2)
        assert_holds(tmp_path / "run.zarr", [])
        assert_holds(store, [])
        threading.Timer(0.05, go.set).start()
        getattr(store, end)()
    assert_holds(tmp_path / "run.zarr", [0, 1, 2])


def test_arrays_may_be_used_again(tmp_path: Path) -> None:
    store, reused = create(tmp_path / "run.zarr"), values(0)
    with held_up():
        for mark in range(3):
            for path, group in values(mark).items():
                for name, value in group.items():
                    reused[path][name][...] = value
            store.append(mark, reused, {}, wait=False)
            for group in reused.values():
                for value in group.values():
                    value[...] = 17
    store.flush()
    assert_holds(tmp_path / "run.zarr", [0, 1, 2])


@pytest.mark.parametrize(("room", "fit"), [(2 * BYTES, 2), (3 * BYTES - 1, 2), (3 * BYTES, 3), (1, 1)])
def test_blocks_when_full(tmp_path: Path, room: int, fit: int) -> None:
    store = create(tmp_path / "run.zarr", queue_bytes=room)
    done: list[int] = []

    def append() -> None:
        for mark in range(5):
            add(store, mark, wait=False)
            done.append(mark)

    with held_up() as go:
        thread = threading.Thread(target=append)
        thread.start()
        patience = time.monotonic() + 5
        while len(done) < fit and time.monotonic() < patience:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(done) == fit
        go.set()
        thread.join()
    store.close()
    assert_holds(tmp_path / "run.zarr", list(range(5)))


def fails_at_mark_2() -> Any:
    """The first commit of mark 2 fails, the third in all."""
    commits = []

    def fails(number: int, key: str) -> bool:
        commits.extend([key] if key == "zarr.json" else [])
        return len(commits) == 3 and key == "zarr.json"

    return crash_when(fails, lambda: OSError("the disk is full"))


MESSAGE = r"mark 2 could not be written \(OSError: the disk is full\), nor any after it; those before it are safe"


def queue_until_failure(store: EpochStore) -> None:
    """Marks 0 ... 5, of which 2 fails; returns when the writer has come to the end."""
    with held_up() as go:
        for mark in range(6):
            add(store, mark, wait=False)
        go.set()
        while store._writer.pending:
            time.sleep(0.005)


@pytest.mark.parametrize("end", ["append", "append and wait", "flush", "close"])
def test_error_is_raised_and_leaves_no_holes(tmp_path: Path, end: str) -> None:
    store = create(tmp_path / "run.zarr")
    with fails_at_mark_2():
        queue_until_failure(store)
        with pytest.raises(WriteError, match=MESSAGE) as caught:
            {
                "append": lambda: add(store, 6, wait=False),
                "append and wait": lambda: add(store, 6),
                "flush": store.flush,
                "close": store.close,
            }[end]()
    assert isinstance(caught.value.__cause__, OSError)
    assert store.marks == (0, 1)
    assert_holds(tmp_path / "run.zarr", [0, 1])
    store.close()  # it has been said
    assert_holds(create(tmp_path / "run.zarr"), [0, 1])


def test_going_on_after_an_error(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    with fails_at_mark_2():
        queue_until_failure(store)
        for _ in range(2):  # marks 2 ... 6 would be a hole
            with pytest.raises(WriteError, match=MESSAGE):
                add(store, 7)
        with pytest.raises(WriteError, match=MESSAGE):
            store.flush()
    add(store, 2)
    add(store, 3, wait=False)
    store.close()
    assert_holds(tmp_path / "run.zarr", [0, 1, 2, 3])


def test_error_while_it_is_waited_for_is_the_error_itself(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    with crash_when(lambda number, key: key == "zarr.json"), pytest.raises(Crash):
        add(store, 0, 9)
    store.flush()
    add(store, 1)  # the caller knows that 0 failed
    store.close()
    assert_holds(tmp_path / "run.zarr", [1])


def test_interrupt_while_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait, not the write."""

    def interrupt(self: Any, timeout: Any = None) -> None:
        raise KeyboardInterrupt

    store = create(tmp_path / "run.zarr")
    with held_up(), monkeypatch.context() as patch:
        # of the writer's futures only: zarr waits for its own in another way
        patch.setattr(Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            add(store, 0)
        assert store.marks == (0,)
    add(store, 1)
    assert_holds(tmp_path / "run.zarr", [0, 1])


def test_one_thread_at_most(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = create(tmp_path / "run.zarr")
    for mark in range(7):
        add(store, mark, wait=False)
    mine = [t for t in set(threading.enumerate()) - before if t.name.startswith("tcnn_probe_writer")]
    assert len(mine) == 1
    store.close()
    assert not mine[0].is_alive()


PROGRAM = """
store = create(sys.argv[1])
for mark in range(23):
    add(store, mark, wait=False)
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise RuntimeError('of the user')"])
def test_program_that_ends_without_close(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", IMPORTS + PROGRAM + end, tmp_path / "run.zarr"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("of the user" in run.stderr) if "user" in end else (run.stderr == "")
    assert_holds(tmp_path / "run.zarr", list(range(23)))


FAILING = """
import shutil
store = create(sys.argv[1])
shutil.rmtree(sys.argv[1])
open(sys.argv[1], "w").close()
add(store, 7, wait=False)
"""


def test_program_that_ends_before_an_error_was_raised(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTS + FAILING, tmp_path / "run.zarr"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "WriteError: mark 7 could not be written" in run.stderr
