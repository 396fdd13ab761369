"""A user's own folder of images: its layout, its classes, and the classifier for them."""

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import gating_evolution
from common.data import (
    PixelBatches,
    boxed_images,
    image_loaders,
    own_model_and_data,
    probed_images,
)
from common.folder import open_folder
from common.models import own_model
from common.output import InputError, ended
from tcnn_probe import evaluation
from tests.crafted import Crafted


def flat(folder: Path) -> None:
    for split in ("train", "val"):
        shutil.move(folder / split / "cat" / "0.png", folder / split / "0.png")
        shutil.rmtree(folder / split / "cat")
        shutil.rmtree(folder / split / "dog")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: shutil.rmtree(folder / "val"),
            r"(?s)/val/cat/\*.jpg.*found in .*images: train/",
        ),
        (flat, r"(?s)/train/cat/\*.jpg.*in .*train, found 0.png"),
        (
            lambda folder: shutil.rmtree(folder / "train" / "cat"),
            "two or more, in .*train, found dog/",
        ),
        (
            lambda folder: (folder / "val" / "dog").rename(folder / "val" / "cow"),
            "folders of other classes than cat, dog: cow",
        ),
        (
            lambda folder: (folder / "train" / "cow").mkdir(),
            "no pictures of cow in .*train",
        ),
    ],
    ids=["no val", "flat", "one class", "other classes", "empty class"],
)
def test_other_layouts_are_refused(
    image_folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(image_folder)
    with pytest.raises(InputError, match=message):
        open_folder(str(image_folder), None)


def test_limit_and_batch_size(image_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # File managers leave hidden folders, which are not classes.
    (image_folder / "train" / ".hidden").mkdir()
    shutil.rmtree(image_folder / "val" / "cat")  # dogs must still be class 1
    train, validation = open_folder(str(image_folder), 8)
    assert train.targets == [0, 0, 0, 1, 1, 1]
    assert validation.targets == [1, 1]
    model = timm.create_model("test_resnet", num_classes=2)
    loaders = image_loaders(model, (train, validation), size=32, batch_size=256, workers=0)
    assert [len(labels) for _, labels in loaders[0]] == [6]
    assert "batches of 6 images" in capsys.readouterr().out


def options(**changed: object) -> Namespace:
    defaults = {
        "model": "test_resnet",
        "pretrained": False,
        "num_classes": None,
        "img_size": None,
        "limit": None,
    }
    return Namespace(**{**defaults, "batch_size": 4, "workers": 0, **changed})


def test_wordnet_ids_keep_their_rows(image_folder: Path, tmp_path: Path) -> None:
    weights = timm.create_model("test_resnet").eval()
    torch.save(weights.state_dict(), tmp_path / "imagenet.pth")
    for split in ("train", "val"):
        # Cock is class 7 of ImageNet, goldfish class 1.
        (image_folder / split / "cat").rename(image_folder / split / "n01514668")
        (image_folder / split / "dog").rename(image_folder / split / "n01443537")
    args = options(data=str(image_folder), pretrained=str(tmp_path / "imagenet.pth"))
    model, loaders = own_model_and_data(args, 64)
    images, labels = next(iter(loaders[1]))
    with torch.no_grad():
        # Classes are in the order of the folders' names.
        torch.testing.assert_close(model(images), weights(images)[:, [1, 7]])
    assert model.num_classes == 2
    assert labels.tolist() == [0] * 4
    assert probed_images(loaders[1].dataset, 2).classes == ["goldfish", "cock"]


def test_classifiers_of_the_users_own_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = timm.create_model("test_resnet", num_classes=3).state_dict()
    torch.save(weights, tmp_path / "own.pth")
    args = options(pretrained=str(tmp_path / "own.pth"))
    model = own_model(args, ["a", "b", "c"])
    # timm itself would make a new classifier.
    torch.testing.assert_close(model.state_dict(), weights)
    assert capsys.readouterr().out == ""
    smaller = own_model(args, ["a", "b"])
    assert smaller.num_classes == 2
    assert (
        "the classifier is new: the weights have 3 classes, and the images 2"
        in capsys.readouterr().out
    )
    torch.testing.assert_close(smaller.state_dict()["conv1.0.weight"], weights["conv1.0.weight"])
    assert own_model(options(num_classes=5), ["a", "b"]).num_classes == 5
    with pytest.raises(InputError, match="the images have 2 classes, got 1"):
        own_model(options(num_classes=1), ["a", "b"])


@pytest.mark.parametrize("legacy", [True, False])
def test_crafted_weights_run_no_code(tmp_path: Path, legacy: bool) -> None:
    """A file with more than weights is refused,
    also with timm 1.0.20, which would load everything in it.
    """
    state = {"fc.weight": torch.zeros(3, 2), "crafted": Crafted(tmp_path / "ran")}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(InputError, match=r"a\.pt' holds no weights: "):
        own_model(options(pretrained=str(tmp_path / "a.pt")), ["a", "b"])
    assert not (tmp_path / "ran").exists()


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    """A single bit of one weight is flipped."""
    weight = torch.arange(6.0).reshape(3, 2)
    torch.save({"fc.weight": weight}, tmp_path / "own.pth")
    content = bytearray((tmp_path / "own.pth").read_bytes())
    content[content.index(weight.numpy().tobytes()) + 5] ^= 4
    (tmp_path / "own.pth").write_bytes(content)
    with pytest.raises(InputError, match="holds no weights: the checksum of"):
        own_model(options(pretrained=str(tmp_path / "own.pth")), ["a", "b"])


def test_image_size_reaches_the_model() -> None:
    assert own_model(options(model="vit_tiny_patch16_224", img_size=48), ["a", "b"])(
        torch.randn(1, 3, 48, 48)
    ).shape == (1, 2)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_damaged_image_is_named(
    image_folder: Path, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (image_folder / "val" / "dog" / "3.png").write_bytes(b"no image")
    options = f"--model test_resnet --data {image_folder} --img-size 32 --epochs 1"
    options += f" --workers {workers} --device cpu --out {image_folder / 'out'}"
    assert ended(gating_evolution.main, options.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("gating_evolution.py: --data: ")


def test_boxes_around_the_objects_of_photographs(image_folder: Path) -> None:
    """A box that ends at half the width of a photograph ends there in the model's input, too."""
    model = timm.create_model("test_resnet", num_classes=2)
    validation = image_loaders(
        model, open_folder(str(image_folder), None), size=32, batch_size=4, workers=0
    )[1].dataset
    table = image_folder / "boxes.csv"
    table.write_text("val/cat/0.png,0,0,41.5,71\nval/dog/1.png,0,0,0,0\n")
    probed = boxed_images(str(table), validation, model)
    assert probed.images.shape == (2, 3, 32, 32)
    assert probed.masks is not None
    # Half of 83 pixels is half of 32, except for one pixel of rounding.
    assert probed.masks[0, :, :15].all()
    assert not probed.masks[0, :, 17:].any()
    assert not probed.masks[1].any()
    torch.testing.assert_close(probed.images[1], validation[5][0], rtol=0, atol=0)
    assert probed.labels.tolist() == model.eval()(probed.images).argmax(1).tolist()
    for wrong in (
        "val/cat/0.png,1,2,3\n",
        "val/cat/0.png,a,b,c,d\n",
        "",
        "no.png,0,0,1,1\n",
    ):
        table.write_text(wrong)
        with pytest.raises(
            InputError,
            match=r"no\.png|--boxes: expected lines of file,left,top,right,bottom",
        ):
            boxed_images(str(table), validation, model)


@torch.no_grad()
def test_robustness_on_photographs_matches_a_loop(
    image_folder: Path,
) -> None:
    """Predictions and confidences under each corruption match those of a loop over the files."""
    model, (_, validation) = own_model_and_data(options(data=str(image_folder)), 32)
    model.eval()
    batches = PixelBatches(model, validation, None)
    ds = evaluation.robustness(
        model, batches, severities=[3], attacks=(), normalization=batches.normalization
    )
    config = timm.data.resolve_model_data_config(model) | {"input_size": (3, 32, 32)}
    transform = timm.data.create_transform(**config)
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    files = sorted(image_folder.glob("val/*/*.png"))
    assert len(files) == ds.sizes["image"]
    for number, file in enumerate(files):
        with Image.open(file) as image:
            # Corruptions are defined on pixels, so the normalisation is undone.
            pixels = (transform(image.convert("RGB")) * std + mean).clamp(0, 1)
        for name in evaluation.CORRUPTIONS:
            worse = evaluation.corrupt(pixels, name, 3, first=number)
            scores = model((worse - mean)[None] / std)[0].softmax(0)
            answer = ds.sel(corruption=name).isel(image=number).squeeze()
            assert int(answer.correct) == (
                int(scores.argmax()) == ["cat", "dog"].index(file.parent.name)
            )
            # The loop runs single images, the study batches: float32 sums have another order.
            np.testing.assert_allclose(float(answer.confidence), float(scores.max()), atol=1e-5)
