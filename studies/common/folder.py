"""Folder of the user's own images: ``train/`` and ``val/``, with a folder for every class in each."""

from collections.abc import Sequence
from pathlib import Path

import timm.data
from PIL import Image
from torchvision.datasets import ImageFolder

from common.ending import InputError

__all__ = ["ClassFolders", "imagenet_rows", "open_folder", "spread"]

SPLITS = ("train", "training"), ("val", "validation", "valid")


class ClassFolders(ImageFolder):
    """Images in a folder for each class; hidden folders are ignored.

    Args:
        folder: Folder of the split.
        data: Folder that the user named, for messages.
        classes: Classes of the training images; None for the training images themselves.

    Raises:
        InputError: There are no images or, for training, fewer than two folders of classes or an empty one; or, for
            validation, a class that the training images do not have.
    """

    def __init__(
        self, folder: Path, data: str, classes: list[str] | None = None
    ) -> None:
        self._data = data
        self._known = classes
        try:
            # A validation folder may lack images of some classes; classes keep their numbers from training.
            super().__init__(str(folder), loader=_read, allow_empty=classes is not None)
        except FileNotFoundError as error:
            raise InputError(f"--data: {error}") from None
        self.classes = self.classes if classes is None else classes
        if not self.samples:
            raise InputError(f"--data: there are no images in {folder}")

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the names of the folders in order, and their numbers."""
        names = sorted(
            path.name
            for path in Path(directory).iterdir()
            if path.is_dir() and path.name[0] != "."
        )
        # With one class there is nothing to learn; validation images may all be of one class.
        if len(names) < 2 and self._known is None:
            raise _layout(
                self._data,
                f"one class, {names[0]!r}" if names else "no folder of a class",
                directory,
            )
        # Validation images have the numbers of the training classes.
        known = names if self._known is None else self._known
        # Images of a class that was not trained would always be classified wrongly.
        if unknown := [name for name in names if name not in known]:
            raise InputError(
                f"--data: {directory} has classes that the training images do not have: {_shortened(unknown)}"
            )
        return names, {name: number for number, name in enumerate(known)}

    def keep(self, count: int) -> None:
        """Keep ``count`` of the images, spread evenly over the classes."""
        self.samples = [
            self.samples[number] for number in spread(len(self.samples), count)
        ]
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
        next((root / name for name in names if (root / name).is_dir()), None)
        for names in SPLITS
    ]
    if None in folders:
        names = sorted(
            f"{path.name}/" if path.is_dir() else path.name for path in root.iterdir()
        )
        raise _layout(data, _shortened(names) or "nothing", data)
    train = ClassFolders(folders[0], data)
    validation = ClassFolders(folders[1], data, train.classes)
    if limit is not None:
        train.keep(limit - limit // 4)
        validation.keep(limit // 4)
    return train, validation


def imagenet_rows(
    classes: Sequence[str], subset: str | None = "imagenet-1k"
) -> list[int] | None:
    """Return the rows of the classes in an ImageNet classifier if all are WordNet ids of its classes, else None."""
    names = timm.data.ImageNetInfo(subset).label_names() if subset else []
    rows = {name: row for row, name in enumerate(names)}
    return [rows[name] for name in classes] if rows.keys() >= set(classes) else None


def spread(length: int, count: int) -> list[int]:
    """Return ``count`` indices below ``length``, spread evenly, since folders are sorted by class."""
    count = min(count, length)
    return [round((i + 0.5) * length / count - 0.5) for i in range(count)]


def _read(path: str) -> Image.Image:
    """Open an image as RGB, or refuse it with a message that names the file."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise InputError(
            f"--data: {path} cannot be read as an image ({error})"
        ) from None


def _layout(data: str, content: str, folder: str | Path) -> InputError:
    """Return the refusal of a folder, which states the expected layout and what the folder contains."""
    lines = "".join(
        f"    {data}/{split}/cat/*.jpg, {data}/{split}/dog/*.jpg, ...\n"
        for split in ("train", "val")
    )
    expected = "expected a folder for each class, two or more, in train/ and in val/"
    return InputError(f"--data: {expected}:\n{lines}found in {folder}: {content}")


def _shortened(names: Sequence[str]) -> str:
    """Return the first five names as text."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
