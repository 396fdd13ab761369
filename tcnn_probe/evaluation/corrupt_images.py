"""``corrupt()``: the corruptions of ImageNet-C, for tensors, arrays and PIL images."""

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import MT19937, RandomState, SeedSequence
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tcnn_probe.evaluation.checks import check_range
from tcnn_probe.evaluation.corruptions.frost_pictures import read_photographs
from tcnn_probe.evaluation.corruptions.resampling import scale_of
from tcnn_probe.evaluation.corruptions.table import (
    CORRUPTIONS,
    Corruption,
    named_corruption,
)
from tcnn_probe.models import whole_number

__all__ = ["corrupt"]

_SMALLEST_SIDE = 8  # in pixels: at severity 5 pixelate reduces each side to a quarter

Images = TypeVar("Images", Tensor, NDArray[Any], Image.Image)


def corrupt(
    images: Images,
    corruption: str,
    severity: int,
    *,
    seed: int = 0,
    first: int = 0,
    frost: Any = None,
) -> Images:
    """Corrupt images by one of the 15 corruptions of ImageNet-C.

    ::

        noisy = tcnn_probe.evaluation.corrupt(images, "gaussian_noise", 3)
        for name, corruption in tcnn_probe.evaluation.CORRUPTIONS.items():
            print(corruption.group, name, corruption.at(severity=5))

    At 224 x 224 the parameters are the published ones, which are for that size. In smaller images
    lengths are scaled by the shorter side over 224; larger images get the published lengths without
    scaling. An image's random draws depend only on the seed, the corruption and the image's number.
    Global random number generators are not used. (Hendrycks & Dietterich 2019, §3 and their code;
    ``docs/corruptions.md`` lists where ours differs from it.)

    Args:
        images: Images in [0, 1], before normalisation: a floating-point tensor of shape (C, H, W)
            or (B, C, H, W), on any device; an array of shape (H, W), (H, W, C) or (B, H, W, C),
            floating-point, or uint8 from 0 to 255; or an RGB or grey image of PIL. C is 1 or 3, H
            and W are at least 8.
        corruption: Name of the corruption, in ``tcnn_probe.evaluation.CORRUPTIONS``.
        severity: Severity, 1 to 5.
        seed: Seed of the random draws, from 0.
        first: Number of the first image in the data set, from 0; the numbers of other images
            follow.
        frost: Pictures for the corruption "frost": a folder of .png or .jpg files, or arrays (H, W,
            3), each in [0, 1] or uint8. None for our own texture.

    Returns:
        New images of the same type, shape, dtype and device, in the same range and without
        gradient. uint8 is rounded to the nearest integer.

    Raises:
        TypeError: The images, the name, the severity or a number have another type.
        ValueError: The images have another shape, or values out of range or NaN; or the corruption
            or the severity is unknown.
    """
    draws: dict[str, Any] = {"seed": seed, "first": first, "frost": frost}
    if isinstance(images, Image.Image):
        return Image.fromarray(corrupt(np.asarray(images), corruption, severity, **draws))
    if isinstance(images, Tensor):
        pixels = corrupt(_channels_last(images), corruption, severity, **draws)
        return torch.from_numpy(pixels).movedim(-1, -3).contiguous().to(images)
    method = named_corruption(corruption)
    options: dict[str, Any] = method.at(whole_number(severity, "severity", 1, 5))
    seed, first = whole_number(seed, "seed"), whole_number(first, "first")
    if method.name == "frost" and frost is not None:
        options["photographs"] = read_photographs(frost)
    batch = _as_batch(images)
    corrupted = np.empty_like(batch)
    scale, in_bytes = scale_of(batch.shape[1:]), batch.dtype == np.uint8
    for number, image in enumerate(batch):
        # Corruptions are computed in float64 for all dtypes.
        values = image.astype(np.float64)
        pixels = values / 255 if in_bytes else np.clip(values, 0, 1)
        random = _random_state(method, seed, first + number)
        result = np.clip(method.function(pixels, random, scale, **options), 0, 1)
        if in_bytes:
            # A cast alone would truncate, and darken images by half a level.
            result = np.rint(result * 255)
        corrupted[number] = result
    return corrupted.reshape(images.shape)


def _random_state(corruption: Corruption, seed: int, number: int) -> RandomState:
    """Return the generator of an image: a ``RandomState``,
    whose numbers are the same in every version of NumPy.
    """
    place = list(CORRUPTIONS).index(corruption.name)
    # Each corruption and image has its own random numbers, which do not depend on the batch or the
    # severity.
    return RandomState(MT19937(SeedSequence(seed, spawn_key=(place, number))))


def _channels_last(images: Tensor) -> NDArray[Any]:
    """Return a tensor (..., C, H, W) as an array (..., H, W, C)."""
    if not images.is_floating_point():
        raise TypeError(
            f"expected a floating-point tensor with values in [0, 1], got {images.dtype}"
        )
    if images.ndim not in (3, 4) or images.shape[-3] not in (1, 3):
        shapes = "(C, H, W) or (B, C, H, W) with 1 or 3 channels"
        raise ValueError(f"expected a tensor of shape {shapes}, got shape {tuple(images.shape)}")
    # NumPy corrupts images on the CPU, with the same random numbers for every device, and has no
    # bfloat16.
    images = images.detach().movedim(-3, -1).cpu()
    return (images if images.dtype == torch.float32 else images.double()).numpy()


def _as_batch(images: Any) -> NDArray[Any]:
    """View an array as (B, H, W, C)."""
    if not isinstance(images, np.ndarray):
        raise TypeError(f"expected a tensor, an array or a PIL image, got {type(images).__name__}")
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise TypeError(f"expected an array of uint8, or of floats in [0, 1], got {images.dtype}")
    if images.ndim not in (2, 3, 4) or (images.ndim > 2 and images.shape[-1] not in (1, 3)):
        raise ValueError(
            "expected an array of shape (H, W), (H, W, C) or (B, H, W, C) with 1 or 3 channels, "
            f"got shape {images.shape}; a batch without channels is images[..., None], and "
            "channels come first in tensors only"
        )
    batch = images[..., None] if images.ndim == 2 else images
    batch = batch[None] if batch.ndim == 3 else batch
    if min(batch.shape[1:3]) < _SMALLEST_SIDE or not len(batch):
        size = f"{_SMALLEST_SIDE} x {_SMALLEST_SIDE}"
        raise ValueError(
            f"expected at least one image, of at least {size} pixels; got shape {images.shape}"
        )
    if batch.dtype != np.uint8:
        check_range(float(batch.min()), float(batch.max()))
    return batch
