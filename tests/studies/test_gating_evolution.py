"""The study end to end on a handful of digits: its files, resuming, refusing to mix runs, a check that can fail."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from PIL import Image

import gating_evolution
import tcnn_probe
from tests.studies.conftest import Refusal, SmallRun

TINY = ["--limit", "120", "--batch-size", "16", "--epochs", "2", "--cnn-epochs", "1", "--seed", "3", "--device", "cpu"]


SMALL = ["--small", "--device", "cpu"]


@pytest.fixture
def finished(small_run: SmallRun) -> Path:
    return small_run("gating_evolution").out


def recording(out: Path) -> xr.Dataset:
    return xr.open_zarr(out / "gating_evolution.zarr").load()


def test_writes_figure_and_recording(finished: Path) -> None:
    ds = recording(finished)
    assert ds.epoch.values.tolist() == [0, 1, 2, 3, 4]
    assert dict(ds.sizes) == {"epoch": 5, "layer": 4, "head": 9}
    assert (ds.images == 150).all()  # a quarter of 600: the whole validation set, once an epoch
    for name in ("top1", "control_top1", "train_top1", "val_loss"):
        assert np.isfinite(ds[name].values[1:]).all(), name
    torch.testing.assert_close(torch.tensor(ds.gate.values[0]), torch.full((4, 9), 1.0).sigmoid().double())
    assert not np.allclose(ds.gate.values[4], ds.gate.values[0], atol=0.01)
    with Image.open(finished / "gating_evolution.png") as figure:
        assert min(figure.size) > 1000


def test_an_existing_run_is_not_mixed_with_another(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = recording(finished)
    with pytest.raises(SystemExit, match="2"):
        gating_evolution.main([*SMALL, "--out", str(finished)])
    assert "pass --resume, --overwrite or another --out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        gating_evolution.main([*SMALL, "--lr", "0.01", "--resume", "--out", str(finished)])
    assert "lr was 0.001, is 0.01" in capsys.readouterr().err
    xr.testing.assert_identical(recording(finished), before)


def test_a_killed_run_resumes_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert gating_evolution.main([*TINY, "--out", str(whole)]) in (0, 1)
    mark = tcnn_probe.Recorder.mark

    def dies_at_two(self: object, **kwargs: object) -> None:
        if kwargs["epoch"] == 2:
            raise KeyboardInterrupt
        mark(self, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(tcnn_probe.Recorder, "mark", dies_at_two)
        with pytest.raises(KeyboardInterrupt):
            gating_evolution.main([*TINY, "--out", str(killed)])
    assert recording(killed).epoch.values.tolist() == [0, 1]
    gating_evolution.main([*TINY, "--resume", "--out", str(killed)])
    xr.testing.assert_allclose(recording(killed), recording(whole), rtol=1e-6)


def test_the_check_can_fail(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds = recording(finished)
    apart = ds.gate.copy(data=np.where(np.arange(4)[None, :, None] == 0, 0.9, 0.2) + 0 * ds.gate.values)
    apart[0] = 0.73
    ds = ds.assign(gate=apart, top1=ds.top1 * 0 + 0.5)
    assert gating_evolution.check(ds, 10) == 0
    assert gating_evolution.check(ds.assign(gate=ds.gate * 0 + 0.73), 10) == 1
    assert "did NOT move apart" in capsys.readouterr().out
    assert gating_evolution.check(ds, 4) == 1
    assert "did NOT learn" in capsys.readouterr().out


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # timm leaves image files to the collector
def test_own_model_weights_and_images(tmp_path: Path, image_folder: Path) -> None:
    weights = timm.create_model("resnet18").state_dict()
    torch.save(weights, tmp_path / "resnet18.pth")
    options = ["--model", "resnet18", "--pretrained", str(tmp_path / "resnet18.pth"), "--num-classes", "2"]
    options += ["--data", str(image_folder), "--img-size", "64", "--workers", "0", "--device", "cpu"]
    gating_evolution.main([*options, "--epochs", "1", "--batch-size", "4", "--out", str(tmp_path / "out")])
    ds = recording(tmp_path / "out")
    assert ds.layer.values.tolist() == [f"layer4.{block}.conv{n}" for block in (0, 1) for n in (1, 2)]
    assert (ds.images == 8).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "."], "need --model, the name of a timm CNN"),
        (["--pretrained"], "need --model, the name of a timm CNN"),
        (["--data", "no/where", "--model", "resnet18"], "'no/where' is neither a folder nor a timm dataset name"),
        (["--data", ".", "--model", "resnet18", "--small"], "are for the digits"),
        (["--model", "nope"], "nope"),
        (["--limit", "3"], "gating_evolution.py:"),
        (["--model", "botnet26t_256", "--limit", "120"], "no convolution to reparameterize"),
        (["--epochs", "0"], "must be at least 1"),
        (["--resume", "--overwrite"], "not allowed with"),
    ],
)
def test_wrong_options_say_so_and_write_nothing(refusal: Refusal, options: list[str], message: str) -> None:
    assert message in refusal(gating_evolution, options)
