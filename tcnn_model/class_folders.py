"""Pictures on disk, with a folder for each class."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from PIL import Image
from torchvision.datasets import ImageFolder

from tcnn_model.pictures import picture_endings, read_picture

__all__ = ["ClassFolders", "describe", "listing", "reason_unused", "shortened"]


class ClassFolders(ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """Pictures in a folder for each class, which is their label however deep they are in it,
    as in torchvision.

    All files that Pillow reads are used. Hidden files and folders are not.

    Args:
        folder: Folder that has a folder for each class.
        classes: Names of the classes by label, some of which may have no pictures; None for the
            folders' names, sorted as text (0, 1, 10, 2), as torchvision does.

    Attributes:
        classes: Names of the classes by label.
        samples: Path and label of each picture.
        unused: Numbers of files that are not used, by ending, and of "hidden" files and folders.

    Raises:
        ValueError: There are fewer than two classes or a class has no pictures, if ``classes`` is
            None; or there are folders of other classes; or no pictures at all.
    """

    def __init__(self, folder: str | Path, classes: Sequence[str] | None = None) -> None:
        self.unused: Counter[str] = Counter()
        self._known = classes
        root = Path(folder).expanduser()
        self._depth = len(root.parts)
        super().__init__(
            str(root),
            loader=read_picture,
            is_valid_file=self._is_used,
            allow_empty=True,
        )
        self.classes: list[str] = [*self.class_to_idx]
        counts: Counter[int] = Counter(self.targets)
        empty = [name for label, name in enumerate(self.classes) if not counts[label]]
        if (empty and classes is None) or not self.samples:
            raise ValueError(
                f"there are no pictures of {shortened(empty)} in {folder}: {describe(self)}"
            )

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the names of the folders, and the label of each class."""
        names = []
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if entry.is_dir() and not entry.name.startswith("."):
                names.append(entry.name)
            else:
                self.unused[reason_unused([entry.name]) or "without a class"] += 1
        if self._known is None and len(names) < 2:
            raise ValueError(
                f"expected a folder for each class, two or more, in {directory}, found "
                f"{listing(directory)}"
            )
        labels = {name: label for label, name in enumerate(self._known or names)}
        # Pictures of a class that was not trained would always be classified wrongly.
        if unknown := [name for name in names if name not in labels]:
            raise ValueError(
                f"{directory} has folders of other classes than {shortened([*labels])}: "
                f"{shortened(unknown)}"
            )
        return names, labels

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return a picture, RGB, and its label;
        any exception means that the picture cannot be read.
        """
        path, label = self.samples[index]
        return read_picture(path), label

    def name(self, index: int) -> str:
        """Return the path of a picture in the folder."""
        return os.path.relpath(self.samples[index][0], self.root)

    def _is_used(self, path: str) -> bool:
        reason = reason_unused(PurePath(path).parts[self._depth :])
        if reason is not None:
            self.unused[reason] += 1
        return reason is None


def reason_unused(parts: Sequence[str]) -> str | None:
    """Return why a file is not used as a picture:
    it is "hidden", or has this ending; None if it is used.

    Args:
        parts: Names of the folders that lead to the file, and of the file.
    """
    if any(part.startswith(".") for part in parts):
        return "hidden"
    ending = PurePath(parts[-1]).suffix.lower()
    if ending in picture_endings():
        return None
    return ending or "without an ending"


def describe(source: Any) -> str:
    """Describe which pictures of a source are used, their classes, and which files are not used."""
    text = f"{len(source)} pictures"
    if source.classes is not None:
        text += f" of {len(source.classes)} classes: {shortened(source.classes)}"
    unused: Any = getattr(source, "unused", Counter())
    counts = [f"{count} {reason}" for reason, count in unused.most_common()]
    return f"{text}; files not used: {', '.join(counts)}" if counts else text


def shortened(names: Sequence[str]) -> str:
    """Return the first five names as text."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def listing(folder: str | Path) -> str:
    """List the first files of a folder for a message."""
    names = sorted(
        f"{path.name}/" if path.is_dir() else path.name for path in Path(folder).iterdir()
    )
    return shortened(names) or "nothing"
