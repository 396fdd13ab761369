"""What is wrong with data is said, with what was found; an unreadable image is named."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tcnn_model.training.command import main
from tcnn_model.training.sources import open_sources
from tests.tcnn_model.training.runs import config, finish


def _folder(root: Path, *, classes: tuple[str, ...] = ("cat", "dog"), images: int = 8, val: str = "val") -> Path:
    for number, name in enumerate(f"{split}/{each}" for split in ("train", val) for each in classes):
        (root / name).mkdir(parents=True)
        for image in range(images):
            Image.new("RGB", (40, 36), (30 * image, 60 * number, 0)).save(root / name / f"{image}.png")
    return root


def _none(root: Path) -> Path:
    return root / "nowhere"


def _above(root: Path) -> Path:
    return _folder(root / "photos").parent


def _one_class(root: Path) -> Path:
    return _folder(root, classes=("cat",))


def _deeper(root: Path) -> Path:
    return _folder(root, classes=("cat/images", "dog/images"))


def _others(root: Path) -> Path:
    _folder(root)
    (root / "val" / "dog").rename(root / "val" / "horse")
    return root


def _empty(root: Path) -> Path:
    return _folder(root, images=0)


def _file(root: Path) -> Path:
    (root / "photos.txt").write_text("")
    return root / "photos.txt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_none, "there is no folder .*nowhere"),
        (_above, r"expected train/ and validation/ in .*, found photos/; did you mean .*photos\?"),
        (_one_class, "expected a folder for each class, two or more, in .*train, found cat/"),
        (_deeper, "expected images in .*cat, found only folders, images/: there is one level too many"),
        (_others, r"different classes, 2 and 2: only in training \['dog'\], only in validation \['horse'\]"),
        (_empty, "cannot open the split 'train' of the folder|the split 'train' in .* has no images"),
        (_file, "is one file: give a folder"),
    ],
)
def test_folder_that_is_none(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_sources(str(make(tmp_path)), "", ("train", "validation"))


def test_streams_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gives images in a stream, .* use hfds/"):
        open_sources("somewhere", "tfds/imagenet", ("train", "validation"))


@pytest.mark.parametrize("val", ["val", "validation", "valid"])
def test_folder_and_its_labels(val: str, tmp_path: Path) -> None:
    train, validate = open_sources(str(_folder(tmp_path, val=val)), "", ("train", "validation"))
    assert (train.classes, len(train), len(validate)) == (("cat", "dog"), 16, 16)
    labels = {train.name(index).split("/")[-2]: train.read(index)[1] for index in range(16)}
    assert labels == {"cat": 0, "dog": 1}
    assert train.read(0)[0].size == (40, 36)


def test_data_set_of_torchvision(tmp_path: Path) -> None:
    """Fashion-MNIST's files, made here."""
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 7), ("t10k", 3)):
        head = struct.pack(">4i", 0x803, count, 28, 28)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(head + bytes(range(count)) * 28 * 28)
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + bytes(range(count)))
    train, validate = open_sources(str(tmp_path), "torch/fashion_mnist", ("train", "validation"))
    assert (len(train), len(validate)) == (7, 3)
    assert train.classes is not None
    assert len(train.classes) == 10
    image, label = train.read(5)
    assert (image.mode, image.size, label, validate.read(2)[1]) == ("RGB", (28, 28), 5, 2)
    assert train.name(5) == "5"


def test_unreadable_images_are_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _folder(tmp_path / "photos")
    (data / "train" / "cat" / "3.png").write_bytes(b"no image")
    (data / "val" / "dog" / "5.png").write_bytes((data / "val" / "dog" / "4.png").read_bytes()[:60])
    settings = {"data": str(data), "batch_size": 8, "epochs": 2, "limit": None}
    with (
        pytest.warns(RuntimeWarning, match="skipped"),
        pytest.raises(OSError, match=r"1 images cannot be read, the last one .*\.png: more than the share of 0 that"),
    ):
        finish(config(tmp_path / "strict", **settings))
    with pytest.warns(RuntimeWarning, match=r"skipped .*[35]\.png, which cannot be read"):
        done = finish(config(tmp_path / "lenient", **settings, max_unreadable=0.1))
    assert float(done["total"].sum()) == 0
    assert "2 images were skipped, as they cannot be read" in capsys.readouterr().err
    assert done["history"][0]["top1"] in [n / 15 for n in range(16)]  # of 15 images, not 16


def test_the_command_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resnet18", "--data", str(_above(tmp_path)), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("tcnn-finetune: expected train/ and validation/ in")
