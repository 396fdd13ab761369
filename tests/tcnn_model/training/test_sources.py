"""Sources of images: errors name the data and the files that were found,
and unreadable images are named.
"""

import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from tcnn_model.class_folders import describe
from tcnn_model.training.data import Images
from tcnn_model.training.distributed import Processes
from tcnn_model.training.sources import open_sources
from tests.tcnn_model.training.runs import config, finish


def _folder(
    root: Path,
    *,
    classes: tuple[str, ...] = ("cat", "dog"),
    images: int = 8,
    val: str = "val",
) -> Path:
    for number, name in enumerate(
        f"{split}/{label}" for split in ("train", val) for label in classes
    ):
        (root / name).mkdir(parents=True)
        for image in range(images):
            Image.new("RGB", (40, 36), (30 * image, 60 * number, 0)).save(
                root / name / f"{image}.png"
            )
    return root


def _none(root: Path) -> Path:
    return root / "nowhere"


def _above(root: Path) -> Path:
    return _folder(root / "photos").parent


def _one_class(root: Path) -> Path:
    return _folder(root, classes=("cat",))


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
        (
            _above,
            r"expected train/ and val/ in .*, found photos/; did you mean .*photos\?",
        ),
        (
            _one_class,
            "expected a folder for each class, two or more, in .*train, found cat/",
        ),
        (
            _others,
            r"different classes, 2 and 2: "
            r"only in training \['dog'\], only in validation \['horse'\]",
        ),
        (
            _empty,
            "no pictures of cat, dog in .*train",
        ),
        (_file, "is one file: give a folder"),
    ],
)
def test_invalid_folders_are_refused(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        open_sources(str(make(tmp_path)), "", ("train", "validation"))


def test_streaming_data_sets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gives a stream of images, .* use hfds/"):
        open_sources("somewhere", "tfds/imagenet", ("train", "validation"))


@pytest.mark.parametrize("val", ["val", "validation", "valid"])
def test_images_and_labels_of_a_folder(val: str, tmp_path: Path) -> None:
    train, validate = open_sources(str(_folder(tmp_path, val=val)), "", ("train", "validation"))
    assert train.classes == ["cat", "dog"]
    assert len(train) == 16
    assert len(validate) == 16
    labels = {train.name(index).split("/")[-2]: train.read(index)[1] for index in range(16)}
    assert labels == {"cat": 0, "dog": 1}
    assert train.read(0)[0].size == (40, 36)


FILES = {
    "endings": ("cat/0.png", "cat/1.webp", "dog/0.tif", "dog/1.BMP", "dog/a.txt"),
    "a class of one ending": ("cat/0.png", "cow/0.jpeg", "dog/0.webp", "dog/1.gif"),
    "folders in classes": ("cat/0.png", "cat/day1/0.png", "dog/day1/0.png"),
    "only folders in classes": ("church/indoor/0.png", "pub/indoor/a/0.png"),
    "hidden": ("cat/0.png", "cat/.ipynb_checkpoints/0.png", "dog/._0.png", "dog/0.png"),
    "hidden class": ("cat/0.png", "dog/0.png", ".git/0.png", ".DS_Store"),
    "numbers": ("0/0.png", "1/0.png", "2/0.png", "10/0.png"),
}


@pytest.mark.parametrize("packed", ["folder", "tar", "tar with the folder", "tars"])
@pytest.mark.parametrize("case", FILES)
def test_the_top_folder_is_the_class(case: str, packed: str, tmp_path: Path) -> None:
    """Each picture that Pillow reads has the label of its top folder, as in torchvision."""
    expected = {}
    for number, name in enumerate(FILES[case]):
        for split in ("train", "val"):
            path = tmp_path / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix.lower() in (
                ".png",
                ".webp",
                ".tif",
                ".bmp",
                ".jpeg",
                ".gif",
            ):
                Image.new("RGB", (5, 7), (0, 0, 9 * number)).save(path)
            else:
                path.write_text("notes")
        used = not path.name.endswith((".txt", "_Store")) and "/." not in f"/{name}"
        if used:
            expected[name] = name.partition("/")[0]
    if packed != "folder":
        for split in ("train", "val"):
            _pack(tmp_path / split, packed)
    classes = sorted(set(expected.values()))
    for source in open_sources(str(tmp_path), "", ("train", "validation")):
        assert list(source.classes or ()) == classes
        named = {
            source.name(index).removeprefix("train/").removeprefix("val/"): classes[
                source.read(index)[1]
            ]
            for index in range(len(source))
        }
        assert named == expected
        # The hidden class of a folder is one of the files that are not used.
        unused = len(FILES[case]) - len(expected)
        assert f"{len(expected)} pictures of {len(classes)} classes" in describe(source)
        assert ("files not used" in describe(source)) == (unused > 0)


def _pack(folder: Path, packed: str) -> None:
    """Replace a folder by a tar file of its contents,
    of itself, or of a tar file for each class.
    """
    with tarfile.open(folder.with_suffix(".tar"), "w") as tar:
        if packed == "tar with the folder":
            tar.add(folder, folder.name)
        for path in sorted(folder.iterdir()) if packed != "tar with the folder" else ():
            if packed == "tars" and path.is_dir():
                with tarfile.open(path.with_suffix(".tar"), "w") as inner:
                    for file in path.iterdir():
                        inner.add(file, file.name)
                path = path.with_name(f"{path.name}.tar")
            tar.add(path, path.name)
    shutil.rmtree(folder)


def test_other_tar_files_are_refused(tmp_path: Path) -> None:
    _folder(tmp_path, classes=("cat", "cow"))
    for split in ("train", "val"):
        shutil.rmtree(tmp_path / split / "cow")
        _pack(tmp_path / split, "tar")
    with pytest.raises(ValueError, match=r"two or more, in .*train\.tar, found cat"):
        open_sources(str(tmp_path), "", ("train", "validation"))
    (tmp_path / "train.tar").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"train\.tar is not a whole, uncompressed"):
        open_sources(str(tmp_path), "", ("train", "validation"))


