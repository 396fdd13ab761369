"""Images and labels by index, from scikit-learn's digits
and from the map-style data sets of timm.
"""

import csv
import io
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tcnn_model.class_folders import ClassFolders, listing, reason_unused, shortened
from tcnn_model.pictures import as_rgb

__all__ = ["DIGITS", "Source", "open_sources"]

DIGITS = ("digits", "parity")

# Names that timm's `create_dataset` treats as synonyms; the first is the one that our documents
# use.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "validation", "valid", "eval", "evaluation"),
}

_KINDS = ("hfds", "torch", "wds")
# timm would read both splits from the same folder.
_FOLDERS = ("torch/folder", "torch/image_folder")

# timm's data sets that are streams of images, without an index.
_STREAMS = ("tfds", "hfids")


class Source(Protocol):
    """Labelled images."""

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the classes in the order of labels; None if they are unknown."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an RGB image and its label; any exception means that the image cannot be read."""

    def name(self, index: int) -> str:
        """Return the name of the image's file."""


@cache
def _read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images, shape (1797, 8, 8), and labels: a text, whose parsing takes 0.1 s."""
    # scikit-learn is slow to import, and runs on other data do not need it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    # The digits have 17 grey levels, from 0 to 16.
    return np.clip(digits.images * 16, 0, 255).astype(np.uint8), digits.target


class _Digits:
    """scikit-learn's ``load_digits``: 1,797 images of 8 x 8 pixels, three quarters for training."""

    def __init__(self, training: bool, *, parity: bool = False) -> None:
        from sklearn.model_selection import train_test_split

        self._images, self._labels = _read_digits()
        numbers = range(len(self._labels))
        # The split is the same in all runs, whatever their seed, so that their accuracies can be
        # compared.
        split = train_test_split(numbers, test_size=0.25, random_state=0, stratify=self._labels)
        self._numbers = split[0] if training else split[1]
        self.classes = ("even", "odd") if parity else tuple("0123456789")

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, index: int) -> tuple[Image.Image, int]:
        number = self._numbers[index]
        image = Image.fromarray(self._images[number]).convert("RGB")
        return image, int(self._labels[number]) % len(self.classes)

    def name(self, index: int) -> str:
        return f"digit {self._numbers[index]}"


