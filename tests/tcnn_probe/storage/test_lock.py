"""One writer at a time, and readers that change nothing."""

from pathlib import Path

import pytest

from tcnn_probe.storage import StoreError
from tests.tcnn_probe.storage.tables import Remote, add, assert_holds, contents, create, recording

HELD = "run.zarr is being written by another recorder: end it first"


def test_second_recorder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    first, late = create(path), create(path)
    for store in (first, late):
        store.hold()  # before the first mark, no one is refused
    add(first, 0)
    second = create(path)
    replacing = create(path, mode="w").hold
    for use in (lambda: add(late, 0, 7), second.hold, lambda: add(second, 1, 7), replacing):
        with pytest.raises(StoreError, match=HELD):
            use()
    add(first, 1)
    first.close()
    with pytest.raises(
        StoreError, match=r"another recorder writes to .*: 1 marks were left in it, 2 are there"
    ):
        second.hold()
    second.close()
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]  # no lock file
    third = create(path)
    third.hold()
    with pytest.raises(StoreError, match="is being written by"):
        add(create(path), 2)
    del third  # the recorder is forgotten instead of closed
    add(create(path), 2)


@pytest.mark.parametrize("marks", [0, 1])
def test_the_root_is_compared_where_there_is_no_lock(marks: int) -> None:
    target = Remote()
    stores = [create(target)]
    if marks:
        add(stores[0], 0)
    stores.append(create(target))
    add(stores[0], marks)
    with pytest.raises(
        StoreError,
        match=f"another recorder writes to .*: {marks} marks were left in it, {marks + 1} are",
    ):
        add(stores[1], marks, 7)
    add(stores[0], marks + 1)
    assert_holds(stores[0], list(range(marks + 2)))


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
        recording(tmp_path / "other.zarr").close()
        (tmp_path / "other.zarr").rename(path)
    elif instead == "an empty directory":
        path.mkdir()
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=message):
        add(store, 1)
    assert contents(tmp_path) == before
