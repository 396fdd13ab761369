"""One writer at a time, and readers that change nothing."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tcnn_probe.storage import StoreError
from tcnn_probe.storage.directory import LOCK
from tests.tcnn_probe.storage.soak import Child
from tests.tcnn_probe.storage.tables import (
    Remote,
    add,
    assert_holds,
    contents,
    create,
)

HELD = "run.zarr is being written by another recorder: one at a time"


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
        with pytest.raises(StoreError, match=HELD):
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
    add(create(path), 2)


def test_two_recorders_that_begin_the_same_store(tmp_path: Path) -> None:
    for target in (tmp_path / "run.zarr", Remote()):
        first, second = create(target), create(target)
        add(first, 0)
        with pytest.raises(StoreError, match=r"another recorder writes .*created in the meantime"):
            add(second, 0, 7)
        assert_holds(first, [0])
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_the_root_is_compared_where_there_is_no_lock() -> None:
    first = create(target := Remote())
    add(first, 0)
    second = create(target)
    add(first, 1)
    with pytest.raises(
        StoreError,
        match=r"another recorder writes to .*: 1 marks were left in it, 2 are there",
    ):
        add(second, 1, 7)
    add(first, 2)
    assert_holds(first, [0, 1, 2])


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ("nothing", "deleted or moved"),
        ("an empty directory", "deleted or moved"),
        ("another recording", "another recorder writes to"),
    ],
)
def test_store_that_vanished(tmp_path: Path, instead: str, message: str) -> None:
    path = tmp_path / "run.zarr"
    store = create(path)
    add(store, 0)
    path.rename(tmp_path / "away.zarr")
    if instead == "another recording":
        add(create(path), 0)
    elif instead == "an empty directory":
        path.mkdir()
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=message):
        add(store, 1)
    assert contents(tmp_path) == before
