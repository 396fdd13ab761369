"""Photographs of a user: files of folders,
spread over their subfolders, and how a model takes them.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from tcnn_model.class_folders import listing, reason_unused
from tcnn_model.pictures import read_picture
from tcnn_probe.images import prepare_pixels
from tcnn_probe.models import first_line

__all__ = ["Photographs", "find_masks", "find_photographs", "prepare_mask"]

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True)
class Photographs:
    """Photographs that were chosen from all that were found.

    Args:
        paths: Files, folder by folder.
        names: Their names, from the folders that were given on, without the path that leads there.
        available: Number of files found in each folder.
        unreadable: Reasons why chosen files cannot be read, by file.
    """

    paths: Sequence[Path]
    names: Mapping[Path, str]
    available: Mapping[Path, int]
    unreadable: Mapping[str, str]

    def describe(self) -> str:
        """Say how many photographs of which folders were chosen."""
        chosen = Counter(path.parent for path in self.paths)
        total = sum(self.available.values())
        text = f"{len(self.paths)} of {total} photographs"
        if len(self.available) == 1:
            return text
        counts = [
            f"{folder.name} {chosen[folder]}" + f" of {count}" * (chosen[folder] < count)
            for folder, count in self.available.items()
        ]
        rest = f" and {len(counts) - 12} more folders" if len(counts) > 12 else ""
        return f"{text}: {', '.join(counts[:12])}{rest}"


def find_photographs(sources: Paths, limit: int) -> Photographs:
    """Find photographs in folders, also below them, and choose some of each folder, evenly spread.

    Args:
        sources: A folder, a file, or several of them.
        limit: Largest number of photographs. As many are taken from each folder as from any other,
            if it has them.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: There are no pictures, or none that can be read.
    """
    given = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    by_folder: dict[Path, list[Path]] = {}
    names: dict[Path, str] = {}
    for source in map(Path, given):
        if not source.exists():
            raise FileNotFoundError(f"there is no file or folder {source}")
        for path in _pictures_below(source) if source.is_dir() else [source]:
            names[path] = path.relative_to(source if source.is_dir() else path.parent).as_posix()
            by_folder.setdefault(path.parent, []).append(path)
    if not by_folder:
        places = ", ".join(map(str, given)) or "an empty list"
        found = f" (found {listing(Path(given[0]))})" if len(given) == 1 else ""
        raise ValueError(f"there are no pictures in {places}{found}")
    shares = _shares([len(paths) for paths in by_folder.values()], limit)
    chosen = [
        paths[place]
        for paths, share in zip(by_folder.values(), shares, strict=True)
        for place in np.linspace(0, len(paths) - 1, share).round().astype(int)
    ]
    unreadable = {path: reason for path in chosen if (reason := _why_unreadable(path))}
    if len(unreadable) == len(chosen):
        path, reason = next(iter(unreadable.items()))
        raise ValueError(f"no picture can be read: {path}: {reason}")
    return Photographs(
        [path for path in chosen if path not in unreadable],
        names,
        {folder: len(paths) for folder, paths in by_folder.items()},
        {names[path]: reason for path, reason in unreadable.items()},
    )


def _why_unreadable(path: Path) -> str:
    """Return why a picture cannot be read, in a line; "" if it can."""
    try:
        with path.open("rb") as file, Image.open(file) as picture:
            if picture.format == "JPEG":
                # An eighth of the size, which is fast, but reads the whole file.
                picture.draft("RGB", (1, 1))
                picture.load()
                return ""
        read_picture(path)
    except UnidentifiedImageError:
        return "it is no picture"
    except Exception as error:  # damaged files raise many types
        return first_line(error)
    return ""


def _pictures_below(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in paths if reason_unused(path.relative_to(folder).parts) is None]


def _shares(sizes: Sequence[int], limit: int) -> list[int]:
    """Divide a number among folders as evenly as their sizes allow;
    the first folders get what is left over.
    """
    shares = [0] * len(sizes)
    left = min(limit, sum(sizes))
    while left:
        open_folders = [i for i, size in enumerate(sizes) if shares[i] < size]
        each = max(1, left // len(open_folders))
        for i in open_folders[: max(1, left)]:
            taken = min(each, sizes[i] - shares[i], left)
            shares[i] += taken
            left -= taken
    return shares


def find_masks(folder: str | os.PathLike[str], paths: Collection[Path]) -> dict[Path, Path]:
    """Return the mask of each photograph that has one: the picture in a folder with the same stem.

    A mask in a subfolder of the name of the photograph's folder is preferred.

    Raises:
        ValueError: No photograph has a mask.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"--masks: there is no folder {root}")
    by_stem: dict[str, Path] = {}
    for mask in _pictures_below(root):
        by_stem.setdefault(mask.stem, mask)
        by_stem[f"{mask.parent.name}/{mask.stem}"] = mask
    masks = {
        path: by_stem.get(f"{path.parent.name}/{path.stem}", by_stem.get(path.stem))
        for path in paths
    }
    known = {path: mask for path, mask in masks.items() if mask is not None}
    if not known:
        raise ValueError(
            f"--masks: no picture in {root} has the stem of a photograph, such as "
            f"{next(iter(paths)).stem}"
        )
    return known


def prepare_mask(path: Path, config: Mapping[str, Any]) -> Tensor:
    """Return a mask as the model would see it, (H, W),
    bool: whether a pixel is brighter than half of white.

    Masks of two values, such as 0 and 1, are stretched first.
    """
    values = np.asarray(read_picture(path).convert("L"), float)
    stretched = (values - values.min()) / max(np.ptp(values), 1)
    picture = Image.fromarray((255 * stretched).round().astype("uint8")).convert("RGB")
    return prepare_pixels([picture], config)[0].mean(0) > 0.5
