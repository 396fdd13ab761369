"""Checks of arguments: images in pixel space, labels, distinct options."""

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from tcnn_probe.images import as_batch, as_pictures, prepare_pixels
from tcnn_probe.models import class_indices, whole_number

__all__ = [
    "as_labels",
    "as_pixels",
    "check_distinct",
    "check_labels",
    "check_range",
    "whole_numbers",
]

# By rounding, undoing a normalisation in float32 gives values about this far outside of [0, 1].
_SLACK = 1e-4


def check_range(low: float, high: float) -> None:
    """Raise ValueError for values outside of [0, 1], or NaN."""
    if not (low >= -_SLACK and high <= 1 + _SLACK):
        raise ValueError(
            "expected images in pixel space, in [0, 1], before normalisation; got values from "
            f"{low:.4g} to {high:.4g}: undo the normalisation first, x * std + mean, or divide by "
            "255"
        )


def as_pixels(images: Any, models: Iterable[Any]) -> Tensor:
    """Return images, or pictures for these models,
    in pixel space: (B, C, H, W), floating point, in [0, 1].
    """
    pictures = as_pictures(images)
    if pictures is not None:
        return prepare_pixels(pictures, models)
    expected = "a floating-point tensor (B, C, H, W) in [0, 1], before normalisation; or pictures"
    images = as_batch(images, expected).detach()
    low, high = float(images.amin()), float(images.amax())
    check_range(low, high)
    # Images that are in range are not copied.
    return images if low >= 0 and high <= 1 else images.clamp(0, 1)


def as_labels(labels: Any, images: int) -> Tensor:
    """Return the classes of a number of images, shape (B,), int64."""
    indices = class_indices(labels, "labels")
    if indices.shape != (images,):
        raise ValueError(
            f"expected {images} labels, one for each image, got shape {tuple(indices.shape)}"
        )
    return indices


def check_labels(labels: Tensor, classes: int, name: str = "the model") -> None:
    """Raise ValueError for labels (B,) beyond the model's classes,
    or (B, K) with another number of classes.
    """
    if labels.ndim == 2 and labels.shape[1] != classes:
        raise ValueError(
            f"expected labels (B, {classes}), {name} having {classes} classes; got (B, "
            f"{labels.shape[1]})"
        )
    if labels.ndim == 1 and labels.max() >= classes:
        highest = int(labels.max())
        raise ValueError(
            f"expected labels from 0 to {classes - 1}, {name} having {classes} classes; got "
            f"{highest}"
        )


def whole_numbers(
    numbers: Any, name: str, low: int = 0, high: int | None = None
) -> tuple[int, ...]:
    """Check one integer or several distinct integers; return them as a tuple."""
    if not isinstance(numbers, Collection) or isinstance(numbers, str):
        numbers = (numbers,)
    if not numbers:
        raise ValueError(f"expected at least one of {name}, got none")
    check_distinct(numbers, name)
    return tuple(whole_number(number, name, low, high) for number in numbers)


def check_distinct(options: Collection[Any], name: str) -> None:
    """Raise ValueError for an option that is given twice."""
    for option in options:
        if list(options).count(option) > 1:
            raise ValueError(f"expected distinct {name}, got {option!r} twice")
