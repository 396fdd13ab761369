"""Published test sets in small, on disk: their images, labels and classes."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor

from tcnn_probe import evaluation
from tcnn_probe.evaluation import imagenet_variant

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*accuracies on it are not comparable with published ones:UserWarning"
)

WNIDS = ImageNetInfo("imagenet-1k").label_names()
# These are classes 1, 2, 4 and 6 of ImageNet.
GOLDFISH, SHARK, HAMMERHEAD, STINGRAY = (
    "n01443537",
    "n01484850",
    "n01494475",
    "n01498041",
)


def picture(path: Path, level: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((17, 23, 3), level, np.uint8)).save(path)
    return path


def by_class(root: Path, classes: list[str], count: int = 2) -> Path:
    """Write images of level 10, 20, ... in the order of the given classes."""
    for number, name in enumerate(classes):
        for image in range(count):
            picture(root / name / f"{image}.JPEG", 10 * (number * count + image + 1))
    return root


def read(variant: evaluation.Variant) -> tuple[Tensor, Tensor]:
    images, labels = zip(*variant.loader, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize("name", ["imagenet", "imagenet-r", "imagenet-v2", "imagenet-c"])
def test_labels_are_class_indices(name: str, tmp_path: Path) -> None:
    """Labels are not ranks among the folders; each image comes once."""
    classes = (
        # In alphabetical order, 10 and 100 precede 2.
        ["10", "9", "2", "100"]
        if name == "imagenet-v2"
        else [STINGRAY, GOLDFISH, HAMMERHEAD, SHARK]
    )
    options: dict[str, Any] = (
        {"corruption": "fog", "severity": 3} if name == "imagenet-c" else {"size": (5, 7)}
    )
    if name == "imagenet-r":
        classes[0] = "n07873807"  # pizza, as ImageNet-R does not have the stingray
    by_class(tmp_path / "fog" / "3" if name == "imagenet-c" else tmp_path, classes)
    variant = imagenet_variant(name, tmp_path, batch_size=3, **options)
    images, labels = read(variant)
    # An image's grey level is its number; images of ImageNet-C are not resized, unlike others.
    greys = (images[:, 0].amax((1, 2)) * 255).round().int()
    levels = greys // 10 - 1
    indices = [int(folder) if folder.isdigit() else WNIDS.index(folder) for folder in classes]
    assert sorted(levels.tolist()) == list(range(8))
    assert labels.tolist() == [indices[level // 2] for level in levels]
    assert WNIDS.index(GOLDFISH) == 1
    assert len(next(iter(variant.loader))[1]) == 3
    assert images.shape[1:] == ((3, 224, 224) if name == "imagenet-c" else (3, 5, 7))
    assert variant.name == ("imagenet-c/fog/3" if name == "imagenet-c" else name)
    assert (variant.classes is None) == (name != "imagenet-r")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["imagenet-a", "imagenet-r"])
def test_variants_with_200_classes(name: str, tmp_path: Path) -> None:
    """There is no warning if all folders exist; files and hidden folders are not classes."""
    listed = Path(timm.__file__).parent / "data" / "_info" / f"{name.replace('-', '_')}_indices.txt"
    indices = [int(line) for line in listed.read_text().split()]
    for index in indices:
        (tmp_path / WNIDS[index]).mkdir()
    picture(tmp_path / WNIDS[indices[3]] / "a.png", 7)
    (tmp_path / "README.txt").write_text("about")
    # Downloads leave such folders.
    (tmp_path / ".cache").mkdir()
    variant = imagenet_variant(name, tmp_path, size=3)
    assert variant.classes == tuple(sorted(indices))
    assert len(indices) == 200
    assert read(variant)[1].tolist() == [indices[3]]


def test_real_labels_count_like_timms(tmp_path: Path) -> None:
    """Any of the labels is right, and images without labels are left out."""
    numbers = [1, 3, 6]  # their labels: none, 230 and 231, 57
    for number in numbers:
        picture(tmp_path / SHARK / f"ILSVRC2012_val_{number:08d}.JPEG", 10 * number)
    images, right = read(imagenet_variant("imagenet-real", tmp_path, size=(3, 5), batch_size=1))
    assert (images[:, 0, 0, 0] * 255).round().tolist() == [30, 60]
    assert right.dtype == torch.bool
    assert [row.nonzero().flatten().tolist() for row in right] == [[230, 231], [57]]
    reference = RealLabelsImagenet(
        [f"ILSVRC2012_val_{number:08d}.JPEG" for number in numbers] + [""] * 49997
    )
    # The first image counts for nothing, the second prediction is right, and the third is wrong.
    reference.add_result(torch.eye(1000)[[795, 231, 58]])
    assert reference.is_correct[1] == [True, False] == right[[0, 1], [231, 58]].tolist()


def test_pixels_are_prepared_like_timms(tmp_path: Path) -> None:
    """Images are resized and cropped as timm does for the model, with values in [0, 1]."""
    path = tmp_path / GOLDFISH / "a.png"
    path.parent.mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)).save(
        path
    )
    model = timm.create_model("resnet10t", num_classes=3)
    sizes = {
        "input_size": (3, 31, 31),
        # Some models of timm are tested at a larger size than they are trained at.
        "test_input_size": (3, 37, 37),
        "crop_pct": 0.95,
        "mean": (0.1, 0.2, 0.3),
    }
    model.pretrained_cfg = {**model.pretrained_cfg, **sizes}
    with pytest.warns(
        UserWarning,
        match="has folders of 1 of the 1000 classes of imagenet: accuracies",
    ):
        images = read(imagenet_variant("imagenet", tmp_path, model=model))[0]
    transform = timm.data.create_transform(
        (3, 37, 37),
        interpolation=model.pretrained_cfg["interpolation"],
        crop_pct=0.95,
        mean=(0, 0, 0),
        std=(1, 1, 1),
    )
    # Bytes are divided by 255 in float32, with an error of 6e-8 near 1.
    torch.testing.assert_close(images[0], transform(Image.open(path)), rtol=0, atol=1e-7)
    assert read(imagenet_variant("imagenet", tmp_path, model=model, size=(11, 29)))[0].shape == (
        1,
        3,
        11,
        29,
    )
    assert read(imagenet_variant("imagenet", tmp_path))[0].shape == (1, 3, 224, 224)


def test_imagenet_c_is_not_resized(tmp_path: Path) -> None:
    path = tmp_path / "snow" / "5" / SHARK / "a.png"
    path.parent.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    # For other images, this model needs resizing and cropping.
    model = timm.create_model("resnet10t", num_classes=3)
    images, labels = read(
        imagenet_variant("imagenet-c", tmp_path, corruption="snow", severity=5, model=model)
    )
    expected = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    torch.testing.assert_close(images[0], expected, rtol=0, atol=1e-7)
    assert labels.tolist() == [2]


def test_unreadable_images_are_errors_and_not_replaced(tmp_path: Path) -> None:
    by_class(tmp_path, [SHARK])
    jpeg = BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (31, 37, 3), dtype=np.uint8)
    Image.fromarray(noise).save(jpeg, "jpeg")
    # timm's reader would return the next image, and Pillow's error does not name a truncated one.
    for content in (b"nothing", jpeg.getvalue()[:-500]):
        (tmp_path / SHARK / "1.JPEG").write_bytes(content)
        with pytest.raises(OSError, match=rf"cannot read .*{SHARK}.1\.JPEG: "):
            read(imagenet_variant("imagenet", tmp_path, size=3))


def test_reading_leaves_torchs_random_state(tmp_path: Path) -> None:
    # A DataLoader draws a seed for its workers whenever it is iterated.
    variant = imagenet_variant("imagenet", by_class(tmp_path, [SHARK]), size=3)
    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(read(variant), read(variant), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "imagenet-d",
            {},
            ValueError,
            "expected one of imagenet, imagenet-a, .*; got 'imagenet-d'",
        ),
        (
            "imagenet-c",
            {"corruption": "smog", "severity": 1},
            FileNotFoundError,
            "no folder .*smog.1",
        ),
        (
            "imagenet-c",
            {"corruption": "fog", "severity": 2},
            ValueError,
            "folders such as n01440764, .*: there are no pictures",
        ),
        (
            "imagenet-c",
            {"corruption": "fog", "severity": 3},
            ValueError,
            "folders such as n01440764, .*: there are no pictures",
        ),
        (
            "imagenet",
            {"corruption": "fog"},
            ValueError,
            "imagenet-c has a corruption and a severity, not imagenet",
        ),
        (
            "imagenet",
            {"model": torch.nn.Flatten()},
            ValueError,
            "no timm pretrained_cfg: give size instead",
        ),
        (
            "imagenet-a",
            {},
            ValueError,
            "of the 200 classes of imagenet-a, in .* other classes than .*: fog, n01484850",
        ),
        (
            "imagenet-v2",
            {},
            ValueError,
            "expected folders such as 0, of the 1000 classes .*: fog, n0148",
        ),
        (
            "imagenet-real",
            {},
            ValueError,
            "val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG, .*a.png",
        ),
    ],
)
def test_bad_arguments_are_refused(
    name: str,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "fog" / "2").mkdir(parents=True)
    (tmp_path / "fog" / "3" / SHARK).mkdir(parents=True)
    picture(tmp_path / SHARK / "a.png", 3)
    with pytest.raises(error, match=message):
        imagenet_variant(name, tmp_path, **options)
