"""Published test sets in small, on disk: which images, labels and classes come out."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor

import tcnn_probe
from tcnn_probe import imagenet_variant
from tests.tcnn_probe.perturbations.folders import (
    GOLDFISH,
    HAMMERHEAD,
    INDEX,
    SHARK,
    STINGRAY,
    by_class,
    picture,
    validation,
)

WNIDS = ImageNetInfo("imagenet-1k").label_names()
PART = "ignore:.*what is measured on it is not what is published:UserWarning"


def read(variant: tcnn_probe.Variant) -> tuple[Tensor, Tensor]:
    images, labels = zip(*variant.loader, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.filterwarnings(PART)
@pytest.mark.parametrize("name", ["imagenet", "imagenet-r", "imagenet-v2", "imagenet-c"])
def test_labels_are_those_of_the_folders(name: str, tmp_path: Path) -> None:
    """Not their ranks among the folders; every image once."""
    classes = ["10", "9", "2", "100"] if name == "imagenet-v2" else [STINGRAY, GOLDFISH, HAMMERHEAD, SHARK]
    options: dict[str, Any] = {"corruption": "fog", "severity": 3} if name == "imagenet-c" else {"size": (5, 7)}
    if name == "imagenet-r":
        classes[0] = "n07873807"  # pizza: the stingray is no class of ImageNet-R
    by_class(tmp_path / "fog" / "3" if name == "imagenet-c" else tmp_path, classes)
    variant = imagenet_variant(name, tmp_path, batch_size=3, **options)
    images, labels = read(variant)
    levels = (images[:, 0].amax((1, 2)) * 255).round().int() // 10 - 1
    indices = [int(each) if each.isdigit() else WNIDS.index(each) for each in classes]
    assert sorted(levels.tolist()) == list(range(8))
    assert labels.tolist() == [indices[level // 2] for level in levels]
    assert INDEX[GOLDFISH] == WNIDS.index(GOLDFISH) == 1
    assert variant.images == len(images) == 8
    assert len(next(iter(variant.loader))[1]) == 3
    assert images.shape[1:] == ((3, 224, 224) if name == "imagenet-c" else (3, 5, 7))
    assert variant.name == ("imagenet-c/fog/3" if name == "imagenet-c" else name)


def test_every_folder_of_v2(tmp_path: Path) -> None:
    """All 1000, in which an order of strings would go unnoticed by the number of classes."""
    for index in range(1000):
        (tmp_path / str(index)).mkdir()
    for index in (0, 1, 2, 10, 99, 100, 998):
        picture(tmp_path / str(index) / "a.jpeg", 7)
    assert read(imagenet_variant("imagenet-v2", tmp_path, size=3))[1].tolist() == [0, 1, 2, 10, 99, 100, 998]


@pytest.mark.parametrize("name", ["imagenet-a", "imagenet-r"])
def test_the_200_classes(name: str, tmp_path: Path) -> None:
    """All there, so that nothing is warned of; what is no class folder is none."""
    listed = Path(timm.__file__).parent / "data" / "_info" / f"{name.replace('-', '_')}_indices.txt"
    indices = [int(line) for line in listed.read_text().split()]
    for index in indices:
        (tmp_path / WNIDS[index]).mkdir()
    picture(tmp_path / WNIDS[indices[3]] / "a.png", 7)
    (tmp_path / "README.txt").write_text("about")
    (tmp_path / ".cache").mkdir()
    variant = imagenet_variant(name, tmp_path, size=3)
    assert variant.classes == tuple(sorted(indices))
    assert len(indices) == 200
    assert read(variant)[1].tolist() == [indices[3]]


def test_real_labels(tmp_path: Path) -> None:
    """Any of the labels is right, images without labels are left out: as timm counts it."""
    root, file = validation(tmp_path, [[3], [], [7, 9], [1], []])
    variant = imagenet_variant("imagenet-real", root, size=(3, 5), labels=file, batch_size=2)
    images, right = read(variant)
    assert variant.images == 3
    assert (images[:, 0, 0, 0] * 255).round().int().tolist() == [10, 30, 40]
    assert right.dtype == torch.bool
    assert [row.nonzero().flatten().tolist() for row in right] == [[3], [7, 9], [1]]
    scores = torch.zeros(5, 1000)
    scores[[0, 1, 2, 3, 4], [3, 3, 9, 2, 2]] = 1
    theirs = RealLabelsImagenet([f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 6)], str(file))
    theirs.add_result(scores)
    assert theirs.is_correct[1] == right[torch.arange(3), scores[[0, 2, 3]].argmax(1)].tolist()


def test_real_labels_of_timm_and_images_by_class(tmp_path: Path) -> None:
    """The first two of the published list are of no class, and of 970 and 795."""
    for number, wnid in ((1, GOLDFISH), (2, SHARK)):
        picture(tmp_path / wnid / f"ILSVRC2012_val_{number:08d}.JPEG", 10 * number)
    _, right = read(imagenet_variant("imagenet-real", tmp_path, size=3))
    assert right.nonzero()[:, 1].tolist() == [795, 970]


def test_pixels(tmp_path: Path) -> None:
    """Resized and cropped as timm does for the model, in [0, 1]."""
    path = tmp_path / GOLDFISH / "a.png"
    path.parent.mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)).save(path)
    model = timm.create_model("resnet10t", num_classes=3)
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "input_size": (3, 31, 31),
        "crop_pct": 0.95,
        "mean": (0.1, 0.2, 0.3),
    }
    model.pretrained_cfg["test_input_size"] = (3, 37, 37)
    with pytest.warns(UserWarning, match="has folders of 1 of the 1000 classes of imagenet: what is measured"):
        own = read(imagenet_variant("imagenet", tmp_path, model=model))[0]
    transform = timm.data.create_transform(
        (3, 37, 37), interpolation=model.pretrained_cfg["interpolation"], crop_pct=0.95, mean=(0, 0, 0), std=(1, 1, 1)
    )
    torch.testing.assert_close(own[0], transform(Image.open(path)), rtol=0, atol=1e-7)
    with pytest.warns(UserWarning, match="not what is published"):
        given = read(imagenet_variant("imagenet", tmp_path, model=model, size=(11, 29)))[0]
    assert given.shape == (1, 3, 11, 29)
    with pytest.warns(UserWarning, match="not what is published"):
        assert read(imagenet_variant("imagenet", tmp_path))[0].shape == (1, 3, 224, 224)


@pytest.mark.filterwarnings(PART)
def test_imagenet_c_is_only_cropped(tmp_path: Path) -> None:
    path = tmp_path / "snow" / "5" / SHARK / "a.png"
    path.parent.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (228, 226, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    images, labels = read(imagenet_variant("imagenet-c", tmp_path, corruption="snow", severity=5, size=224))
    expected = torch.from_numpy(pixels[2:-2, 1:-1].copy()).permute(2, 0, 1) / 255
    torch.testing.assert_close(images[0], expected, rtol=0, atol=1e-7)
    assert labels.tolist() == [2]


@pytest.mark.filterwarnings(PART)
def test_an_image_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """No other stands in for it."""
    by_class(tmp_path, [SHARK])
    (tmp_path / SHARK / "1.JPEG").write_bytes(b"nothing")
    with pytest.raises(UnidentifiedImageError):
        read(imagenet_variant("imagenet", tmp_path, size=3))


@pytest.mark.filterwarnings(PART)
def test_reading_leaves_torchs_random_state(tmp_path: Path) -> None:
    variant = imagenet_variant("imagenet", by_class(tmp_path, [SHARK]), size=3)
    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(read(variant), read(variant), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings(PART)
@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("imagenet-d", {}, ValueError, "expected one of imagenet, imagenet-a, .*; got 'imagenet-d'"),
        (
            "imagenet-c",
            {},
            ValueError,
            "the corruption and the severity, 1 to 5, of imagenet-c: got None, None",
        ),
        ("imagenet-c", {"corruption": "fog", "severity": 6}, ValueError, "got 'fog', 6"),
        ("imagenet-c", {"corruption": "fog", "severity": True}, ValueError, "got 'fog', True"),
        ("imagenet-c", {"corruption": "fog", "severity": 1, "size": 320}, ValueError, "are 224 x 224 as published"),
        (
            "imagenet-c",
            {"corruption": "smog", "severity": 1},
            FileNotFoundError,
            "no folder .*smog; there are fog, n",
        ),
        ("imagenet-c", {"corruption": "fog", "severity": 1}, FileNotFoundError, "no folder .*1; there are 2, 3$"),
        (
            "imagenet-c",
            {"corruption": "fog", "severity": 2},
            ValueError,
            "WordNet ids such as n01443537 in .*, got none",
        ),
        ("imagenet-c", {"corruption": "fog", "severity": 3}, ValueError, "expected images in the folders of"),
        (
            "imagenet",
            {"corruption": "fog"},
            ValueError,
            "imagenet-c has a corruption and a severity, not imagenet",
        ),
        ("imagenet", {"labels": "real.json"}, ValueError, "only imagenet-real has labels of its own, not imagenet"),
        ("imagenet", {"size": 0}, ValueError, "expected size, in pixels, or height and width, got 0"),
        ("imagenet", {"size": (3, 5, 7)}, ValueError, r"or height and width, got \(3, 5, 7\)"),
        ("imagenet", {"batch_size": 0}, ValueError, "expected a positive integer for batch_size"),
        ("imagenet", {}, ValueError, "expected folders named by WordNet ids such as n01443537 in .*; got fog"),
        ("imagenet-a", {}, ValueError, "of the 200 classes of imagenet-a in .*; got fog, n01484850"),
        ("imagenet-v2", {}, ValueError, "expected folders named by class indices, 0 to 999 in .*; got fog, n0148"),
        (
            "imagenet-real",
            {},
            ValueError,
            "val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG, .*got a.png",
        ),
    ],
)
def test_what_is_refused(
    name: str, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "fog" / "2").mkdir(parents=True)
    (tmp_path / "fog" / "3" / SHARK).mkdir(parents=True)
    picture(tmp_path / SHARK / "a.png", 3)
    with pytest.raises(error, match=message):
        imagenet_variant(name, tmp_path, **options)


@pytest.mark.filterwarnings(PART)
def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"there is no folder {tmp_path / 'none'}") + "$"):
        imagenet_variant("imagenet", tmp_path / "none")
    root, file = validation(tmp_path, [[], []])
    with pytest.raises(ValueError, match=r"no image in .* has a label"):
        imagenet_variant("imagenet-real", root, labels=file)
    for wrong in ('{"1": [2]}', "[[1], [1000]]", "[1, 2]"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="expected a list of lists of class indices, 0 to 999"):
            imagenet_variant("imagenet-real", root, labels=file)
    file.write_text("[[1]]")
    with pytest.raises(ValueError, match=r"to ILSVRC2012_val_00000001.JPEG, .*got ILSVRC2012_val_00000002.JPEG"):
        imagenet_variant("imagenet-real", root, labels=file)
    by_class(tmp_path / "more", [SHARK])
    with pytest.raises(ValueError, match="the model has no pretrained_cfg of timm's: give size instead of model"):
        imagenet_variant("imagenet", tmp_path / "more", model=torch.nn.Flatten())
