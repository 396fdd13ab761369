"""Checks of what perturbations are given: images in pixel space, labels, whole numbers, names."""

from collections.abc import Collection
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tcnn_probe.models import as_images

__all__ = ["as_labels", "as_pixels", "check_distinct", "check_labels", "check_range", "whole_number", "whole_numbers"]

_SLACK = 1e-4  # what rounding may leave beyond [0, 1] when a normalisation is undone


def check_range(low: float, high: float) -> None:
    """Refuse values that are not in [0, 1]; NaN is none that is."""
    if not (low >= -_SLACK and high <= 1 + _SLACK):
        raise ValueError(
            f"expected images in pixel space, in [0, 1], before normalisation; got values from {low:.4g} to {high:.4g}:"
            " undo the normalisation first, x * std + mean, or divide by 255"
        )


def as_pixels(images: Any) -> Tensor:
    """Images in pixel space as a tensor, shape (B, C, H, W), floating point, in [0, 1]; TypeError, ValueError."""
    images = as_images(images, "in pixel space, floating point in [0, 1] (of bytes: images / 255)").detach()
    low, high = (float(x) for x in images.aminmax())
    check_range(low, high)
    return images if low >= 0 and high <= 1 else images.clamp(0, 1)


def as_labels(labels: Any, images: int) -> Tensor:
    """Classes of the images, shape (B,), int64; TypeError, ValueError."""
    try:
        given = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"expected class indices for labels, got {type(labels).__name__}") from error
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"expected class indices for labels, got {given.dtype}")
    if given.shape != (images,):
        raise ValueError(f"expected {images} labels, one for each image, got shape {tuple(given.shape)}")
    if (given < 0).any():
        raise ValueError(f"expected labels from 0, got {int(given.min())}")
    return given.to(torch.int64, copy=True)


def check_labels(labels: Tensor, classes: int, who: str = "the model") -> None:
    """Refuse labels (B,) that are none of so many classes, or (B, K) of other than so many."""
    if labels.ndim == 2 and labels.shape[1] != classes:
        raise ValueError(f"expected labels (B, {classes}), {who} having {classes} classes; got (B, {labels.shape[1]})")
    if labels.ndim == 1 and (top := int(labels.max())) >= classes:
        raise ValueError(f"expected labels from 0 to {classes - 1}, {who} having {classes} classes; got {top}")


def whole_number(number: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """The number as an int; TypeError if it is none, ValueError if it is out of range."""
    span = f"an integer from {least}" + (f" to {most}" if most is not None else "")
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(f"expected {span} for {what}, got {number!r}")
    found = int(number)
    if found < least or (most is not None and found > most):
        raise ValueError(f"expected {span} for {what}, got {number!r}")
    return found


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
