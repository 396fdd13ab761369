"""What the command ``tcnn-finetune`` records."""

from pathlib import Path
from typing import Any

import pytest
import xarray as xr

from tcnn_model.training.command import train
from tcnn_model.training.config import Config
from tcnn_probe.callbacks.finetuning import Recording

TINY = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}


def _config(out: Path, **settings: Any) -> Config:
    small = {"img_size": 64, "limit": 16, "batch_size": 8, "epochs": 2, "warmup_epochs": 1}
    return Config(**{"model": "resnet18", "model_options": TINY, "out": str(out), **small, **settings})


def test_each_epoch_of_a_resumed_run_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between the checkpoint of an epoch and its mark."""
    settings = _config(tmp_path, reparameterize_at=0, ema=0.5)
    mark = Recording.__call__

    def interrupted(self: Recording, scalars: dict[str, float]) -> None:
        if scalars["epoch"] == 1:
            raise KeyboardInterrupt
        mark(self, scalars)

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(train(settings, progress=False))
    results = list(train(settings, resume=True, progress=False))
    ds = xr.open_zarr(tmp_path / "recording.zarr")
    assert ds.epoch.values.tolist() == [0, 1, 2]
    assert ds.top1.values.tolist() == [result.top1 for result in results]
    assert ds.layer.values.tolist() == ["layer4.0.conv1", "layer4.0.conv2"]
    assert ds.ema_top1.notnull().all()
    assert ds.gate.notnull().all()


def test_recording_begins_where_a_cnn_becomes_a_tcnn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list(train(_config(tmp_path, reparameterize_at=1), progress=False))
    assert xr.open_zarr(tmp_path / "recording.zarr").epoch.values.tolist() == [2]
    assert "no heads are recorded: nothing to mark: no attention was seen in ResNet" in capsys.readouterr().err
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 4


def test_a_watcher_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list(train(_config(tmp_path, epochs=1, warmup_epochs=0, watcher="nobody:Watches"), progress=False))
    assert "nobody watches this run (No module named 'nobody'): epochs.csv" in capsys.readouterr().err
