"""Checks of what perturbations are given: images in pixel space, labels, several distinct options."""

from collections.abc import Collection
from typing import Any

import numpy as np
from torch import Tensor

from tcnn_probe.images import as_batch, as_pictures
from tcnn_probe.models import class_indices, whole_number

__all__ = ["as_labels", "as_pixels", "check_distinct", "check_labels", "check_range", "whole_numbers"]

_SLACK = 1e-4  # what rounding may leave beyond [0, 1] when a normalisation is undone


def check_range(low: float, high: float) -> None:
    """Refuse values that are not in [0, 1], or NaN."""
    if not (low >= -_SLACK and high <= 1 + _SLACK):
        raise ValueError(
            f"expected images in pixel space, in [0, 1], before normalisation; got values from {low:.4g} to {high:.4g}:"
            " undo the normalisation first, x * std + mean, or divide by 255"
        )


def as_pixels(images: Any) -> Tensor:
    """Images, or pictures of one size, in pixel space: shape (B, C, H, W), floating point, in [0, 1]."""
    if (pictures := as_pictures(images)) is not None:
        if len(sizes := {picture.size for picture in pictures}) > 1:
            raise ValueError(f"expected pictures of one size, got {sorted(sizes)} (width, height): resize or crop them")
        images = np.stack([np.asarray(picture, np.float32) / 255 for picture in pictures]).transpose(0, 3, 1, 2)
    images = as_batch(
        images, "a floating-point tensor (B, C, H, W) in [0, 1], before normalisation; or pictures"
    ).detach()
    low, high = (float(x) for x in images.aminmax())
    check_range(low, high)
    return images if low >= 0 and high <= 1 else images.clamp(0, 1)


def as_labels(labels: Any, images: int) -> Tensor:
    """Classes of the images, shape (B,), int64."""
    found = class_indices(labels, "labels")
    if found.shape != (images,):
        raise ValueError(f"expected {images} labels, one for each image, got shape {tuple(found.shape)}")
    return found


def check_labels(labels: Tensor, classes: int, who: str = "the model") -> None:
    """Refuse labels (B,) that are none of so many classes, or (B, K) of other than so many."""
    if labels.ndim == 2 and labels.shape[1] != classes:
        raise ValueError(f"expected labels (B, {classes}), {who} having {classes} classes; got (B, {labels.shape[1]})")
    if labels.ndim == 1 and (top := int(labels.max())) >= classes:
        raise ValueError(f"expected labels from 0 to {classes - 1}, {who} having {classes} classes; got {top}")


def whole_numbers(given: Any, what: str, least: int = 0, most: int | None = None) -> tuple[int, ...]:
    """One number or several that differ, each checked."""
    numbers = tuple(given) if isinstance(given, Collection) and not isinstance(given, str) else (given,)
    if not numbers:
        raise ValueError(f"expected at least one of {what}, got none")
    check_distinct(numbers, what)
    return tuple(whole_number(number, what, least, most) for number in numbers)


def check_distinct(given: Collection[Any], what: str) -> None:
    """Refuse what is named twice."""
    if repeated := [each for each in given if list(given).count(each) > 1]:
        raise ValueError(f"expected distinct {what}, got {repeated[0]!r} twice")
