"""Images and labels by number: scikit-learn's digits, and every data set of timm's that has numbers."""

import stat
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

__all__ = ["DIGITS", "Source", "open_sources"]

DIGITS = ("digits", "parity")
SPLITS = {"train": ("train", "training"), "validation": ("val", "validation", "valid", "eval", "evaluation")}


class Source(Protocol):
    """Labelled images."""

    @property
    def classes(self) -> Sequence[str] | None:
        """Names by label, if they are known."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image in colour, and its label; an exception, of whatever kind, if it cannot be read."""

    def name(self, index: int) -> str:
        """Name of the image's file."""


class _Digits:
    """scikit-learn's ``load_digits``: 1,797 images of 8 x 8 pixels, three quarters for training."""

    def __init__(self, training: bool, *, parity: bool = False) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        data = load_digits()
        split = train_test_split(range(len(data.target)), test_size=0.25, random_state=0, stratify=data.target)
        self._numbers = split[0] if training else split[1]
        self._images, self._labels = np.clip(data.images * 16, 0, 255).astype(np.uint8), data.target
        self.classes = ("even", "odd") if parity else tuple("0123456789")

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, index: int) -> tuple[Image.Image, int]:
        number = self._numbers[index]
        return Image.fromarray(self._images[number]).convert("RGB"), int(self._labels[number]) % len(self.classes)

    def name(self, index: int) -> str:
        return f"digit {self._numbers[index]}"


class _Timm:
    """A data set of ``timm.data.create_dataset``, read here: timm's own way replaces what it cannot read in silence."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._reader = dataset, getattr(dataset, "reader", None)
        found = getattr(self._reader, "class_to_idx", None) or getattr(dataset, "class_to_idx", None)
        self.classes = tuple(sorted(found, key=found.__getitem__)) if found else None

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> tuple[Image.Image, int]:
        self._check_regular(index)
        if self._reader is None:  # torchvision's
            image, label = self._dataset[index]
            return image.convert("RGB"), int(label)
        file, label = self._reader[index][:2]
        with file if isinstance(file, Image.Image) else closing(file):
            image = file if isinstance(file, Image.Image) else Image.open(file)
            return image.convert("RGB"), int(label)

    def _check_regular(self, index: int) -> None:
        # To open a pipe would be to wait for somebody who writes to it.
        samples = getattr(self._reader or self._dataset, "samples", None)
        path = samples[index][0] if samples else None
        if isinstance(path, str) and not stat.S_ISREG(Path(path).stat().st_mode):
            raise OSError("not a regular file")

    def name(self, index: int) -> str:
        return str(index) if self._reader is None else str(self._reader.filename(index))


def open_sources(data: str, dataset: str, splits: tuple[str, str]) -> tuple[Source, Source]:
    """Training and validation images.

    Args:
        data: "digits", "parity" (the same digits, as even or odd), or a folder or tar file.
        dataset: timm's name of a kind of data set; "" for folders and tar files, "wds/" for WebDataset shards.
        splits: names of those for training and for validation.

    Raises:
        ValueError: what is there is not what was expected; the message says what was found.
    """
    if data in DIGITS:
        return _Digits(True, parity=data == "parity"), _Digits(False, parity=data == "parity")
    if _kind(dataset) in ("tfds", "hfids"):
        raise ValueError(f"{dataset} gives images in a stream, and a run that is exact needs their numbers: use hfds/")
    roots = _roots(data, splits) if not dataset else (data, data)
    sources = [_open(root, dataset, split) for root, split in zip(roots, splits, strict=True)]
    for source, split, root in zip(sources, splits, roots, strict=True):
        if len(source) == 0:
            raise ValueError(f"the split {split!r} in {root} has no images")
    train, validation = (source.classes for source in sources)
    if train is not None and validation is not None and train != validation:
        only = [sorted({*one} - {*other})[:5] for one, other in ((train, validation), (validation, train))]
        raise ValueError(
            f"training and validation have different classes, {len(train)} and {len(validation)}: "
            f"only in training {only[0]}, only in validation {only[1]}"
        )
    return sources[0], sources[1]


def _kind(dataset: str) -> str:
    return dataset.partition("/")[0].lower()


def _open(root: str, dataset: str, split: str) -> _Timm:
    from timm.data import ImageDataset, create_dataset

    try:
        if _kind(dataset) == "wds":
            from tcnn_model.training.shards import ShardReader

            return _Timm(ImageDataset(root, reader=ShardReader(root, _names(split))))
        return _Timm(create_dataset(dataset, root=root, split=split, search_split=False))
    except (RuntimeError, OSError, AssertionError, ImportError) as error:
        raise ValueError(f"cannot open the split {split!r} of {dataset or 'the folder'} in {root}: {error}") from error


def _roots(data: str, splits: tuple[str, str]) -> tuple[str, str]:
    """The folders of the splits, each with a folder for every class."""
    root = Path(data)
    if not root.exists():
        raise ValueError(f"there is no folder {data}")
    if root.is_file():
        raise ValueError(f"{data} is one file: give a folder that has one for training and one for validation")
    found = [_split(root, split) for split in splits]
    if None in found:
        inner = [each.name for each in _folders(root) if all(_split(each, split) for split in splits)]
        hint = f"; did you mean {root / inner[0]}?" if inner else ""
        names = " and ".join(f"{SPLITS.get(split, (split,))[0]}/" for split in splits)
        raise ValueError(f"expected {names} in {data}, found {_some(root)}{hint}")
    for folder in found:
        assert folder is not None
        if folder.is_dir():
            _check_classes(folder)
    return str(found[0]), str(found[1])


def _split(root: Path, split: str) -> Path | None:
    candidates = [root / f"{name}{ending}" for name in _names(split) for ending in ("", ".tar")]
    return next((path for path in candidates if path.is_dir() or path.is_file()), None)


def _names(split: str) -> tuple[str, ...]:
    """A split's name, and the others that it goes by."""
    return (split, *next((synonyms for synonyms in SPLITS.values() if split in synonyms), ()))


def _check_classes(folder: Path) -> None:
    classes = _folders(folder)
    if len(classes) < 2:
        raise ValueError(f"expected a folder for each class, two or more, in {folder}, found {_some(folder)}")
    for each in classes:
        inside = [path for path in each.iterdir() if not path.name.startswith(".")]
        if inside and all(path.is_dir() for path in inside):
            raise ValueError(
                f"expected images in {each}, found only folders, {_some(each)}: there is one level too many"
            )


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _some(folder: Path) -> str:
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
