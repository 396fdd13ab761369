"""A run that fails at any write leaves the marks before it, and can be continued. Kills proper are in test_kill.py."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from tcnn_probe.storage import EpochStore, open_recording
from tcnn_probe.storage import chunks as layout
from tests.tcnn_probe.storage.crashes import Crash, Remote, crash_at_write, crash_when
from tests.tcnn_probe.storage.tables import MAPS, add, assert_holds, create, values


def place(kind: str, folder: Path) -> Any:
    return folder / "run.zarr" if kind == "directory" else Remote()


def until_it_succeeds(attempt: Callable[[], object], check: Callable[[], object]) -> list[str]:
    """Let something fail at its first write, then at its second, ..., until it does not; ``check`` after each."""
    number = 0
    while True:
        with crash_at_write(number) as asked:
            try:
                attempt()
            except Crash:
                number += 1
            else:
                assert number == len(asked)
                return asked
        check()


@pytest.mark.parametrize("resumed", [False, True], ids=["same store", "opened again"])
@pytest.mark.parametrize("fresh", [{}, {"fresh": 0.5}], ids=["same scalars", "new scalar"])
@pytest.mark.parametrize("kind", ["directory", "remote"])
def test_crash_at_every_write_of_a_mark(tmp_path: Path, kind: str, fresh: dict[str, float], resumed: bool) -> None:
    target = place(kind, tmp_path)
    store = create(target)
    add(store, 0, top1=0.25)
    asked_for = []

    def check() -> None:
        nonlocal store
        assert_holds(store, [0], {"top1": {0: 0.25}})
        assert store.marks == (0,)
        if resumed:
            store = create(target)
            assert_holds(store, [0], {"top1": {0: 0.25}})
        asked_for.append(1)

    asked = until_it_succeeds(lambda: add(store, 1, 9, top1=9.0, **fresh), check)
    assert asked[-1] == "zarr.json"
    assert len(asked_for) == len(asked) >= 9
    scalars = {"top1": {0: 0.25, 1: 9.0}} | {name: {1: value} for name, value in fresh.items()}
    assert_holds(store, {0: 0, 1: 9}, scalars)
    assert_holds(create(target), {0: 0, 1: 9}, scalars)


@pytest.mark.parametrize("kind", ["directory", "remote"])
def test_crash_at_every_write_of_the_creation(tmp_path: Path, kind: str) -> None:
    number = 0
    while True:
        (tmp_path / str(number)).mkdir()
        target = place(kind, tmp_path / str(number))
        with crash_at_write(number) as asked:
            try:
                create(target)
                break
            except Crash:
                number += 1
        if kind == "directory":
            assert list(target.parent.iterdir()) == []
        with pytest.raises(ValueError, match="nothing is there"):
            open_recording(target)
        again = create(target)
        assert_holds(again, [])
        add(again, 0)
        assert_holds(create(target), [0])
    assert number == len(asked) > 20
    assert kind == "directory" or asked[-1] == "zarr.json"


def test_unfinished_creation_is_not_mistaken_for_a_recording_of_the_user() -> None:
    store = Remote()
    with crash_when(lambda number, key: key == "zarr.json"), pytest.raises(Crash):
        create(store)
    assert EpochStore(store).groups is None
    create(store)
    assert ".tcnn_probe.init" not in store._store_dict
    assert_holds(create(store), [])


def test_write_that_lands_after_the_creation_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt from the keyboard does not stop zarr's thread."""
    late: list[threading.Timer] = []

    async def fail(self: LocalStore, key: str, value: Any) -> None:
        def land() -> None:
            (self.root / "gate").mkdir(parents=True, exist_ok=True)
            (self.root / "gate" / "zarr.json").write_text("{}")

        late.append(threading.Timer(0.005, land))
        late[-1].start()
        raise Crash

    monkeypatch.setattr(LocalStore, "set", fail)
    with pytest.raises(Crash):
        create(tmp_path / "run.zarr")
    for timer in late:
        timer.join()
    assert late
    assert list(tmp_path.iterdir()) == []