@pytest.mark.parametrize("dataset", ["torch/image_folder", "folder", "imagenet/x"])
def test_kinds_that_would_mix_the_splits_are_refused(dataset: str) -> None:
    with pytest.raises(ValueError, match=r"dataset: expected hfds/.*, or none for a"):
        open_sources("somewhere", dataset, ("train", "validation"))


def test_data_set_from_torchvision(tmp_path: Path) -> None:
    """Fashion-MNIST's files are made here."""
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 7), ("t10k", 3)):
        # The IDX format has bytes in three dimensions, then in one.
        head = struct.pack(">4i", 0x803, count, 28, 28)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(head + bytes(range(count)) * 28 * 28)
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 0x801, count) + bytes(range(count))
        )
    train, validate = open_sources(str(tmp_path), "torch/fashion_mnist", ("train", "validation"))
    assert len(train) == 7
    assert len(validate) == 3
    assert train.classes is not None
    assert len(train.classes) == 10
    image, label = train.read(5)
    assert image.mode == "RGB"
    assert image.size == (28, 28)
    assert label == 5
    assert validate.read(2)[1] == 2
    assert train.name(5) == "5"


def test_unreadable_images_are_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _folder(tmp_path / "photos")
    (data / "train" / "cat" / "3.png").write_bytes(b"no image")
    (data / "val" / "dog" / "5.png").write_bytes(
        # One training image is not an image, and one validation image is truncated.
        (data / "val" / "dog" / "4.png").read_bytes()[:60]
    )
    settings = {"data": str(data), "batch_size": 8, "epochs": 2, "limit": None}
    with (
        pytest.warns(RuntimeWarning, match="skipped"),
        pytest.raises(
            OSError,
            match=r"1 images cannot be read, the last one .*\.png: "
            r"more than the share of 0 that .*Error",
        ),
    ):
        finish(config(tmp_path / "strict", **settings))
    with pytest.warns(RuntimeWarning, match=r"skipped .*[35]\.png, which cannot be read"):
        done = finish(config(tmp_path / "lenient", **settings, max_unreadable=0.1))
    assert float(done["total"].sum()) == 0
    assert "2 images were skipped, as they cannot be read" in capsys.readouterr().err
    # The accuracy counts 15 of the 16 images.
    assert done["history"][0]["top1"] in [n / 15 for n in range(16)]


