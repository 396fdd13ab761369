"""The study of attention maps: what it draws, drawing again without training, a check that can fail."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image

import attention_maps as study
import tcnn_probe
from common.data import digits_loaders, probed_images
from common.models import small_resnet
from common.training import Training
from tcnn_model import reparameterize
from tests.studies.conftest import Refusal, SmallRun

SMALL = ["--small", "--device", "cpu"]
LAYERS = [f"layer4.{block}.conv{n}" for block in (0, 1) for n in (1, 2)]


@pytest.fixture
def finished(small_run: SmallRun) -> Path:
    return small_run("attention_maps").out


def maps(out: Path) -> xr.Dataset:
    return xr.open_zarr(out / "attention_maps.zarr", consolidated=False).load()


def test_maps_of_the_first_and_the_last_epoch(finished: Path) -> None:
    ds = maps(finished)
    assert ds.attention.dims == ("epoch", "image", "layer", "head", "y", "x")
    assert dict(ds.sizes) == {"epoch": 2, "image": 2, "layer": 4, "head": 9, "y": 8, "x": 8}
    assert ds.layer.values.tolist() == LAYERS
    assert ds.epoch.values.tolist() == [0, 4]
    xr.testing.assert_allclose(ds.attention.sum(["y", "x"]) + ds.outside, xr.ones_like(ds.outside))
    recorded = xr.open_zarr(finished / "attention_maps_recording.zarr").load()
    assert recorded.epoch.values.tolist() == [0, 1, 2, 3, 4]
    for epoch in (0, 4):
        xr.testing.assert_allclose(ds.gate.sel(epoch=epoch), recorded.gate.sel(epoch=epoch))
    assert (ds.query_y == 4).all()
    assert ds.attrs["query_x"] == 32


def test_maps_are_those_that_the_recorder_sees(finished: Path) -> None:
    model = reparameterize(small_resnet())
    weights = finished / "attention_maps_checkpoints" / "tcnn-0004.pt"
    model.load_state_dict(torch.load(weights, weights_only=True))
    loaders = digits_loaders(size=64, batch_size=16, seed=0, limit=400, clutter=0)
    with tcnn_probe.record(model.eval(), images=2) as recorder, torch.no_grad():
        model(probed_images(loaders[1].dataset, 2).images)
        recorder.mark(epoch=4)
    (seen,) = (node.dataset for node in recorder.tree["maps"].subtree if "center_attention" in node.dataset)
    expected = seen.center_attention.isel(epoch=0).squeeze(drop=True).transpose("image", "layer", "head", "y", "x")
    found = maps(finished).attention.sel(epoch=4)
    np.testing.assert_allclose(found.values, expected.values, atol=1e-3)


def test_drawing_again_does_not_train(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    Image.new("RGB", (31, 17), (255, 255, 255)).save(tmp_path / "white.png")

    def no_training(*args: object, **options: object) -> None:
        raise AssertionError("trains")

    monkeypatch.setattr(Training, "_train", no_training)
    again = ["--resume", "--epoch", "1", "3", "--query", "9,60", "--image", str(tmp_path / "white.png")]
    assert study.main([*SMALL, *again, "--out", str(out)]) == 0
    ds = maps(out)
    assert ds.epoch.values.tolist() == [0, 1, 3, 4]
    assert ds.name.values.tolist() == ["white.png"]
    assert (ds.query_y == 1).all()
    assert (ds.query_x == 7).all()
    assert (out / "attention_maps.png").read_bytes() != (finished / "attention_maps.png").read_bytes()
    assert "with one image, whether heads follow content is not seen" in capsys.readouterr().out


def test_a_run_killed_before_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ["--limit", "80", "--batch-size", "16", "--epochs", "1", "--cnn-epochs", "1", "--device", "cpu"]
    save = torch.save

    def dies(state: object, path: Path) -> None:
        if path.name.startswith("tcnn-0001"):
            raise KeyboardInterrupt
        save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            study.main([*tiny, "--out", str(tmp_path)])
    study.main([*tiny, "--resume", "--out", str(tmp_path)])
    folder = tmp_path / "attention_maps_checkpoints"
    kept, whole = (torch.load(folder / name, weights_only=True) for name in ("tcnn-0001.pt", "tcnn.pt"))
    torch.testing.assert_close(kept, whole["model"], rtol=0, atol=0)
    assert maps(tmp_path).epoch.values.tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm leaves image files open
def test_own_model_data_and_image(tmp_path: Path, image_folder: Path) -> None:
    options = ["--model", "test_resnet", "--num-classes", "2", "--data", str(image_folder), "--img-size", "64"]
    options += ["--workers", "0", "--device", "cpu", "--epochs", "1", "--batch-size", "4", "--query", "63,0"]
    own = image_folder / "val" / "dog" / "1.png"
    study.main([*options, "--image", str(own), "--epoch", "0", "1", "--out", str(tmp_path / "out")])
    ds = maps(tmp_path / "out")
    assert ds.epoch.values.tolist() == [0, 1]
    assert ds.name.values.tolist() == ["1.png"]
    assert (ds.query_y == ds.sizes["y"] - 1).all()
    assert (ds.query_x == 0).all()
    xr.testing.assert_allclose(ds.attention.sum(["y", "x"]) + ds.outside, xr.ones_like(ds.outside))


def test_the_check_can_fail(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds = maps(finished)
    assert study.check(ds) == 0
    swapped = ds.assign(center_y=ds.center_x, center_x=ds.center_y)  # as if heads were numbered by columns
    assert study.check(swapped) == 1
    assert "24 of 36 heads do NOT look at their tap" in capsys.readouterr().out
    assert study.check(ds.assign(gate=-ds.gate)) == 1
    assert "do NOT differ more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--small", "--epoch", "5"], "--epoch: expected 0 to 4, the epochs of fine-tuning, got 5"),
        (["--query", "64,3"], "--query: expected a pixel inside 64 x 64, got (64, 3)"),
        (["--query", "3"], "argument --query: invalid pixel value: '3'"),
        (["--image", "none.png"], "argument --image: no image: "),
        (["--image", __file__], "argument --image: no image: "),
        (["--images", "0"], "--images must be at least 1"),
        (["--data", "."], "need --model, the name of a timm CNN"),
    ],
)
def test_wrong_options_say_so_and_write_nothing(refusal: Refusal, options: list[str], message: str) -> None:
    assert message in refusal(study, options)
