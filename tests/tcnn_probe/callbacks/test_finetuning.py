"""Recordings of the command ``tcnn-finetune``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tcnn_model.training.command import train
from tcnn_model.training.config import Config
from tcnn_probe.callbacks.finetuning import Recording

# ResNet-18 with one block a stage trains in seconds, and its last stage still has two layers to
# convert.
TINY = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}


def _config(out: Path, **settings: Any) -> Config:
    small = {
        "img_size": 64,
        "limit": 16,
        "batch_size": 8,
        "epochs": 2,
        "warmup_epochs": 1,
    }
    return Config(
        **{
            "model": "resnet18",
            "model_options": TINY,
            "out": str(out),
            **small,
            **settings,
        }
    )


def test_each_epoch_of_a_resumed_run_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops between the checkpoint of an epoch and its mark."""
    settings = _config(tmp_path, reparameterize_at=0, ema=0.5)
    mark = Recording.__call__

    def interrupted(self: Recording, scalars: dict[str, float]) -> None:
        # The checkpoint of this epoch has been written by then.
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


def test_heads_are_recorded_once_a_cnn_becomes_a_tcnn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scalars and settings are recorded from the start; two seeds are opened together as runs."""
    results = list(train(_config(tmp_path / "a", reparameterize_at=1), progress=False))
    ds = xr.open_zarr(tmp_path / "a" / "recording.zarr")
    assert ds.epoch.values.tolist() == [0, 1, 2]
    assert ds.train_top1.values.tolist()[1:] == [result.train_top1 for result in results[1:]]
    assert ds.gate.notnull().any(["layer", "head"]).values.tolist() == [
        False,
        False,
        True,
    ]
    message = capsys.readouterr().err
    assert (
        "no heads are recorded, only scalars: nothing to mark: no attention was seen in ResNet"
        in message
    )
    # A header and three epochs are four lines.
    assert len((tmp_path / "a" / "epochs.csv").read_text().splitlines()) == 4
    list(train(_config(tmp_path / "b", seed=1, epochs=1, warmup_epochs=0), progress=False))
    tree = tcnn_probe.open([tmp_path / name / "recording.zarr" for name in "ab"])
    assert tree.seed.values.tolist() == [0, 1]
    assert tree.reparameterize_at.values[0] == 1
    assert tree.attrs["model"] == "resnet18"
    assert tree["heads"].gate.sel(run="b").isnull().all()


def test_maps_and_health_are_recorded_on_request(tmp_path: Path) -> None:
    settings = _config(tmp_path, reparameterize_at=1, images=2, health=True)
    list(train(settings, progress=False))
    tree = tcnn_probe.open(tmp_path / "recording.zarr")
    (maps,) = tree["maps"].children.values()
    assert maps.dataset.image.values.tolist() == [0, 1]
    assert maps.dataset.center_attention.sel(epoch=2).notnull().any()
    assert tree["heads"].token_norm.sel(epoch=2).notnull().all()


def test_a_model_with_heads_that_gets_more_is_recorded_in_a_second_store(
    tmp_path: Path,
) -> None:
    def build(*layers: nn.Module) -> nn.Module:
        return nn.Sequential(*layers).eval()

    attention = GPSA(3, 3, 3, padding=1)
    convolution = nn.Conv2d(3, 3, 3, padding=1)
    before = build(attention, convolution)
    after = build(attention, GPSA.from_conv(convolution))
    for epoch, model in enumerate((before, after, after)):
        watcher = Recording(model, tmp_path, {"seed": 3, "out": "here"})
        with torch.no_grad():
            model(torch.randn(2, 3, 5, 7))
        watcher({"epoch": epoch})
        watcher.close()
    recorded = (
        xr.open_zarr(tmp_path / "recording.zarr"),
        xr.open_zarr(tmp_path / "recording-converted.zarr"),
    )
    assert [ds.epoch.values.tolist() for ds in recorded] == [[0], [1, 2]]
    assert [ds.layer.values.tolist() for ds in recorded] == [["0"], ["0", "1"]]
    assert "out" not in recorded[0].attrs


def test_a_missing_watcher_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list(
        train(
            _config(tmp_path, epochs=1, warmup_epochs=0, watcher="nobody:Watches"),
            progress=False,
        )
    )
    assert (
        "nobody watches this run (No module named 'nobody'): epochs.csv" in capsys.readouterr().err
    )


def test_rates_are_printed_and_recorded_as_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of 8 images scale the weights' rate;
    the gates' is not scaled, and Adam moves them by about it.
    """
    rates = {"lr": 1e-3, "qk_lr": 1e-2, "gating_lr": 0.1, "paper_batch": 1024}
    settings = _config(tmp_path, reparameterize_at=0, warmup_epochs=0, epochs=1, **rates)
    list(train(settings, progress=False))
    ds = xr.open_zarr(tmp_path / "recording.zarr")
    used = {"lr": 1e-3 / 128, "qk_lr": 1e-2 / 128, "gating_lr": 0.1}
    said = capsys.readouterr().err
    text = (tmp_path / "config.toml").read_text()
    for name, rate in used.items():
        assert ds.attrs[name] == pytest.approx(rate)
        assert f"{name} {rate:g}" in said
        assert f"# as used: {name} = {rate:g}\n" in text
    # Of 1,347 digits 16 are used: the paper's batch of 1,024 cannot be made of them.
    assert "--paper-batch 8 keeps the paper's rates" in said
    assert "--accumulate 2 makes steps of 16 images, the most that the data allow" in said
    assert json.loads(ds.attrs["classes"]) == [*"0123456789"]
    # Scaled, the rates of both steps would sum to less than 0.2 / 128, and Adam moves a weight by
    # no more. The first step has no gradient here, since the last norm of a ResNet's block starts
    # at zero.
    path = tmp_path / "checkpoints" / "epoch-0001.pt"
    weights = torch.load(path, weights_only=True)["model"]
    gating = torch.cat([v for name, v in weights.items() if name.endswith(".gating")])
    assert 0.005 < float((gating - 1).abs().mean()) < 0.2
