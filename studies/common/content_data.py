"""Images of the comparison of content and mixing, and the features of a frozen trunk, computed once."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.digits import MEAN, STD, cluttered_digits
from common.folder import spread
from common.small_images import (
    SmallImages,
    atomic_save,
    decoded,
    normalized,
    split,
    views,
)
from common.small_trainings import order_of_images
from tcnn_probe import evaluation

__all__ = ["SEVERITY", "Features", "Images", "load_images"]

SEVERITY = 3


@dataclass(frozen=True)
class Images:
    """All images of a run.

    Attributes:
        train: of the trainings.
        held_out: of the training folder, in no training.
        test: of the endpoints.
        corrupted: test images under each corruption, shape (corruptions, N, H, W, 3).
        corrupted_rows: numbers of these in ``test``.
    """

    train: SmallImages
    held_out: SmallImages
    test: SmallImages
    corrupted: NDArray[np.uint8]
    corrupted_rows: NDArray[np.int64]


def load_images(
    data: str,
    cache: Path,
    *,
    held_out: int,
    corrupted: int,
    limit: int | None,
    seed: int,
) -> Images:
    """Read the images, or make scenes of digits, and corrupt some of the test images.

    Args:
        data: folder with train/ and val/, or "digits".
        cache: where decoded and corrupted images are kept.
        held_out: number of training images that no training sees.
        corrupted: number of test images to corrupt.
        limit: of digits.
        seed: of the split and of the corruptions.
    """
    whole, test = _scenes(limit) if data == "digits" else decoded(data, cache)
    train, others = split(whole, held_out, seed)
    rows = np.array(spread(len(test), corrupted))
    file = cache / f"corrupted_{len(rows)}.npz"
    if not file.exists():
        chosen = test.pixels[rows]
        worse = [
            evaluation.corrupt(chosen, name, SEVERITY, seed=seed)
            for name in evaluation.CORRUPTIONS
        ]
        atomic_save(file, pixels=np.stack(worse))
    with np.load(file) as arrays:
        return Images(train, others, test, arrays["pixels"], rows)


class Features:
    """What a frozen trunk gives for all images, kept in half precision.

    Args:
        trunk: frozen, in eval mode.
        images: of the run.
        cache: folder of the files.
        count: of views of each training image.
        reference, probed: numbers of training images for static attention, and of held-out ones for recordings.
    """

    def __init__(
        self,
        trunk: nn.Module,
        images: Images,
        cache: Path,
        *,
        count: int,
        reference: int,
        probed: int,
    ) -> None:
        self.trunk, self.images = trunk.eval(), images
        self._views = _cached(
            cache / "train.npy",
            lambda: self._of_views(count),
            (count, len(images.train)),
        )
        self.test = _cached(
            cache / "test.npy",
            lambda: [self._of(images.test.pixels)],
            (len(images.test),),
        )
        worse = images.corrupted
        self.corrupted = _cached(
            cache / "corrupted.npy",
            lambda: (self._of(part) for part in worse),
            worse.shape[:2],
        )
        train, others = images.train, images.held_out
        self.reference = self.as_given(
            self._of(train.pixels[spread(len(train), reference)])
        )
        chosen = spread(len(others), probed)
        self.probed, self.probed_labels = (
            self.as_given(self._of(others.pixels[chosen])),
            others.labels[chosen],
        )

    @staticmethod
    def as_given(features: NDArray[np.float16]) -> Tensor:
        """Features as the tail takes them, float32."""
        return torch.from_numpy(np.array(features, np.float32))

    def batches(
        self, steps: int, batch_size: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and labels of each step."""
        for rows, view in order_of_images(
            len(self.images.train), steps, batch_size, seed
        ):
            yield (
                self.as_given(self._views[view, rows]),
                torch.from_numpy(self.images.train.labels[rows]),
            )

    def pixel_batches(
        self, steps: int, batch_size: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The images whose features :meth:`batches` gives, and labels."""
        train = self.images.train
        for rows, view in order_of_images(len(train), steps, batch_size, seed):
            yield (
                normalized(views(train, rows, view)),
                torch.from_numpy(train.labels[rows]),
            )

    def _of_views(self, count: int) -> Iterator[NDArray[np.float16]]:
        rows = np.arange(len(self.images.train))
        for view in range(count):
            yield self._of(views(self.images.train, rows, np.full(len(rows), view)))

    def _of(
        self, pixels: NDArray[np.uint8], batch_size: int = 250
    ) -> NDArray[np.float16]:
        with torch.inference_mode():
            parts = [
                self.trunk(normalized(pixels[start : start + batch_size]))
                .half()
                .contiguous()
                .numpy()
                for start in range(0, len(pixels), batch_size)
            ]
        return np.concatenate(parts)


def _cached(file: Path, parts, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """Read an array from the disk when it is needed; the first time it is made, part by part."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.tmp")
        array = None
        for number, part in enumerate(parts()):
            if array is None:
                whole = (*shape, *part.shape[1:])
                array = np.lib.format.open_memmap(temporary, "w+", np.float16, whole)
            target = array if len(shape) == 1 else array[number]
            target[:] = part
        array.flush()
        temporary.replace(file)
    return np.load(file, mmap_mode="r")


def _scenes(limit: int | None) -> tuple[SmallImages, SmallImages]:
    """Training and test scenes of digits, grey as three channels."""
    torch.manual_seed(0)
    parts = []
    for scenes in cluttered_digits(size=32, limit=limit, fragments=2):
        images, labels = zip(
            *(scenes[number] for number in range(len(scenes))), strict=True
        )
        grey = (
            (torch.cat(images) * STD + MEAN).clamp(0, 1).mul(255).round().byte().numpy()
        )
        parts.append(
            SmallImages(np.repeat(grey[..., None], 3, -1), np.array(labels, np.int64))
        )
    return parts[0], parts[1]
