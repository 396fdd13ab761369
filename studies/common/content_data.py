"""Images of the comparison of content and mixing,
and the features of a frozen trunk, which are computed once.
"""

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
from common.stepwise import order_of_images
from tcnn_probe import evaluation

__all__ = ["Features", "Images", "load_images"]

SEVERITY = 3


@dataclass(frozen=True)
class Images:
    """Images of a run.

    Attributes:
        train: Training images.
        held_out: Images of the training folder that no training sees.
        test: Test images, on which the endpoints are measured.
        corrupted: Test images under each corruption, shape (corruptions, N, H, W, 3).
        corrupted_rows: Indices in ``test`` of the images that are corrupted, shape (N,).
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
        data: Folder with train/ and val/, or "digits".
        cache: Folder that keeps decoded and corrupted images.
        held_out: Number of training images that no training sees.
        corrupted: Number of test images to corrupt.
        limit: Number of digits to use; None for all.
        seed: Seed of the split and of the corruptions.
    """
    all_images, test = _scenes(limit) if data == "digits" else decoded(data, cache)
    train, held_out_images = split(all_images, held_out, seed)
    # The rows are spread evenly over the test images, because those are sorted by class.
    rows = np.array(spread(len(test), corrupted))
    file = cache / f"corrupted_{len(rows)}.npz"
    if not file.exists():
        pixels = test.pixels[rows]
        corrupted_pixels = [
            evaluation.corrupt(pixels, name, SEVERITY, seed=seed) for name in evaluation.CORRUPTIONS
        ]
        atomic_save(file, pixels=np.stack(corrupted_pixels))
    with np.load(file) as arrays:
        return Images(train, held_out_images, test, arrays["pixels"], rows)


class Features:
    """Outputs of a frozen trunk for all images, kept in half precision.

    Args:
        trunk: Frozen trunk, in eval mode.
        images: Images of the run.
        cache: Folder of the files.
        count: Number of views of each training image that are kept; 0 to compute their features at
            each step, as a GPU does faster than a disk gives them.
        reference, probed: Number of training images over which static attention is averaged, and of
            held-out images that are recorded.
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
        self.trunk = trunk.eval()
        self.device = next(trunk.parameters()).device
        self.images = images
        self._views = (
            _cached(
                cache / "train.npy",
                lambda: self._of_views(count),
                (count, len(images.train)),
            )
            if count
            else None
        )
        self.test = _cached(
            cache / "test.npy",
            lambda: [self._of(images.test.pixels)],
            (len(images.test),),
        )
        corrupted = images.corrupted
        self.corrupted = _cached(
            cache / "corrupted.npy",
            lambda: (self._of(part) for part in corrupted),
            corrupted.shape[:2],
        )
        train, held_out = images.train, images.held_out
        rows = spread(len(train), reference)
        self.reference = self.as_given(self._of(train.pixels[rows])).to(self.device)
        rows = spread(len(held_out), probed)
        self.probed = self.as_given(self._of(held_out.pixels[rows])).to(self.device)
        self.probed_labels = held_out.labels[rows]

    @staticmethod
    def as_given(features: NDArray[np.float16]) -> Tensor:
        """Return features as a float32 tensor, the input of the tail."""
        return torch.from_numpy(np.array(features, np.float32))

    def batches(self, steps: int, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features and labels of each step."""
        if self._views is None:
            for pixels, labels in self.pixel_batches(steps, batch_size, seed):
                yield self._half(pixels).float(), labels
            return
        for rows, view in order_of_images(len(self.images.train), steps, batch_size, seed):
            yield (
                self.as_given(self._views[view, rows]),
                torch.from_numpy(self.images.train.labels[rows]),
            )

    def pixel_batches(
        self, steps: int, batch_size: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images whose features :meth:`batches` gives, and labels."""
        train = self.images.train
        for rows, view in order_of_images(len(train), steps, batch_size, seed):
            yield (
                normalized(views(train, rows, view)).to(self.device),
                torch.from_numpy(train.labels[rows]).to(self.device),
            )

    def _of_views(self, count: int) -> Iterator[NDArray[np.float16]]:
        rows = np.arange(len(self.images.train))
        for view in range(count):
            yield self._of(views(self.images.train, rows, np.full(len(rows), view)))

    def _of(self, pixels: NDArray[np.uint8], batch_size: int = 250) -> NDArray[np.float16]:
        parts = [
            self._half(normalized(pixels[start : start + batch_size]).to(self.device))
            .contiguous()
            .cpu()
            .numpy()
            for start in range(0, len(pixels), batch_size)
        ]
        return np.concatenate(parts)

    @torch.no_grad()
    def _half(self, pixels: Tensor) -> Tensor:
        # Half precision takes half the space on disk, and its rounding is far below the noise of a
        # batch.
        return self.trunk(pixels).half()


def _cached(file: Path, parts, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """Return a memory-mapped array; compute it part by part if its file does not exist."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.tmp")
        array = None
        for number, part in enumerate(parts()):
            if array is None:
                full_shape = (*shape, *part.shape[1:])
                # The file is mapped, because the features of all views may not fit into memory.
                array = np.lib.format.open_memmap(temporary, "w+", np.float16, full_shape)
            target = array if len(shape) == 1 else array[number]
            target[:] = part
        array.flush()
        # A file of this name is complete, even if the run was killed while it was written.
        temporary.replace(file)
    # Training reads rows in random order; the operating system keeps recently read rows in memory.
    return np.load(file, mmap_mode="r")


def _scenes(limit: int | None) -> tuple[SmallImages, SmallImages]:
    """Return training and test scenes of digits, with grey repeated in three channels."""
    # Training scenes are drawn from torch's global generator.
    torch.manual_seed(0)
    parts = []
    for scenes in cluttered_digits(size=32, limit=limit, fragments=2):
        images, labels = zip(*(scenes[number] for number in range(len(scenes))), strict=True)
        grey = (torch.cat(images) * STD + MEAN).clamp(0, 1).mul(255).round().byte().numpy()
        parts.append(
            # The network takes three colour channels.
            SmallImages(np.repeat(grey[..., None], 3, -1), np.array(labels, np.int64))
        )
    return parts[0], parts[1]
