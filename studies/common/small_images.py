"""Small photographs, such as CIFAR-10's, decoded once, with numbered views of crops and flips; and
images in memory, digits or photographs, for trainings from scratch.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.digits import plain_digits
from common.folder import ClassFolders, open_folder
from common.output import InputError

__all__ = [
    "ImageSet",
    "SmallImages",
    "atomic_save",
    "decoded",
    "load_image_set",
    "normalized",
    "split",
    "views",
]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet, with which the published weights were trained."""

_BORDER = 4
"""Width of the border of zeros around an image from
which crops are taken (He et al. 2016, Sec. 4.2).
"""


@dataclass(frozen=True)
class SmallImages:
    """Small images in memory, with their labels.

    Attributes:
        pixels: Pixels, uint8, shape (N, H, W, 3).
        labels: Classes, shape (N,).
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: NDArray[np.int64] | slice) -> "SmallImages":
        """Return the images of these rows."""
        return SmallImages(self.pixels[rows], self.labels[rows])


def decoded(folder: str, cache: Path, limit: int | None = None) -> tuple[SmallImages, SmallImages]:
    """Return training and test images of a folder with train/ and val/,
    decoded once and kept in ``cache``.

    Args:
        folder: Folder of images.
        cache: Folder of the decoded images, which other images must not share.
        limit: Number of images to use, a quarter of them for tests; None for all.

    Raises:
        InputError: The folder has another layout, or images of several sizes.
    """
    parts = []
    for name, images in zip(("train", "val"), open_folder(folder, limit), strict=True):
        file = cache / f"{name}.npz"
        if not file.exists():
            part = _read(images)
            atomic_save(file, pixels=part.pixels, labels=part.labels)
        with np.load(file) as arrays:
            parts.append(SmallImages(arrays["pixels"], arrays["labels"]))
    return parts[0], parts[1]


def split(images: SmallImages, held_out: int, seed: int = 0) -> tuple[SmallImages, SmallImages]:
    """Split off held-out images, for choices that must not depend on test images;
    return the rest and these.
    """
    # Files are sorted by class.
    order = np.random.default_rng(seed).permutation(len(images))
    return images.part(np.sort(order[held_out:])), images.part(np.sort(order[:held_out]))


def views(
    images: SmallImages, rows: NDArray[np.int64], view: NDArray[np.int64], seed: int = 0
) -> NDArray[np.uint8]:
    """Return random crops of images with a border of 4 zeros,
    at the size of the images, half of them flipped.

    View v of image i is always the same, so that its features can be cached.

    Args:
        images: All images.
        rows: Indices of the images of the batch, shape (B,).
        view: Number of the view of each, shape (B,).
        seed: Seed of all views.

    Returns:
        Pixels, shape (B, H, W, 3).
    """
    height, width = images.pixels.shape[1:3]
    moves = [
        _moves(seed, int(number), len(images))[row] for number, row in zip(view, rows, strict=True)
    ]
    crops = np.zeros((len(rows), height, width, 3), np.uint8)
    # Only the images of this batch are padded: a padded copy of all 32 x 32 images would take 1.6
    # times their memory.
    padded = np.pad(images.pixels[rows], ((0, 0), (_BORDER, _BORDER), (_BORDER, _BORDER), (0, 0)))
    for number, (top, left, flip) in enumerate(moves):
        crop = padded[number, top : top + height, left : left + width]
        crops[number] = crop[:, ::-1] if flip else crop
    return crops


def normalized(pixels: NDArray[np.uint8]) -> Tensor:
    """Convert uint8 pixels (B, H, W, 3) to the network's input,
    (B, 3, H, W) in float32, channels last in memory.
    """
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    # Convolutions on the CPU are faster in this layout.
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


def atomic_save(file: Path, **arrays: NDArray[np.generic]) -> None:
    """Write a .npz file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("wb") as stream:
        # Pixels hardly compress, and uncompressed files load faster.
        np.savez(stream, **arrays)
    temporary.replace(file)


# Each batch needs the moves of all images for a few views, so they are cached.
_MOVES: dict[tuple[int, int, int], NDArray[np.int64]] = {}


def _moves(seed: int, view: int, count: int) -> NDArray[np.int64]:
    """Return top, left and flip of a view of every image, shape (count, 3)."""
    key = seed, view, count
    if key not in _MOVES:
        rng = np.random.default_rng([seed, view])
        _MOVES[key] = rng.integers(0, (2 * _BORDER + 1, 2 * _BORDER + 1, 2), (count, 3))
    return _MOVES[key]


def _read(images: ClassFolders) -> SmallImages:
    pixels = [np.asarray(images.loader(path)) for path, _ in images.samples]
    # All images are stacked in one array.
    if len({picture.shape for picture in pixels}) > 1:
        raise InputError("--data: expected images of one size, got several")
    return SmallImages(np.stack(pixels), np.array(images.targets, np.int64))


@dataclass(frozen=True)
class ImageSet:
    """Training and validation images, with the settings by which small transformers learn them.

    Args:
        images, labels: Training images, (N, C, H, H), and their classes.
        validation, validation_labels: Validation images and their classes.
        patch: Side of a patch, in pixels.
        rate, batch: Learning rate and batch size.
    """

    images: Tensor
    labels: Tensor
    validation: Tensor
    validation_labels: Tensor
    patch: int
    rate: float
    batch: int


def load_image_set(data: str, limit: int | None, cache: Path) -> ImageSet:
    """Return the digits, or the photographs of a folder.

    Args:
        data: "digits", or a folder with train/ and val/.
        limit: Number of images to use, a quarter of them for validation; None for all.
        cache: Folder of the decoded photographs.

    Raises:
        InputError: The folder has another layout, or images of several sizes.
    """
    if data == "digits":
        counts = (None, None) if limit is None else (limit - limit // 4, limit // 4)
        images = [
            values[:count]
            for training, count in zip((True, False), counts, strict=True)
            for values in plain_digits(training=training)
        ]
        return ImageSet(*images, patch=2, rate=3e-3, batch=96)
    arrays = []
    for part in decoded(data, cache, limit):
        arrays += [normalized(part.pixels), torch.from_numpy(part.labels)]
    return ImageSet(*arrays, patch=4, rate=1e-3, batch=48)
