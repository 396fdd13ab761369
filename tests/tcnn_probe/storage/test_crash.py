"""After a failure or loss of power at any step, earlier marks are there and others follow."""

import errno
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tcnn_probe.schema import Group
from tcnn_probe.storage import EpochStore, open_recording
from tcnn_probe.storage import directory as module
from tests.tcnn_probe.storage.tables import (
    Crash,
    Remote,
    add,
    assert_holds,
    contents,
    create,
    kills,
    recording,
    steps,
)


@pytest.mark.parametrize(
    ("kind", "marks", "every"),
    [("directory", 0, 23), ("directory", 1, 5), ("remote", 0, 13), ("remote", 1, 3)],
)
def test_a_mark_that_is_killed_at_any_change_can_be_repeated(
    tmp_path: Path, kind: str, marks: int, every: int
) -> None:
    source = Remote() if kind == "remote" else tmp_path / "source" / "run.zarr"
    if marks:
        recording(source)
    else:
        (tmp_path / "source").mkdir()

    def mark() -> None:
        add(create(source), marks, 9, top1=9.0, fresh=9.0)

    # A sample of the changes is tried, and the last one, which brings the root.
    last = {"directory": rf"{source}(/zarr\.json)?$", "remote": r"set zarr\.json$"}[kind]
    changes, copies = kills(source, tmp_path, mark, every, last)
    assert re.search(last, changes[-1])
    assert len(copies) > 3
    for copy in copies:
        if marks:
            assert_holds(copy, [0], {"top1": {0: 0.0}})
        else:
            with pytest.raises(ValueError, match="nothing is there"):
                open_recording(copy)
        store = create(copy)
        add(store, marks, fresh=0.5)
        store.close()
        scalars = {"fresh": {marks: 0.5}} | ({"top1": {0: 0.0}} if marks else {})
        assert_holds(copy, list(range(marks + 1)), scalars)
        if kind == "directory":  # nothing of the killed mark lies beside it
            assert [entry.name for entry in copy.parent.iterdir()] == [copy.name]
    assert_holds(source, {0: 0, 1: 9} if marks else {0: 9})
    assert kind == "directory" or ".tcnn_probe.init" not in source._store_dict


def test_scalar_with_the_name_of_a_variable_recorded_later(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "run.zarr")
    store.append(0, {"": Group({}, {})}, {"": {}}, {"gate": 0.5})
    with pytest.raises(ValueError, match="'gate' is the name of something else"):
        add(store, 1)


@pytest.mark.parametrize(
    ("kind", "marks", "on"),
    [
        # The files are the root, a chunk that is extended, a new array, and a chunk of a new mark.
        ("directory", 1, "run.zarr/.zarr.json.partial$"),
        ("directory", 1, "gate/c/0/0/0$"),
        ("directory", 1, "fresh/c/0$"),
        ("directory", 1, "fsync .*saliency/c/0/.*$"),
        ("directory", 0, "replace .*run.zarr$"),
        ("remote", 0, "gate/c/0/0/0$"),
        ("remote", 1, "set zarr.json$"),
    ],
)
def test_full_disk(tmp_path: Path, kind: str, marks: int, on: str) -> None:
    def full() -> OSError:
        return OSError(errno.ENOSPC, "No space left on device")

    target = Remote() if kind == "remote" else tmp_path / "run.zarr"
    store = create(target)
    for mark in range(marks):
        add(store, mark, top1=0.0)
    top1 = dict.fromkeys(range(marks), 0.0)
    # The second attempt would fail with another error if the first had left anything behind.
    for _ in range(2):
        with steps(0, on, full), pytest.raises(OSError, match="No space left"):
            add(store, marks, 9, top1=9.0, fresh=9.0)
        assert store.marks == (*range(marks),)
        if marks:
            assert_holds(target, [0], {"top1": top1})
    add(store, marks, top1=0.5, fresh=1.0)
    store.close()
    assert not list(tmp_path.rglob(".*"))
    scalars = {"top1": top1 | {marks: 0.5}, "fresh": {marks: 1.0}}
    assert_holds(target, list(range(marks + 1)), scalars)


def test_a_mark_that_is_there_but_was_not_announced_can_be_repeated(tmp_path: Path) -> None:
    store = create(path := tmp_path / "run.zarr")
    add(store, 0)
    with steps(0, "fsync .*run.zarr$"), pytest.raises(Crash):
        add(store, 1, 9)
    assert store.marks == (0,)
    assert_holds(path, {0: 0, 1: 9})
    add(store, 1)
    assert_holds(path, [0, 1])


@pytest.mark.parametrize("slow", ["gate/c/0/0/0", "zarr.json"])
def test_interrupt_from_the_keyboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Writes in progress end before the interrupt is raised: they cannot overwrite later ones."""
    # Background jobs ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    store = create(tmp_path / "run.zarr")
    add(store, 0)
    original: Callable[..., None] = module.DurableStore._write
    ended: set[Path] = set()

    def slowly(self: module.DurableStore, path: Path, data: bytes) -> None:
        if path == tmp_path / "run.zarr" / slow:
            threading.Timer(
                0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            ).start()
            time.sleep(0.4)
        original(self, path, data)
        ended.add(path)

    with monkeypatch.context() as patch:
        patch.setattr(module.DurableStore, "_write", slowly)
        with pytest.raises(KeyboardInterrupt):
            add(store, 1, 9)
        assert tmp_path / "run.zarr" / slow in ended
    signal.signal(signal.SIGINT, before)
    # The root may be there by now; the mark is not announced, and can be repeated.
    assert store.marks == (0,)
    add(store, 1)
    assert_holds(tmp_path / "run.zarr", [0, 1])


def durable(done: list[str], changed: Iterable[Path], folders: Iterable[Path]) -> int:
    """Return the step at which all was on the disk; a file is synced before it is named."""
    times = []
    for path in changed:
        written = done.index(f"fsync {path.parent}/.{path.name}.partial")
        named = done.index(f"replace {path}")
        assert written < named
        times.append(done.index(f"fsync {path.parent}", named))
    return max(times + [done.index(f"fsync {folder.parent}") for folder in folders])


@pytest.mark.parametrize("mark", ["the first", "same scalars", "new scalar"])
def test_chunks_reach_the_disk_before_the_root(tmp_path: Path, mark: str) -> None:
    """The first mark fills a folder of another name, which it renames in the end."""
    path = tmp_path / "a" / "b" / "run.zarr"
    store, before, folder = create(path), {}, path
    if mark == "the first":
        folder = path.with_name(".run.zarr.tcnn_probe.init")
    else:
        add(store, 0, top1=0.25)
        before = contents(path)
    with steps() as done:
        add(store, 1, **({"fresh": 0.5} if mark == "new scalar" else {}))
    new = {name: data for name, data in contents(path).items() if before.get(name, 0) != data}
    files = [folder / name for name, data in new.items() if data is not None]
    if mark != "the first":
        # These are the root, and the lengths and chunks of marks and variables; of top1, which has
        # no value, the length.
        assert len(files) == 1 + 2 * (3 + 5 + (mark == "new scalar")) + 1
    files.remove(folder / "zarr.json")
    last = durable(done, files, [folder / name for name, data in new.items() if data is None])
    commit = [
        f"fsync {folder}/.zarr.json.partial",
        f"replace {folder}/zarr.json",
        f"fsync {folder}",
    ]
    assert last < done.index(commit[0])
    if mark == "the first":
        commit += [f"replace {path}", f"fsync {path.parent}"]
        assert done[:2] == [f"fsync {tmp_path}", f"fsync {tmp_path / 'a'}"]
    assert done[-len(commit) :] == commit
