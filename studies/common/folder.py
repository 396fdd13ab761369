"""Folder of the user's own images: ``train/`` and ``val/``,
with a folder for every class in each.
"""

from collections.abc import Sequence
from pathlib import Path

import timm.data
from PIL import Image

from common.output import InputError
from tcnn_model import class_folders
from tcnn_model.pictures import read_picture

__all__ = ["ClassFolders", "imagenet_rows", "open_folder", "spread"]

SPLITS = ("train", "training"), ("val", "validation", "valid")


class ClassFolders(class_folders.ClassFolders):
    """Images in a folder for each class, as ``tcnn-finetune`` reads them.

    Args:
        folder: Folder of the split.
        data: Folder that the user named, for messages.
        classes: Classes of the training images; None for the training images themselves.

    Raises:
        InputError: The folder has another layout, or a class has no images.
    """

    def __init__(self, folder: Path, data: str, classes: list[str] | None = None) -> None:
        try:
            super().__init__(folder, classes)
        except ValueError as error:
            raise _layout(data, str(error)) from None
        self.loader = _read
        print(f"{folder}: {class_folders.describe(self)}")

    def keep(self, count: int) -> None:
        """Keep ``count`` of the images, spread evenly over the classes."""
        self.samples = [self.samples[number] for number in spread(len(self.samples), count)]
        # torchvision also stores the labels in a list of their own.
        self.targets = [label for _, label in self.samples]


def open_folder(data: str, limit: int | None) -> tuple[ClassFolders, ClassFolders]:
    """Return training and validation images.

    Args:
        data: Folder with ``train/`` and ``val/``, and a folder for every class in each.
        limit: Number of images to use, a quarter of them for validation; None for all.

    Raises:
        InputError: There is no such folder, or it has another layout.
    """
    root = Path(data)
    if not root.is_dir():
        raise InputError(f"--data: there is no folder {data!r}")
    folders = [
        next((root / name for name in names if (root / name).is_dir()), None) for names in SPLITS
    ]
    if None in folders:
        raise _layout(data, f"found in {data}: {class_folders.listing(data)}")
    train = ClassFolders(folders[0], data)
    validation = ClassFolders(folders[1], data, train.classes)
    if limit is not None:
        train.keep(limit - limit // 4)
        validation.keep(limit // 4)
    return train, validation


def imagenet_rows(classes: Sequence[str], subset: str | None = "imagenet-1k") -> list[int] | None:
    """Return the rows of the classes in an ImageNet classifier
    if all are WordNet ids of its classes, else None.
    """
    names = timm.data.ImageNetInfo(subset).label_names() if subset else []
    rows = {name: row for row, name in enumerate(names)}
    return [rows[name] for name in classes] if rows.keys() >= set(classes) else None


def spread(length: int, count: int) -> list[int]:
    """Return ``count`` indices below ``length``,
    spread evenly, since folders are sorted by class.
    """
    count = min(count, length)
    return [round((i + 0.5) * length / count - 0.5) for i in range(count)]


def _read(path: str) -> Image.Image:
    """Open an image as RGB, or refuse it with a message that names the file."""
    try:
        return read_picture(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"--data: {path} cannot be read as an image ({error})") from None


def _layout(data: str, reason: str) -> InputError:
    """Return the refusal of a folder, which states the expected layout and the reason."""
    lines = "".join(
        f"    {data}/{split}/cat/*.jpg, {data}/{split}/dog/*.jpg, ...\n"
        for split in ("train", "val")
    )
    expected = "expected a folder for each class, two or more, in train/ and in val/"
    return InputError(f"--data: {expected}:\n{lines}{reason}")
