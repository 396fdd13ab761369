"""The study of class attention end to end on a handful of digits, and on images of one's own."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from PIL import Image

import class_attention_saliency as study
import tcnn_probe
from common import following
from common.data import digits_loaders, probed_images
from tests.studies.conftest import Refusal, SmallRun

TINY = ["--limit", "80", "--batch-size", "16", "--epochs", "2", "--images", "3", "--show", "2", "--every", "1"]
TINY += ["--steps", "4", "--clutter", "0", "--device", "cpu"]
RUNS = {  # in the small form, with how long each trains
    "ResNet, average pooling": 4,
    "ResNet, attention pooling": 4,
    "PatchConvNet": 8,
    "PatchConvNet, by class": 2,
}
GRADIENTS = ["gradcam", "integrated_gradients", "input_x_gradient", "occlusion"]


SMALL = ["--small", "--device", "cpu"]


@pytest.fixture
def finished(small_run: SmallRun) -> Path:
    return small_run("class_attention_saliency").out


def scores(out: Path) -> xr.DataTree:
    with xr.open_datatree(out / "class_attention_saliency.zarr", engine="zarr", consolidated=False) as tree:
        return tree.load()


def test_scores_of_every_model_and_method(finished: Path) -> None:
    tree = scores(finished)
    assert set(tree.children) == set(RUNS)
    for name, epochs in RUNS.items():
        ds = tree[name].dataset
        attends = [] if "average" in name else ["class_attention"]
        assert ds["attribution"].values.tolist() == [*attends, *GRADIENTS, "chance"]
        assert ds.epoch.values.tolist() == [0, epochs]
        assert dict(ds.saliency.sizes) == {
            "epoch": 2,
            "attribution": len(ds["attribution"]),
            "image": 16,
            "y": 64,
            "x": 64,
        }
        for measure in ("pointing_game", "pointing_game_exact", "energy_inside", "deletion_auc", "insertion_auc"):
            assert np.isfinite(ds[measure].values).all(), (name, measure)
        np.testing.assert_allclose(ds.probability.sum("class"), 1, rtol=1e-5)


def test_chance_is_the_share_of_the_image(finished: Path) -> None:
    probed = probed_images(digits_loaders(size=64, batch_size=16, seed=0, limit=900, clutter=0)[1].dataset, 16)
    expected = probed.masks.double().mean((1, 2)).numpy()
    found = scores(finished)["PatchConvNet"].dataset.energy_inside.sel(attribution="chance")
    np.testing.assert_allclose(found.isel(epoch=0), expected)


def test_maps_of_classes_are_recorded_at_every_epoch(finished: Path) -> None:
    tree = tcnn_probe.open(finished / "class_attention_saliency_patchconvnet_by_class.zarr")
    maps = tree["maps/classes/16x16"].dataset.load()
    assert dict(maps.attention_by_class.sizes) == {"epoch": 3, "layer": 1, "image": 5, "class": 3, "y": 16, "x": 16}
    np.testing.assert_allclose(maps.attention_by_class.sum(["y", "x"]), 1, rtol=1e-5)
    probability = scores(finished)["PatchConvNet, by class"].dataset.probability
    for epoch in (0, 2):
        for row in range(5):
            best = probability.sel(epoch=epoch).isel(image=row).argsort().values[::-1][:3]
            assert maps.class_index.sel(epoch=epoch).isel(layer=0, image=row).values.tolist() == best.tolist()


@pytest.mark.parametrize("ending", [".png", "_maps.png", "_classes.png"])
def test_figures(finished: Path, ending: str) -> None:
    with Image.open(finished / f"class_attention_saliency{ending}") as figure:
        assert min(figure.size) > 600


def test_an_existing_run_is_not_mixed_with_another(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main([*SMALL, "--out", str(finished)]) == 2
    assert "pass --resume, --overwrite or another --out" in capsys.readouterr().err


def test_a_killed_run_resumes_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert study.main([*TINY, "--out", str(whole)]) in (0, 1)
    write, written = following.write_whole, []

    def dies_at_the_fifth(dataset: xr.Dataset, path: Path) -> None:
        written.append(path)
        if len(written) == 5:
            raise KeyboardInterrupt
        write(dataset, path)

    with monkeypatch.context() as patch:
        patch.setattr(following, "write_whole", dies_at_the_fifth)
        with pytest.raises(KeyboardInterrupt):
            study.main([*TINY, "--out", str(killed)])
    study.main([*TINY, "--resume", "--out", str(killed)])
    expected, found = scores(whole), scores(killed)
    for name in RUNS:
        xr.testing.assert_allclose(found[name].dataset, expected[name].dataset, rtol=1e-3, atol=1e-4)


def test_the_check_can_fail(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = scores(finished)
    good = tree.map_over_datasets(lambda ds: ds.assign(top1=ds.top1 * 0 + 0.9) if "top1" in ds else ds)
    hits = tree["PatchConvNet"].dataset.pointing_game.copy()
    hits.loc[{"attribution": "class_attention"}], hits.loc[{"attribution": "chance"}] = 1.0, 0.2
    good["PatchConvNet"] = xr.DataTree(good["PatchConvNet"].to_dataset().assign(pointing_game=hits))
    assert study.check(good) == 0
    hits.loc[{"attribution": "class_attention"}] = 0.2
    good["PatchConvNet"] = xr.DataTree(good["PatchConvNet"].to_dataset().assign(pointing_game=hits))
    assert study.check(good) == 1
    assert "NOT above chance" in capsys.readouterr().out
    tree["PatchConvNet"] = xr.DataTree(tree["PatchConvNet"].to_dataset().assign(top1=hits.epoch * 0 + 0.1))
    assert study.check(tree) == 1
    assert "PatchConvNet did NOT learn" in capsys.readouterr().out


FEW = ["--num-classes", "2", "--workers", "0", "--device", "cpu", "--images", "2", "--steps", "3", "--batch-size", "4"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm leaves image files open
def test_a_trained_transformer_as_it_is(tmp_path: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "vit.pth")
    options = ["--model", "test_vit", "--pretrained", str(tmp_path / "vit.pth"), "--data", str(image_folder), *FEW]
    study.main([*options, "--out", str(tmp_path / "out")])
    ds = scores(tmp_path / "out")["test_vit"].dataset
    methods = ["class_attention", "rollout", "integrated_gradients", "input_x_gradient", "occlusion", "chance"]
    assert ds["attribution"].values.tolist() == methods  # no feature map, so no Grad-CAM
    assert "pointing_game" not in ds
    assert dict(ds.sizes)["y"] == 160
    printed = capsys.readouterr().out
    assert "did NOT learn" not in printed  # nothing was trained


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_convnet_gets_an_attention_pool(tmp_path: Path, image_folder: Path) -> None:
    options = ["--model", "test_resnet", "--data", str(image_folder), "--img-size", "64", "--epochs", "1", *FEW]
    study.main([*options, "--out", str(tmp_path / "out")])
    tree = scores(tmp_path / "out")
    assert set(tree.children) == {"test_resnet", "test_resnet, attention pooling"}
    assert "class_attention" in tree["test_resnet, attention pooling"].dataset["attribution"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_more_classes_than_the_model_has(refusal: Refusal, image_folder: Path) -> None:
    options = ["--model", "test_resnet", "--data", str(image_folder), *FEW, "--num-classes", "1"]
    assert "the images have 2 classes and the model 1: pass --num-classes 2" in refusal(study, options)


def test_without_weights_it_says_which(refusal: Refusal, image_folder: Path) -> None:
    options = ["--model", "test_resnet", "--pretrained", "no.pth", "--data", str(image_folder), *FEW]
    assert "no file 'no.pth'" in refusal(study, options)


def test_new_classifiers_and_pools_are_those_of_the_seed(image_folder: Path) -> None:
    options = ["--model", "test_resnet", "--data", str(image_folder), "--epochs", "1", *FEW]
    first, second = (study.plan(study.parse([*options, "--seed", "7"]))[0] for _ in range(2))
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one.make({}).state_dict(), other.make({}).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "."], "--data and --model belong together"),
        (["--pretrained"], "--data and --model belong together"),
        (["--model", "resnet18"], "--data and --model belong together"),
        (["--data", "no/where", "--model", "test_resnet"], "'no/where' is neither a folder nor a timm dataset name"),
        (["--data", ".", "--model", "test_resnet", "--small"], "are for the digits"),
        (["--epochs", "0"], "must be at least 1"),
        (["--resume", "--overwrite"], "not allowed with"),
    ],
)
def test_wrong_options_say_so_and_write_nothing(refusal: Refusal, options: list[str], message: str) -> None:
    assert message in refusal(study, options)
