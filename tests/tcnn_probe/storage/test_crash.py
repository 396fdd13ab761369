"""After a failure or loss of power at any step, earlier marks are there and others follow."""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

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
    recording,
    steps,
)

# These steps change the store; the last one brings the root, or a new folder, to the disk.
WRITES = r"^replace|^set|^fsync .*/(run.zarr|\d+)$"


def copied(source: Any, folder: Path) -> Any:
    """Return a copy of a place, with what lies beside it."""
    if isinstance(source, Path):
        return Path(shutil.copytree(source.parent, folder)) / source.name
    return Remote(dict(source._store_dict))


@pytest.mark.parametrize("kind", ["directory", "remote"])
@pytest.mark.parametrize("marks", [0, 1])
def test_crash_at_every_write_of_a_mark(tmp_path: Path, kind: str, marks: int) -> None:
    """Both the store that crashed and, as after a kill, another one can continue."""
    source = Remote() if kind == "remote" else tmp_path / "source" / "run.zarr"
    if marks:
        recording(source)
    else:
        (tmp_path / "source").mkdir()
    top1 = {0: 0.0} if marks else {}
    # A first mark has many steps, of which every third is tried.
    for number in count(step=1 if marks else 3):
        target = copied(source, tmp_path / str(number))
        store = create(target)
        with steps(number, WRITES) as done:
            try:
                add(store, marks, 9, top1=9.0, fresh=9.0)
                break
            except Crash:
                # The mark is there but was not announced.
                landed = marks > 0 and f"replace {target}/zarr.json" in done[:-1]
        assert store.marks == (*range(marks),)
        other = copied(target, tmp_path / f"{number} killed")
        if landed:
            assert_holds(other, {0: 0, 1: 9}, {"top1": {0: 0.0, 1: 9.0}, "fresh": {1: 9.0}})
        elif marks:
            assert_holds(other, [0], {"top1": top1})
        else:
            with pytest.raises(ValueError, match="nothing is there"):
                open_recording(other)
        for writer in (store, *(() if landed else (create(other),))):
            add(writer, marks, fresh=0.5)
            scalars = {"top1": top1, "fresh": {marks: 0.5}}
            assert_holds(writer, list(range(marks + 1)), scalars if marks else {"fresh": {0: 0.5}})
    # Fewer steps would mean that some writes are not counted.
    assert number >= len(done) > 10
    # Only a directory has a step after the root, which brings its folder to the disk.
    assert landed == (kind == "directory" and marks > 0)
    assert_holds(store, {0: 0, 1: 9} if marks else {0: 9})
    assert kind == "directory" or ".tcnn_probe.init" not in target._store_dict


def test_scalar_with_the_name_of_a_variable_recorded_later(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "run.zarr")
    store.append(0, {"": Group({}, {})}, {"": {}}, {"gate": 0.5})
    with pytest.raises(ValueError, match="'gate' is the name of something else"):
        add(store, 1)


@pytest.mark.parametrize(
    "on",
    # The files are the root, a chunk that is extended, a new array, and a chunk of a new mark.
    ["run.zarr/.zarr.json.partial$", "gate/c/0/0/0$", "fresh/c/0$", "saliency/c/0/.*$"],
)
def test_full_disk(tmp_path: Path, on: str) -> None:
    def full() -> OSError:
        return OSError(errno.ENOSPC, "No space left on device")

    store = create(tmp_path / "run.zarr")
    add(store, 0, top1=0.25)
    # The second attempt would fail with another error if the first had left anything behind.
    for _ in range(2):
        with steps(0, on, full), pytest.raises(OSError, match="No space left"):
            add(store, 1, 9, top1=9.0, fresh=9.0)
        assert store.marks == (0,)
        assert_holds(tmp_path / "run.zarr", [0], {"top1": {0: 0.25}})
    add(store, 1, top1=0.5, fresh=1.0)
    store.close()
    assert not list(tmp_path.rglob(".*"))
    assert_holds(tmp_path / "run.zarr", [0, 1], {"top1": {0: 0.25, 1: 0.5}, "fresh": {1: 1.0}})


def test_unfinished_creation_is_cleared_by_the_next_recorder(tmp_path: Path) -> None:
    if not (pid := os.fork()):
        os.replace = lambda *_: os._exit(0)
        add(create(tmp_path / "run.zarr"), 0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    # These names of the user resemble the recorder's own leftovers.
    users = {".run.zarr.mine.init", ".run2.zarr.x.init", "run.zarr.init"}
    for name in users:
        (tmp_path / name).mkdir()
    store = EpochStore(tmp_path / "run.zarr")
    assert store.groups is None
    assert len(list(tmp_path.iterdir())) == 5  # with the lock
    add(store, 0)
    store.close()
    assert {p.name for p in tmp_path.iterdir()} == {"run.zarr", *users}


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
