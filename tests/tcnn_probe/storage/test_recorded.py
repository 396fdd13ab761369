"""The store as a user of ``tcnn_probe.record`` meets it: read, continued, refused, crashed."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tcnn_probe.storage import StoreError
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.storage.tables import Crash, contents, steps

IMAGES = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0))


def record_epochs(model: nn.Module, path: Path | None, epochs: range, **options: object) -> xr.Dataset:
    with tcnn_probe.record(model, path, **options) as recorder:
        for epoch in epochs:
            model((epoch + 1) * IMAGES)
            recorder.mark(epoch=epoch, top1=epoch / 7)
    return recorder.dataset


def test_memory_and_directory_hold_the_same_also_continued(tmp_path: Path) -> None:
    record_epochs(Chain(), tmp_path / "run.zarr", range(2))
    with tcnn_probe.record(Chain(), tmp_path / "run.zarr") as recorder:
        assert recorder.epochs == (0, 1)
        with pytest.raises(ValueError, match="epoch 1 is already marked"):
            recorder.mark(epoch=1)
    continued = record_epochs(Chain(), str(tmp_path / "run.zarr"), range(2, 4))
    kept = record_epochs(Chain(), None, range(4))
    for ds in (continued, xr.open_zarr(tmp_path / "run.zarr")):
        xr.testing.assert_identical(ds.assign_attrs(created_at=""), kept.assign_attrs(created_at=""))


def test_epochs_are_there_when_mark_returns(tmp_path: Path) -> None:
    model, path = Chain(), tmp_path / "run.zarr"
    with tcnn_probe.record(model, path) as recorder:
        for look in ("dataset", "tree"):
            with pytest.raises(RuntimeError, match="nothing is recorded yet"):
                getattr(recorder, look)
        assert not path.exists()
        for epoch in range(3):
            model(IMAGES)
            recorder.mark(epoch=epoch)
            with xr.open_zarr(path) as ds:
                assert ds.epoch.values.tolist() == list(range(epoch + 1))
                assert np.isfinite(ds.entropy.sel(layer="far")).all()


def other_schema(path: Path) -> None:
    record_epochs(Chain(), path, range(1))
    root = json.loads((path / "zarr.json").read_text())
    root["attributes"]["tcnn_probe_schema"] = 99
    (path / "zarr.json").write_text(json.dumps(root))


def other_names(path: Path) -> None:
    model = Chain()
    model.close = model.near
    model.forward = lambda x: model.far(model.close(x))  # type: ignore[method-assign]
    del model.near
    record_epochs(model, path, range(1))


def other_heads(path: Path) -> None:
    model = Chain()
    model.far = GPSA(5, 3, 3)
    record_epochs(model.eval(), path, range(1))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "schema": (other_schema, "run.zarr has schema version 99, expected 3"),
    "names": (other_names, r"a recording of other layers \('close' there, absent in this model\)"),
    "fewer layers": (
        lambda path: record_epochs(Chain(), path, range(1), layers="far"),
        r"\('near': absent there, {'kind': 'gpsa', 'heads': 9} here\)",
    ),
    "heads": (other_heads, r"\('far': {'kind': 'gpsa', 'heads': 9} there, {'kind': 'gpsa', 'heads': 25} here\)"),
    "model": (
        lambda path: record_epochs(nn.Sequential(Chain()).eval(), path, range(1)),
        r"a recording of another model \(of class 'Sequential', not 'Chain'\)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_and_nothing_changed(tmp_path: Path, what: str) -> None:
    make, message = REFUSED[what]
    make(tmp_path / "run.zarr")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=message):
        tcnn_probe.record(Chain(), tmp_path / "run.zarr")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("again", [True, False], ids=["same recorder", "new recorder"])
def test_crash_before_the_commit(tmp_path: Path, again: bool) -> None:
    model, path = Chain(), tmp_path / "run.zarr"
    recorder = tcnn_probe.record(model, path)
    for epoch in range(3):
        model((epoch + 1) * IMAGES)
        recorder.mark(epoch=epoch, top1=epoch)
    expected = recorder.dataset.load()
    model(7 * IMAGES)
    with steps(0, "run.zarr/zarr.json$"), pytest.raises(Crash):
        recorder.mark(epoch=3, top1=9.0, fresh=0.5)
    assert recorder.epochs == (0, 1, 2)
    xr.testing.assert_identical(recorder.dataset, expected)
    xr.testing.assert_identical(xr.open_zarr(path).load(), expected)

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


def test_store_deleted_between_resuming_and_the_next_mark(tmp_path: Path) -> None:
    model, path = Chain(), tmp_path / "run.zarr"
    record_epochs(model, path, range(3))
    with tcnn_probe.record(model, path) as recorder:
        path.rename(tmp_path / "away.zarr")
        model(IMAGES)
        with pytest.raises(StoreError, match=r"run.zarr was deleted or moved while it was recorded"):
            recorder.mark(epoch=3)
        assert [p.name for p in tmp_path.iterdir()] == ["away.zarr"]
        (tmp_path / "away.zarr").rename(path)
        recorder.mark(epoch=3)  # what was seen is kept for another try
    assert xr.open_zarr(path).images[3].values.tolist() == [2, 2]
