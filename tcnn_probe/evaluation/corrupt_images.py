"""``corrupt()``: the corruptions of ImageNet-C, of images as they come."""

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
from tcnn_probe.evaluation.corruptions.table import CORRUPTIONS, Corruption, named_corruption
from tcnn_probe.models import whole_number

__all__ = ["corrupt"]

_LEAST = 8  # pixels along each side: pixelate leaves a quarter of them

Images = TypeVar("Images", Tensor, NDArray[Any], Image.Image)


def corrupt(
    images: Images, corruption: str, severity: int, *, seed: int = 0, first: int = 0, frost: Any = None
) -> Images:
    """Corrupt images as those of ImageNet-C were, by one of 15 corruptions.

    ::

        noisy = tcnn_probe.evaluation.corrupt(images, "gaussian_noise", 3)
        for name, corruption in tcnn_probe.evaluation.CORRUPTIONS.items():
            print(corruption.group, name, corruption.at(severity=5))

    At 224 x 224 the parameters are the published ones, which are for that size. In smaller images lengths are scaled by
    the shorter side over 224; larger ones get the published lengths, as they are. An image's random draws follow from
    the seed, the corruption and the image's number alone. Global random number generators are not touched.
    (Hendrycks & Dietterich 2019, §3 and their code; ``docs/corruptions.md`` says where ours departs from it.)

    Args:
        images: in [0, 1], before normalisation: a floating-point tensor of shape (C, H, W) or (B, C, H, W), on any
            device; an array of shape (H, W), (H, W, C) or (B, H, W, C), floating-point, or uint8 from 0 to 255; or an
            RGB or grey image of PIL. C is 1 or 3, H and W are at least 8.
        corruption: a name in ``tcnn_probe.evaluation.CORRUPTIONS``.
        severity: 1 to 5.
        seed: of the random draws, from 0.
        first: the number of the first image in the data set, from 0; the others follow.
        frost: for "frost", pictures of frost: a folder of .png or .jpg files, or arrays (H, W, 3), each in [0, 1] or
            uint8. None: a texture made here. Other corruptions do not use it.

    Returns:
        the same kind, shape, dtype and device; new, in range, and without gradient. uint8 is rounded to nearest.

    Raises:
        TypeError: images, a name, a severity or a number of another type.
        ValueError: another shape, values out of range or NaN, an unknown corruption, a severity from elsewhere.
    """
    if isinstance(images, Image.Image):
        return Image.fromarray(corrupt(np.asarray(images), corruption, severity, seed=seed, first=first, frost=frost))
    chosen = named_corruption(corruption)
    options: dict[str, Any] = dict(chosen.at(whole_number(severity, "severity", 1, 5)))
    seed, first = whole_number(seed, "seed"), whole_number(first, "first")
    if chosen.name == "frost" and frost is not None:
        options["photographs"] = read_photographs(frost)
    batch = _as_batch(images)
    corrupted: Any = torch.empty_like(batch) if isinstance(batch, Tensor) else np.empty_like(batch)
    scale, in_bytes = scale_of(batch.shape[1:]), batch.dtype == np.uint8
    for number, image in enumerate(batch):
        values = image.double().numpy() if isinstance(image, Tensor) else image.astype(np.float64)
        pixels = values / 255 if in_bytes else np.clip(values, 0, 1)
        damaged = np.clip(chosen.function(pixels, _draws(chosen, seed, first + number), scale, **options), 0, 1)
        damaged = np.rint(damaged * 255) if in_bytes else damaged
        corrupted[number] = torch.from_numpy(damaged) if isinstance(batch, Tensor) else damaged
    if isinstance(images, Tensor):
        return corrupted.permute(0, 3, 1, 2).reshape(images.shape).contiguous().to(images.device)
    return corrupted.reshape(images.shape)


def _draws(corruption: Corruption, seed: int, number: int) -> RandomState:
    """The random numbers of one image; ``RandomState`` draws the same in every version of numpy."""
    place = list(CORRUPTIONS).index(corruption.name)
    return RandomState(MT19937(SeedSequence(seed, spawn_key=(place, number))))


def _as_batch(images: Any) -> Any:
    """A view, (B, H, W, C), of a tensor on the CPU or an array."""
    if not isinstance(images, Tensor | np.ndarray):
        raise TypeError(f"expected a tensor, an array or an image of PIL, got {type(images).__name__}")
    batch: Any = _of_tensor(images) if isinstance(images, Tensor) else _of_array(images)
    if min(batch.shape[1:3]) < _LEAST or not len(batch):
        shape = tuple(images.shape)
        raise ValueError(f"expected at least one image, of at least {_LEAST} x {_LEAST} pixels; got shape {shape}")
    if batch.dtype != np.uint8:
        check_range(float(batch.min()), float(batch.max()))
    return batch


def _of_tensor(images: Tensor) -> Tensor:
    if not images.is_floating_point():
        raise TypeError(f"expected a floating-point tensor with values in [0, 1], got {images.dtype}")
    if images.ndim not in (3, 4) or images.shape[-3] not in (1, 3):
        shapes = "(C, H, W) or (B, C, H, W) with 1 or 3 channels"
        raise ValueError(f"expected a tensor of shape {shapes}, got shape {tuple(images.shape)}")
    return (images if images.ndim == 4 else images[None]).detach().permute(0, 2, 3, 1).cpu()


def _of_array(images: NDArray[Any]) -> NDArray[Any]:
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise TypeError(f"expected an array of uint8, or of floats in [0, 1], got {images.dtype}")
    if images.ndim not in (2, 3, 4) or (images.ndim > 2 and images.shape[-1] not in (1, 3)):
        raise ValueError(
            "expected an array of shape (H, W), (H, W, C) or (B, H, W, C) with 1 or 3 channels, got shape "
            f"{images.shape}; a batch without channels is images[..., None], and channels come first in tensors only"
        )
    return images[None, ..., None] if images.ndim == 2 else images[None] if images.ndim == 3 else images