@pytest.mark.filterwarnings("ignore:skipped")
def test_unreadable_validation_set_is_refused(tmp_path: Path) -> None:
    data = _folder(tmp_path / "photos")
    for image in (data / "val").rglob("*.png"):
        image.write_bytes(b"no image")
    settings = config(
        tmp_path / "run",
        data=str(data),
        batch_size=8,
        epochs=1,
        warmup_epochs=0,
        limit=None,
        max_unreadable=0.9,
    )
    with pytest.raises(ValueError, match="no validation image can be read"):
        finish(settings)


class _Broken:
    """Images of which some cannot be read, and raise various errors, as decoders do."""

    classes = ("a", "b")
    errors = (
        Image.DecompressionBombError("too large"),
        RuntimeError("avif"),
        AttributeError("None"),
        OSError("cut"),
    )

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 24

    def read(self, index: int) -> tuple[int, int]:
        if index in self.broken:
            raise self.errors[index % 4]
        return index, index % 2

    def name(self, index: int) -> str:
        return f"image {index}"


def _batches(broken: set[int], rank: int, tmp_path: Path) -> tuple[Images, list[list[int]]]:
    settings = config(tmp_path, batch_size=4, limit=None, max_unreadable=0.5)
    sources = (_Broken(broken), _Broken(broken))
    images = Images(
        *sources,
        (torch.tensor, torch.tensor),
        settings,
        Processes(rank, 2, torch.device("cpu")),
    )  # type: ignore[arg-type]
    images.begin(1)
    return images, [numbers.tolist() for numbers, _ in images.training(0)]


@pytest.mark.filterwarnings("ignore:skipped image")
def test_processes_stay_in_step_when_a_batch_is_unreadable(tmp_path: Path) -> None:
    """Every image of one process's second batch is unreadable:
    the next images replace them, also after a resume.
    """
    batch = set(_batches(set(), 1, tmp_path)[1][1])
    # The next images are broken, too, so that the first substitute fails as well.
    broken = batch | {(number + 1) % 24 for number in batch}
    images, numbers = _batches(broken, 1, tmp_path)
    _, first = _batches(broken, 0, tmp_path)
    assert [len(part) for part in numbers] == [len(part) for part in first] == [4, 4, 4]
    assert not broken & {number for part in numbers + first for number in part}
    assert [part.tolist() for part, _ in images.training(1)] == numbers[1:]
    reasons = {name: reason.partition(":")[0] for name, reason in images.unreadable.items()}
    assert (
        {f"image {number}" for number in batch}
        <= reasons.keys()
        <= {f"image {number}" for number in broken}
    )
    for name, reason in reasons.items():
        number = int(name.split()[1])
        assert reason == type(_Broken.errors[number % 4]).__name__
    validated = [number for part, _ in images.validation() for number in part.tolist()]
    assert validated == [number for number in range(1, 24, 2) if number not in broken]


@pytest.mark.filterwarnings("ignore:skipped image")
def test_image_that_cannot_be_transformed_is_skipped(tmp_path: Path) -> None:
    """The image is so large that memory is insufficient."""

    def transform(number: int) -> torch.Tensor:
        if number == 5:
            raise MemoryError
        return torch.tensor(number)

    settings = config(tmp_path, batch_size=4, limit=None, max_unreadable=0.5)
    sources = (_Broken(set()), _Broken(set()))
    processes = Processes(0, 1, torch.device("cpu"))
    images = Images(*sources, (transform, transform), settings, processes)  # type: ignore[arg-type]
    images.begin(1)
    trained = [number for batch, _ in images.training(0) for number in batch.tolist()]
    # The next image replaces the one that is skipped.
    assert len(trained) == 24
    assert 5 not in trained
    assert trained.count(6) == 2
    validated = [number for batch, _ in images.validation() for number in batch.tolist()]
    assert validated == [number for number in range(24) if number != 5]
    assert images.unreadable == {"image 5": "MemoryError: "}


def test_unreadable_images_in_a_row_end_the_run(tmp_path: Path) -> None:
    with (
        pytest.warns(RuntimeWarning, match="skipped"),
        pytest.raises(
            OSError,
            match=r"2[01] images (in a row )?cannot be read, the last one image",
        ),
    ):
        _batches(set(range(24)), 0, tmp_path)


def test_command_prints_the_error_in_one_line(tmp_path: Path, refusal: Callable[..., str]) -> None:
    said = refusal("resnet18", "--data", _above(tmp_path), "--out", tmp_path / "run")
    assert said.startswith("tcnn-finetune: expected train/ and val/ in")
