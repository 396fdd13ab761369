"""The store as a user meets it: read, continued, refused."""

import json
import os
import shutil
import subprocess
import sys
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

IMAGES = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0))


def record_epochs(model: nn.Module, path: Path | None, epochs: range) -> xr.Dataset:
    with tcnn_probe.record(model, path) as recorder:
        for epoch in epochs:
            model((epoch + 1) * IMAGES)
            recorder.mark(epoch=epoch, top1=epoch / 7)
    return recorder.dataset


def contents(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_memory_and_directory_hold_the_same(tmp_path: Path) -> None:
    stored = record_epochs(Chain(), tmp_path / "run.zarr", range(3))
    kept = record_epochs(Chain(), None, range(3))
    opened = xr.open_zarr(tmp_path / "run.zarr")
    for ds in (kept, opened):
        xr.testing.assert_identical(ds.assign_attrs(created_at=""), stored.assign_attrs(created_at=""))


def test_epochs_are_there_when_mark_returns(tmp_path: Path) -> None:
    model = Chain()
    with tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        for epoch in range(3):
            model(IMAGES)
            recorder.mark(epoch=epoch)
            with xr.open_zarr(tmp_path / "run.zarr") as ds:
                assert ds.epoch.values.tolist() == list(range(epoch + 1))
                assert np.isfinite(ds.entropy.sel(layer="far")).all()


def test_read_and_plotted_where_torch_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    stored = record_epochs(Chain(), path, range(3))
    code = """
import sys, warnings
warnings.simplefilter("error")
import xarray as xr
ds = xr.open_zarr(sys.argv[1])
lines = ds.gate.sel(layer=sys.argv[2]).plot.line(x="epoch")
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "timm", "tcnn_probe", "tcnn_model")]
print(lines[0].axes.get_ylabel())
print(*(line.get_ydata()[-1].item() for line in lines))
"""
    env = {**os.environ, "MPLBACKEND": "Agg"}
    run = subprocess.run(
        [sys.executable, "-c", code, path, "far"], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    label, drawn = run.stdout.splitlines()
    assert label == "gate [1]"
    np.testing.assert_allclose([float(y) for y in drawn.split()], stored.gate.sel(layer="far", epoch=2), rtol=1e-12)


@pytest.mark.parametrize("kept", [True, False])
def test_nothing_is_there_before_the_first_epoch(tmp_path: Path, kept: bool) -> None:
    path = None if kept else tmp_path / "run.zarr"
    with tcnn_probe.record(Chain(), path) as recorder:
        assert recorder.epochs == ()
        for look in ("dataset", "tree"):
            with pytest.raises(RuntimeError, match="nothing is recorded yet"):
                getattr(recorder, look)
    assert not list(tmp_path.iterdir())


def test_continued_by_another_recorder(tmp_path: Path) -> None:
    record_epochs(Chain(), tmp_path / "run.zarr", range(2))
    with tcnn_probe.record(Chain(), tmp_path / "run.zarr") as recorder:
        assert recorder.epochs == (0, 1)
        with pytest.raises(ValueError, match="epoch 1 is already marked"):
            recorder.mark(epoch=1)
    continued = record_epochs(Chain(), str(tmp_path / "run.zarr"), range(2, 4))
    whole = record_epochs(Chain(), None, range(4))
    xr.testing.assert_identical(continued.assign_attrs(created_at=""), whole.assign_attrs(created_at=""))


def test_parents_are_made_and_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "a" / "b" / "run.zarr", tmp_path / "empty"):
        assert record_epochs(Chain(), path, range(1)).epoch.values.tolist() == [0]
    assert names(tmp_path) == ["a", "empty"]
    assert names(tmp_path / "a" / "b") == ["run.zarr"]


def test_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain()
    monkeypatch.chdir(tmp_path)
    with tcnn_probe.record(model, "run.zarr") as recorder:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        model(IMAGES)
        recorder.mark(epoch=0)
    assert xr.open_zarr(tmp_path / "run.zarr").epoch.values.tolist() == [0]
    assert names(tmp_path / "elsewhere") == []


def test_url_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="s3://bucket/run"):
        tcnn_probe.record(Chain(), "s3://bucket/run.zarr")
    assert names(tmp_path) == []


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


def only_one_layer(path: Path) -> None:
    with tcnn_probe.record(Chain(), path, layers="far") as recorder:
        recorder._model(IMAGES)
        recorder.mark(epoch=0)


def other_heads(path: Path) -> None:
    model = Chain()
    model.far = GPSA(5, 3, 3)
    record_epochs(model.eval(), path, range(1))


def other_model(path: Path) -> None:
    record_epochs(nn.Sequential(Chain()).eval(), path, range(1))


REFUSED: dict[Callable[[Path], None], str] = {
    other_schema: "run.zarr has schema version 99, expected 2: it needs a newer tcnn_probe",
    other_names: r"a recording of other layers \('close' there, absent in this model\)",
    only_one_layer: r"\('near': absent there, {'kind': 'gpsa', 'heads': 9} here\)",
    other_heads: r"\('far': {'kind': 'gpsa', 'heads': 9} there, {'kind': 'gpsa', 'heads': 25} here\)",
    other_model: r"a recording of another model \(of class 'Sequential', not 'Chain'\)",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_refused_and_nothing_changed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "run.zarr")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=REFUSED[make]):
        tcnn_probe.record(Chain(), tmp_path / "run.zarr")
    assert contents(tmp_path) == before


def test_neighbouring_folders_are_left_alone(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent, tmp_path / "run.zarr.init")
    before = contents(tmp_path / "run.zarr.init")
    assert record_epochs(Chain(), tmp_path / "run.zarr", range(1)).epoch.values.tolist() == [0]
    assert names(tmp_path) == ["run.zarr", "run.zarr.init"]
    assert contents(tmp_path / "run.zarr.init") == before


def test_another_recorder_on_the_same_store_is_noticed(tmp_path: Path) -> None:
    model = Chain()
    first, second = (tcnn_probe.record(model, tmp_path / "run.zarr") for _ in range(2))
    with first, second:
        model(torch.zeros(1, 2, 5, 7))
        first.mark(epoch=0)
        with pytest.raises(StoreError, match=r"another recorder writes to this store: run\.zarr was made meanwhile"):
            second.mark(epoch=0)
    assert tcnn_probe.record(model, tmp_path / "run.zarr").epochs == (0,)


def test_path_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="a file stands in its way"):
        tcnn_probe.record(Chain(), tmp_path / "file" / "run.zarr")
