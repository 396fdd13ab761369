"""What the studies refuse before they train or write; a killed run; models and images of one's own."""

import importlib
from pathlib import Path

import pytest
import timm
import torch
import xarray as xr
from matplotlib.figure import Figure

import attention_maps
import class_attention_saliency
from tests.studies.test_small_forms import STUDIES

MODEL_FIRST = "need --model, the name of a timm CNN"
TOGETHER = "--data and --model belong together"
FEW = ["--num-classes", "2", "--workers", "0", "--device", "cpu"]
QUICK = [*FEW, "--images", "2", "--steps", "3", "--batch-size", "4"]
OPEN_FILES = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm leaves them open


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, but not written, which takes long; test_small_forms.py writes them."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **options: None)


@pytest.mark.parametrize(
    ("study", "options", "message"),
    [
        *((name, "--data .", MODEL_FIRST) for name in STUDIES if name != "class_attention_saliency"),
        ("gating_evolution", "--pretrained", MODEL_FIRST),
        ("gating_evolution", "--data no/where --model resnet18", "'no/where' is neither a folder nor a timm dataset"),
        ("gating_evolution", "--data . --model resnet18 --small", "are for the digits"),
        ("gating_evolution", "--model nope", "nope"),
        ("gating_evolution", "--limit 3", "gating_evolution.py:"),
        ("gating_evolution", "--model botnet26t_256 --limit 120", "no convolution to reparameterize"),
        ("gating_evolution", "--epochs 0", "must be at least 1"),
        ("gating_evolution", "--resume --overwrite", "not allowed with"),
        ("attention_maps", "--small --epoch 5", "--epoch: expected 0 to 4, the epochs of fine-tuning, got 5"),
        ("attention_maps", "--query 64,3", "--query: expected a pixel inside 64 x 64, got (64, 3)"),
        ("attention_maps", "--query 3", "argument --query: invalid pixel value: '3'"),
        ("attention_maps", f"--image {__file__}", "argument --image: no image: "),
        ("attention_maps", "--images 0", "--images must be at least 1"),
        ("robustness", "--severities 6", "invalid choice"),
        ("robustness", "--corruptions rain", "invalid choice"),
        ("robustness", "--epsilon 0", "--epsilon positive"),
        ("robustness", "--images 1", "--images must be at least 2"),
        ("robustness", "--variant imagenet-a", "expected NAME=FOLDER with a folder"),
        ("robustness", f"--variant imagenet-a={Path(__file__).parent}", "goes with --data"),
        ("conv_vs_content_heads", "--seeds 0", "at least 1"),
        ("conv_vs_content_heads", "--images 1", "--images and --head-images 2"),
        ("class_attention_saliency", "--data .", TOGETHER),
        ("class_attention_saliency", "--pretrained", TOGETHER),
        ("class_attention_saliency", "--data no/where --model test_resnet", "'no/where' is neither a folder"),
        ("class_attention_saliency", "--data . --model test_resnet --small", "are for the digits"),
        ("class_attention_saliency", "--epochs 0", "must be at least 1"),
        ("class_attention_saliency", "--data . --model test_resnet --pretrained no.pth", "no file 'no.pth'"),
    ],
)
def test_wrong_options_say_so_and_write_nothing(
    study: str, options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    try:
        code = importlib.import_module(study).main([*options.split(), "--device", "cpu", "--out", str(out)])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_killed_run_resumes_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ["--limit", "80", "--img-size", "32", "--batch-size", "16", "--epochs", "2", "--cnn-epochs", "1"]
    tiny += ["--device", "cpu", "--seed", "3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    attention_maps.main([*tiny, "--out", str(whole)])
    save = torch.save

    def dies(state: object, path: Path) -> None:
        if path.name.startswith("tcnn-0001"):  # the loop has its checkpoint of this epoch, the recorder its mark
            raise KeyboardInterrupt
        save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            attention_maps.main([*tiny, "--out", str(killed)])
    attention_maps.main([*tiny, "--resume", "--out", str(killed)])
    stores = [xr.open_zarr(out / "attention_maps_recording.zarr").load() for out in (killed, whole)]
    xr.testing.assert_allclose(*stores, rtol=1e-6)
    for epoch in (0, 1, 2):
        name = f"attention_maps_checkpoints/tcnn-{epoch:04d}.pt"
        torch.testing.assert_close(*(torch.load(out / name, weights_only=True) for out in (killed, whole)))


@OPEN_FILES
def test_own_weights_data_and_image(tmp_path: Path, image_folder: Path) -> None:
    torch.save(timm.create_model("test_resnet", num_classes=2).state_dict(), tmp_path / "own.pth")
    own = image_folder / "val" / "dog" / "1.png"
    options = ["--model", "test_resnet", "--pretrained", str(tmp_path / "own.pth"), "--data", str(image_folder)]
    options += [*FEW, "--img-size", "64", "--epochs", "1", "--batch-size", "4", "--query", "63,0"]
    attention_maps.main([*options, "--image", str(own), "--epoch", "0", "1", "--out", str(tmp_path / "out")])
    ds = xr.open_zarr(tmp_path / "out" / "attention_maps.zarr", consolidated=False).load()
    assert ds.epoch.values.tolist() == [0, 1]
    assert ds.name.values.tolist() == ["1.png"]
    assert (ds.query_y == ds.sizes["y"] - 1).all()
    assert (ds.query_x == 0).all()
    xr.testing.assert_allclose(ds.attention.sum(["y", "x"]) + ds.outside, xr.ones_like(ds.outside))
    assert (xr.open_zarr(tmp_path / "out" / "attention_maps_recording.zarr").images == 8).all()


def scores(out: Path) -> xr.DataTree:
    with xr.open_datatree(out / "class_attention_saliency.zarr", engine="zarr", consolidated=False) as tree:
        return tree.load()


@OPEN_FILES
def test_saliency_of_a_trained_transformer(
    tmp_path: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "vit.pth")
    options = ["--model", "test_vit", "--pretrained", str(tmp_path / "vit.pth"), "--data", str(image_folder), *QUICK]
    class_attention_saliency.main([*options, "--out", str(tmp_path / "out")])
    ds = scores(tmp_path / "out")["test_vit"].dataset
    methods = ["class_attention", "rollout", "integrated_gradients", "input_x_gradient", "occlusion", "chance"]
    assert ds.attribution.values.tolist() == methods  # no feature map, so no Grad-CAM
    assert "pointing_game" not in ds
    assert dict(ds.sizes)["y"] == 160
    assert "did NOT learn" not in capsys.readouterr().out  # nothing was trained


@OPEN_FILES
def test_a_convnet_gets_an_attention_pool(tmp_path: Path, image_folder: Path) -> None:
    options = ["--model", "test_resnet", "--data", str(image_folder), "--img-size", "64", "--epochs", "1", *QUICK]
    class_attention_saliency.main([*options, "--out", str(tmp_path / "out")])
    tree = scores(tmp_path / "out")
    assert set(tree.children) == {"test_resnet", "test_resnet, attention pooling"}
    plan = [class_attention_saliency.plan(class_attention_saliency.parse([*options, "--seed", "7"]))[0] for _ in "ab"]
    for one, other in zip(*plan, strict=True):  # new classifiers and pools are those of the seed
        torch.testing.assert_close(one.make({}).state_dict(), other.make({}).state_dict(), rtol=0, atol=0)


@OPEN_FILES
def test_more_classes_than_the_model_has(
    tmp_path: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "test_resnet", "--data", str(image_folder), *QUICK, "--num-classes", "1"]
    assert class_attention_saliency.main([*options, "--out", str(tmp_path / "out")]) == 2
    assert "the images have 2 classes and the model 1: pass --num-classes 2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
