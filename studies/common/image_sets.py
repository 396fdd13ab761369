"""Images in memory for trainings from scratch:
scikit-learn's digits, or small photographs from a folder.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.digits import plain_digits
from common.small_images import decoded, normalized

__all__ = ["ImageSet", "load_image_set"]


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
        limit: Number of photographs to use, a quarter of them for validation; None for all.
        cache: Folder of the decoded photographs.

    Raises:
        InputError: The folder has another layout, or images of several sizes.
    """
    if data == "digits":
        images = (*plain_digits(training=True), *plain_digits(training=False))
        return ImageSet(*images, patch=2, rate=3e-3, batch=96)
    arrays = []
    for part in decoded(data, cache, limit):
        arrays += [normalized(part.pixels), torch.from_numpy(part.labels)]
    return ImageSet(*arrays, patch=4, rate=1e-3, batch=48)