class _Timm:
    """A data set of ``timm.data.create_dataset``. Its own reading would silently replace unreadable
    images.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # torchvision's data sets have no reader.
        self._reader = getattr(dataset, "reader", None)
        labels = getattr(self._reader, "class_to_idx", None) or getattr(
            dataset, "class_to_idx", None
        )
        self.classes = tuple(sorted(labels, key=labels.__getitem__)) if labels else None

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> tuple[Image.Image, int]:
        if self._reader is None:
            image, label = self._dataset[index]
            return as_rgb(image), int(label)
        file, label = self._reader[index][:2]
        # Data sets of Hugging Face decode images, others open files.
        with closing(file):
            image = file if isinstance(file, Image.Image) else Image.open(file)
            return as_rgb(image), int(label)

    def name(self, index: int) -> str:
        return str(index) if self._reader is None else str(self._reader.filename(index))


class _Tar:
    """Pictures of a tar file, also of tar files in it,
    labelled by their top folders as those of a folder are.

    A folder that holds all others, such as ``train/``, is no class. A tar file in it counts as a
    folder.

    Raises:
        ValueError: It is not a whole, uncompressed tar file, or there are fewer than two classes.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        unused: Counter[str] = Counter()
        places = []
        try:
            # "r:" refuses compressed files, in which an image cannot be read from its offset.
            with tarfile.open(path, "r:") as tar:
                for parts, first, size in _files_in(tar):
                    reason = reason_unused(parts)
                    if reason is None:
                        places.append((parts, first, size))
                    else:
                        unused[reason] += 1
        except tarfile.TarError as error:
            raise ValueError(f"{path} is not a whole, uncompressed tar file: {error}") from error
        self._places = sorted(places)
        top = 0
        while len({parts[top] for parts, _, _ in places}) == 1 and all(
            len(parts) > top + 2 for parts, _, _ in places
        ):
            top += 1
        names = [parts[top] for parts, _, _ in self._places]
        self.classes = tuple(sorted({*names}))
        loose = [parts for parts, _, _ in places if len(parts) < top + 2]
        if len(self.classes) < 2 or loose:
            raise ValueError(
                f"expected a folder for each class, two or more, in {path}, found "
                f"{shortened(self.classes)}"
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._labels = [numbers[name] for name in names]
        self.unused = unused

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> tuple[Image.Image, int]:
        _, first, size = self._places[index]
        # The file is opened for each image: forked workers would share the position in a file that
        # stays open.
        with Path(self._path).open("rb") as file:
            file.seek(first)
            image = Image.open(io.BytesIO(file.read(size)))
        return as_rgb(image), self._labels[index]

    def name(self, index: int) -> str:
        return "/".join(self._places[index][0])


def _files_in(
    tar: tarfile.TarFile, folder: tuple[str, ...] = (), start: int = 0
) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Yield the path, the first byte and the size
    of each file in a tar file, and in tar files in it.
    """
    for member in tar:
        path = PurePosixPath(member.name)
        parts = (*folder, *path.parts)
        first = start + member.offset_data
        if member.isfile() and path.suffix == ".tar":
            with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                yield from _files_in(inner, (*parts[:-1], path.stem), first)
        elif member.isfile():
            yield parts, first, member.size


class _Coarse:
    """A source with coarse labels in place of its fine ones."""

    def __init__(self, source: Source, coarse_names: dict[str, str]) -> None:
        self._source = source
        self.unused = getattr(source, "unused", Counter())
        self.classes = tuple(sorted({*coarse_names.values()}))
        self._labels = [self.classes.index(coarse_names[name]) for name in source.classes or ()]

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> tuple[Image.Image, int]:
        image, label = self._source.read(index)
        return image, self._labels[label]

    def name(self, index: int) -> str:
        return self._source.name(index)


def _read_coarse_labels(file: str, source: Source) -> dict[str, str]:
    """Read the coarse name of each class from a CSV file with two columns and no header."""
    if source.classes is None:
        raise ValueError("coarse_labels: the data does not say what its classes are")
    try:
        rows = [row for row in csv.reader(Path(file).read_text().splitlines()) if row]
    except OSError as error:
        raise ValueError(f"coarse_labels: cannot read {file}: {error}") from error
    odd = next((row for row in rows if len(row) != 2), None)
    if odd is not None:
        raise ValueError(f"coarse_labels: expected lines of class,coarse in {file}, got {odd}")
    names: dict[str, str] = {}
    for fine, coarse in rows:
        if names.setdefault(fine.strip(), coarse.strip()) != coarse.strip():
            raise ValueError(f"coarse_labels: {file} has two coarse labels of {fine.strip()}")
    missing = [name for name in source.classes if name not in names]
    if missing:
        raise ValueError(
            f"coarse_labels: {file} lacks {len(missing)} of {len(source.classes)} classes: "
            f"{', '.join(missing[:5])}"
        )
    # The file may also name classes that are not in these data.
    return {name: names[name] for name in source.classes}


def open_sources(
    data: str,
    dataset: str,
    splits: tuple[str, str],
    coarse_labels: str | None = None,
) -> tuple[Source, Source]:
    """Open the images for training and for validation.

    Args:
        data: "digits", "parity" (the same digits, as even or odd), or a folder or tar file.
        dataset: timm's name of a kind of data set; "" for folders and tar files, "wds/" for
            WebDataset shards.
        splits: Names of the splits for training and for validation.
        coarse_labels: File with a line ``class,coarse`` for each class; the coarse names replace
            the classes as labels.

    Raises:
        ValueError: The data or the file are not as expected.
    """
    sources = _open_fine(data, dataset, splits)
    if coarse_labels is None:
        return sources
    names = _read_coarse_labels(coarse_labels, sources[0])
    return _Coarse(sources[0], names), _Coarse(sources[1], names)


def _open_fine(data: str, dataset: str, splits: tuple[str, str]) -> tuple[Source, Source]:
    if data in DIGITS:
        parity = data == "parity"
        return _Digits(True, parity=parity), _Digits(False, parity=parity)
    if _kind(dataset) in _STREAMS:
        raise ValueError(
            f"{dataset} gives a stream of images, and an exact run needs numbered images: use hfds/"
        )
    if dataset and (_kind(dataset) not in _KINDS or dataset.lower() in _FOLDERS):
        raise ValueError(
            f"dataset: expected {', '.join(f'{kind}/...' for kind in _KINDS)}, or none for a "
            f"folder or tar files, got {dataset}"
        )
    train_split, validation_split = splits
    train_root, validation_root = (data, data) if dataset else _roots(data, splits)
    train = _open(train_root, dataset, train_split)
    validation = _open(validation_root, dataset, validation_split)
    for source, split, root in (
        (train, train_split, train_root),
        (validation, validation_split, validation_root),
    ):
        if len(source) == 0:
            raise ValueError(f"the split {split!r} in {root} has no images")
    _check_same_classes(train.classes, validation.classes)
    return train, validation


def _check_same_classes(train: Sequence[str] | None, validation: Sequence[str] | None) -> None:
    if train is None or validation is None or [*train] == [*validation]:
        return
    only_train = sorted({*train} - {*validation})[:5]
    only_validation = sorted({*validation} - {*train})[:5]
    raise ValueError(
        f"training and validation have different classes, {len(train)} and {len(validation)}: "
        f"only in training {only_train}, only in validation {only_validation}"
    )


def _kind(dataset: str) -> str:
    return dataset.partition("/")[0].lower()


def _open(root: str, dataset: str, split: str) -> Source:
    if not dataset:
        return ClassFolders(root) if Path(root).is_dir() else _Tar(root)
    from timm.data import ImageDataset, create_dataset

    try:
        if _kind(dataset) == "wds":
            from tcnn_model.training.shards import ShardReader

            return _Timm(ImageDataset(root, reader=ShardReader(root, _names(split))))
        return _Timm(create_dataset(dataset, root=root, split=split))
    # timm checks paths and types of data sets with assert, and hfds/ needs a package that may be
    # missing.
    except (RuntimeError, OSError, AssertionError, ImportError) as error:
        raise ValueError(
            f"cannot open the split {split!r} of {dataset} in {root}: {error}"
        ) from error


def _roots(data: str, splits: tuple[str, str]) -> tuple[str, str]:
    """Return the folders of the splits, which have a folder for every class."""
    root = Path(data)
    if not root.exists():
        raise ValueError(f"there is no folder {data}")
    if root.is_file():
        raise ValueError(
            f"{data} is one file: give a folder that has one for training and one for validation"
        )
    train = _split(root, splits[0])
    validation = _split(root, splits[1])
    if train is None or validation is None:
        names = " and ".join(f"{SPLITS.get(split, (split,))[0]}/" for split in splits)
        # Archives often unpack to a folder inside a folder.
        inner = [
            folder for folder in _folders(root) if all(_split(folder, split) for split in splits)
        ]
        hint = f"; did you mean {inner[0]}?" if inner else ""
        raise ValueError(f"expected {names} in {data}, found {listing(root)}{hint}")
    return str(train), str(validation)


def _split(root: Path, split: str) -> Path | None:
    candidates = [root / f"{name}{ending}" for name in _names(split) for ending in ("", ".tar")]
    return next((path for path in candidates if path.is_dir() or path.is_file()), None)


def _names(split: str) -> tuple[str, ...]:
    """Return the name of a split and its synonyms."""
    for synonyms in SPLITS.values():
        if split in synonyms:
            return (split, *synonyms)
    return (split,)


def _folders(root: Path) -> list[Path]:
    return sorted(
        path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