def test_crash_at_every_write_of_closing(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"

    def attempt() -> None:
        store = create(path)
        add(store, len(store.marks))
        with crash_at_write(number):
            store.close()

    number = 0
    while True:
        try:
            attempt()
            break
        except Crash:
            number += 1
        assert_holds(path, list(range(number)))
    assert number > 5
    assert_holds(path, list(range(number + 1)))
    assert zarr.open_group(path, mode="r", use_consolidated=False)["gate"].shape[0] == number + 1


@pytest.mark.parametrize("key", ["zarr.json", "gate/c/0/0/0", "fresh/c/0", f"{MAPS}/saliency/c/1/0/0/0/0/0"])
def test_full_disk(tmp_path: Path, key: str) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0, top1=0.25)

    def full() -> OSError:
        return OSError(errno.ENOSPC, "No space left on device")

    with crash_when(lambda number, asked: asked == key, full):
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                add(store, 1, 9, top1=9.0, fresh=9.0)
            assert store.marks == (0,)
            assert_holds(tmp_path / "run.zarr", [0], {"top1": {0: 0.25}})
    add(store, 1, top1=0.5, fresh=1.0)
    assert_holds(tmp_path / "run.zarr", [0, 1], {"top1": {0: 0.25, 1: 0.5}, "fresh": {1: 1.0}})


def test_full_disk_when_it_is_closed(tmp_path: Path) -> None:
    """What close() gives back is spare room: that it cannot harms no mark."""
    store = create(tmp_path / "run.zarr")
    add(store, 0)
    with crash_when(lambda number, asked: True, lambda: OSError(errno.ENOSPC, "No space left on device")) as asked:
        store.close()
    assert asked
    assert_holds(tmp_path / "run.zarr", [0])


def test_commit_that_landed_and_was_reported_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = create(tmp_path / "run.zarr")
    original = LocalStore.set

    async def lands(self: LocalStore, key: str, value: Any) -> None:
        await original(self, key, value)
        if key == "zarr.json":
            raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "set", lands)
        with pytest.raises(TimeoutError):
            add(store, 0, 9)
    add(store, 0)
    add(store, 1)
    assert_holds(tmp_path / "run.zarr", [0, 1])


def test_scalar_of_a_crashed_mark_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the name comes again, in a later chunk."""
    monkeypatch.setattr(layout, "_MARKS_PER_CHUNK", (1, 3))
    for resumed in (False, True):
        path = tmp_path / str(resumed)
        store = create(path)
        with crash_when(lambda number, key: key == "zarr.json"), pytest.raises(Crash):
            add(store, 0, 9, fresh=9.0)
        store = create(path) if resumed else store
        assert (path / "fresh").exists() == (not resumed)
        for mark in range(5):
            add(store, mark, **({"fresh": 4.0} if mark == 4 else {}))
        assert_holds(path, list(range(5)), {"fresh": {4: 4.0}})


def test_own_metadata_of_a_crashed_mark_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark with which the arrays grow fails before that is written: it is for those who read without the root."""
    monkeypatch.setattr(layout, "_MARKS_PER_CHUNK", (1, 3))
    store = create(tmp_path / "run.zarr")
    for mark in range(3):
        add(store, mark)
    with crash_at_write(0), pytest.raises(Crash):
        add(store, 3)
    add(store, 3)
    group = zarr.open_group(tmp_path / "run.zarr", mode="r", use_consolidated=False)
    assert (group["gate"].shape[0], group["epoch"].shape[0]) == (6, 6)


def test_values_of_a_crashed_mark_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    store = create(path)
    add(store, 0, top1=0.0)
    with crash_when(lambda number, key: key == "zarr.json"), pytest.raises(Crash):
        add(store, 1, 9, top1=9.0)
    add(create(path), 2)
    assert_holds(path, [0, 2], {"top1": {0: 0.0}})


def test_temporary_files_of_a_killed_run_are_no_trouble(tmp_path: Path) -> None:
    """zarr writes to ``<name>.<random>.partial`` before it renames, so a kill can leave these anywhere."""
    path = tmp_path / "run.zarr"
    add(create(path), 0)
    for folder in (path, path / "gate", path / "gate" / "c" / "0" / "0"):
        (folder / "zarr.0123456789abcdef.partial").write_bytes(b"half a fi")
    assert_holds(path, [0])
    store = create(path)
    add(store, 1, fresh=0.5)
    assert_holds(path, [0, 1], {"fresh": {1: 0.5}})
    assert not list(path.rglob("*.partial"))


def test_maps_that_are_all_fill_after_a_crashed_mark(tmp_path: Path) -> None:
    """A shard without values is no object: the one of the crashed mark must go."""
    store = create(tmp_path / "run.zarr")
    empty = values(0)
    empty[MAPS] = {name: np.full_like(value, np.nan) for name, value in empty[MAPS].items()}
    with crash_when(lambda number, key: key == "zarr.json"), pytest.raises(Crash):
        add(store, 0, 9)
    store.append(0, empty, {})
    assert open_recording(tmp_path / "run.zarr")[MAPS].saliency.isnull().all()
