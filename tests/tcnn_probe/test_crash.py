"""A run that fails at any write leaves the epochs before it, and can be continued. Kills proper are in test_kill.py."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from zarr.storage import LocalStore

import tcnn_probe
from tcnn_probe import store as store_module
from tcnn_probe.store import EpochStore
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.tables import LAYERS, VARIABLES, assert_epochs, values

IMAGES = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0))


class Crash(BaseException):
    pass


@contextmanager
def crash_at_write(number: int) -> Iterator[list[str]]:
    """Let the next ``number`` objects be written, then fail at every one; gives the names of those asked for."""
    asked: list[str] = []
    original = LocalStore.set

    async def set_or_crash(self: LocalStore, key: str, value: Any) -> None:
        asked.append(key)
        if len(asked) > number:
            raise Crash
        await original(self, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "set", set_or_crash)
        yield asked


def no_commit(*args: Any) -> None:
    raise Crash


def epoch_store(path: Path) -> EpochStore:
    return EpochStore(path, LAYERS, VARIABLES, {})


@pytest.mark.parametrize("fresh", [{}, {"fresh": 0.5}], ids=["same scalars", "new scalar"])
def test_crash_at_every_write_of_an_epoch(tmp_path: Path, fresh: dict[str, float]) -> None:
    path, number = tmp_path / "run.zarr", 0
    store = epoch_store(path)
    store.append(0, values(0), {"top1": 0.25})
    while True:
        with crash_at_write(number) as asked:
            try:
                store.append(1, values(9), {"top1": 9.0, **fresh})
                break
            except Crash:
                number += 1
        assert_epochs(xr.open_zarr(path), [0])
        assert "fresh" not in xr.open_zarr(path)
        store = epoch_store(path)
        assert store.epochs == (0,)
    assert asked[-1] == "zarr.json"
    assert number == len(asked) >= 5
    assert xr.open_zarr(path).epoch.values.tolist() == [0, 1]


def test_crash_at_every_write_of_the_creation(tmp_path: Path) -> None:
    number = 0
    while True:
        path = tmp_path / str(number) / "run.zarr"
        with crash_at_write(number) as asked:
            try:
                epoch_store(path)
                break
            except Crash:
                number += 1
        assert not path.exists()
        assert_epochs(epoch_store(path).dataset(), [])
        assert [p.name for p in path.parent.iterdir()] == ["run.zarr"]
    assert number == len(asked) > 5


def test_write_that_lands_after_the_creation_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zarr writes several objects at once, each in a thread."""
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
        epoch_store(tmp_path / "run.zarr")
    for timer in late:
        timer.join()
    assert late
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [True, False], ids=["same recorder", "new recorder"])
def test_crash_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    model, path = Chain(), tmp_path / "run.zarr"
    recorder = tcnn_probe.record(model, path)
    for epoch in range(3):
        model((epoch + 1) * IMAGES)
        recorder.mark(epoch=epoch, top1=epoch)
    expected = recorder.dataset.load()
    model(7 * IMAGES)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_commit", no_commit)
        with pytest.raises(Crash):
            recorder.mark(epoch=3, top1=9.0, fresh=0.5)
    assert recorder.epochs == (0, 1, 2)
    xr.testing.assert_identical(recorder.dataset, expected)
    xr.testing.assert_identical(xr.open_zarr(path), expected)

    if not again:
        recorder.remove()
        recorder = tcnn_probe.record(model, path)
        model(7 * IMAGES)
    recorder.mark(epoch=3, top1=3, fresh=1.5)  # what was seen before the crash still counts, once
    ds = recorder.dataset
    xr.testing.assert_identical(ds.isel(epoch=slice(3)).drop_vars("fresh"), expected)
    np.testing.assert_array_equal(ds.top1, [0, 1, 2, 3])
    np.testing.assert_array_equal(ds.fresh, [np.nan, np.nan, np.nan, 1.5])
    np.testing.assert_array_equal(ds.images[3], [2, 2])
    with tcnn_probe.record(model) as other:
        model(7 * IMAGES)
        other.mark(epoch=3)
    np.testing.assert_array_equal(ds.entropy[3], other.dataset.entropy[0])


def test_scalar_of_a_crashed_epoch_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = epoch_store(tmp_path / "run.zarr")
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_commit", no_commit)
        with pytest.raises(Crash):
            store.append(0, values(9), {"fresh": 9.0})
    store = epoch_store(tmp_path / "run.zarr")
    for epoch in range(3):
        store.append(epoch, values(epoch), {"top1": epoch})
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert_epochs(ds, [0, 1, 2])
    assert "fresh" not in ds or np.isnan(ds.fresh).all()


def test_values_of_a_crashed_epoch_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = epoch_store(tmp_path / "run.zarr")
    store.append(0, values(0), {"top1": 0.0})
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_commit", no_commit)
        with pytest.raises(Crash):
            store.append(1, values(9), {"top1": 9.0})
    epoch_store(tmp_path / "run.zarr").append(2, values(2), {})
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert_epochs(ds, [0, 2])
    np.testing.assert_array_equal(ds.top1, [0.0, np.nan])


def test_temporary_files_of_a_killed_run_are_no_trouble(tmp_path: Path) -> None:
    """zarr writes to ``<name>.<random>.partial`` before it renames, so a kill can leave these anywhere."""
    path = tmp_path / "run.zarr"
    epoch_store(path).append(0, values(0), {})
    for folder in (path, path / "gate", path / "gate" / "c" / "0" / "0"):
        (folder / "zarr.0123456789abcdef.partial").write_bytes(b"half a fi")
    assert_epochs(xr.open_zarr(path), [0])
    store = epoch_store(path)
    store.append(1, values(1), {"fresh": 0.5})
    assert_epochs(xr.open_zarr(path), [0, 1])
    assert list(store.dataset().fresh.values)[1] == 0.5
    assert not list(path.rglob("*.partial"))
