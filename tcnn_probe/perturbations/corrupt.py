"""``corrupt()``: the corruptions of ImageNet-C, of images as they come."""

import difflib
import operator
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import MT19937, RandomState, SeedSequence
from numpy.typing import NDArray
from torch import Tensor

from tcnn_probe.models import progress_bar
from tcnn_probe.perturbations.corruptions.frosted import read_photographs
from tcnn_probe.perturbations.corruptions.resampling import scale_of
from tcnn_probe.perturbations.corruptions.table import CORRUPTIONS, SEVERITIES, Corruption

__all__ = ["LEAST", "check_severity", "corrupt", "find_corruption"]

LEAST = 8  # pixels along each side: pixelate leaves a quarter of them
SLACK = 1e-4  # what rounding may leave beyond [0, 1] when a normalisation is undone

Images = TypeVar("Images", Tensor, NDArray[Any])


def corrupt(
    images: Images,
    corruption: str,
    severity: int,
    *,
    seed: int = 0,
    first: int = 0,
    frost: Any = None,
    progress: bool | None = None,
) -> Images:
    """Images as one of the 15 corruptions of ImageNet-C leaves them.

    ::

        noisy = tcnn_probe.corrupt(images, "gaussian_noise", 3)
        for name, corruption in tcnn_probe.CORRUPTIONS.items():
            print(corruption.group, name, corruption.at(severity=5))

    At 224 x 224 the parameters are the published ones, which are for that size. In smaller images lengths are scaled by
    the shorter side over 224; larger ones get the published lengths, as they are. An image's random draws follow from
    the seed, the corruption and the image's number alone: not from the batch that it comes in, and they are the same
    for each severity, so far as the corruption draws the same things. Global random number generators are not touched.
    (Hendrycks & Dietterich 2019, §3 and their code; ``docs/corruptions.md`` says where ours departs from it.)

    Args:
        images: in [0, 1], before normalisation: a floating-point tensor of shape (C, H, W) or (B, C, H, W), on any
            device; or an array of shape (H, W), (H, W, C) or (B, H, W, C), floating-point, or uint8 from 0 to 255.
            C is 1 or 3, H and W are at least 8.
        corruption: a name in ``tcnn_probe.CORRUPTIONS``.
        severity: 1 to 5.
        seed: of the random draws, from 0.
        first: the number of the first image in the data set, from 0; the others follow.
        frost: for "frost", pictures of frost: a folder of .png or .jpg files, or one array (H, W, 3) or several, in
            [0, 1] or uint8. None: textures made here. Other corruptions do not use it.
        progress: whether to show a progress bar; None: once it takes more than three seconds, on a terminal.

    Returns:
        the same kind, shape, dtype and device; new, in range, and without gradient. uint8 is rounded to nearest.

    Raises:
        TypeError: images, a name, a severity or a number of another type.
        ValueError: another shape, values out of range or NaN, an unknown corruption, a severity from elsewhere.
    """
    chosen = find_corruption(corruption)
    severity = check_severity(severity)
    seed, first = _check_count(seed, "seed"), _check_count(first, "first")
    options: dict[str, Any] = dict(chosen.at(severity))
    if chosen.name == "frost" and frost is not None:
        options["photographs"] = read_photographs(frost)
    batch = _as_batch(images)
    corrupted: Any = torch.empty_like(batch) if isinstance(batch, Tensor) else np.empty_like(batch)
    with progress_bar(len(batch), f"{chosen.name} {severity}", progress) as bar:
        for number, image in enumerate(batch):
            random = _draws(chosen, seed, first + number)
            damaged = chosen.function(_as_pixels(image), random, scale_of(image.shape), **options)
            corrupted[number] = _as_values(np.clip(damaged, 0, 1), image)
            bar.update()
    if isinstance(images, Tensor):
        return corrupted.permute(0, 3, 1, 2).reshape(images.shape).contiguous().to(images.device)
    return corrupted.reshape(images.shape)


def find_corruption(name: str) -> Corruption:
    """The corruption of this name.

    Raises:
        TypeError: no name.
        ValueError: an unknown one; the nearest is suggested.
    """
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a corruption, got {name!r}")
    if name not in CORRUPTIONS:
        near = difflib.get_close_matches(name, CORRUPTIONS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected one of {', '.join(CORRUPTIONS)}; got {name!r}{hint}")
    return CORRUPTIONS[name]


def check_severity(severity: int) -> int:
    """The severity, 1 to 5.

    Raises:
        TypeError: no integer.
        ValueError: another one.
    """
    if _check_integer(severity, "severity") not in SEVERITIES:
        raise ValueError(f"expected a severity from 1 to 5, got {severity}")
    return operator.index(severity)


def _check_integer(number: Any, what: str) -> int:
    if isinstance(number, bool | np.bool_) or not hasattr(number, "__index__"):
        raise TypeError(f"expected an integer for {what}, got {number!r}")
    return operator.index(number)


def _check_count(number: Any, what: str) -> int:
    if _check_integer(number, what) < 0:
        raise ValueError(f"expected {what} from 0, got {number}")
    return operator.index(number)


def _draws(corruption: Corruption, seed: int, number: int) -> RandomState:
    """Of an image. ``RandomState``, unlike numpy's newer generators, draws the same in every version of numpy."""
    place = list(CORRUPTIONS).index(corruption.name)
    return RandomState(MT19937(SeedSequence(seed, spawn_key=(place, number))))


def _as_batch(images: Any) -> Any:
    """A view, (B, H, W, C), of a tensor on the CPU or an array.

    Raises:
        TypeError, ValueError: these are no images.
    """
    batch: Any
    if isinstance(images, Tensor):
        batch = _of_tensor(images)
    elif isinstance(images, np.ndarray):
        batch = _of_array(images)
    else:
        raise TypeError(f"expected a tensor or a numpy array of images, got {type(images).__name__}")
    if min(batch.shape[1:3]) < LEAST or not len(batch):
        shape = tuple(images.shape)
        raise ValueError(f"expected at least one image, of at least {LEAST} x {LEAST} pixels; got shape {shape}")
    low, high = float(batch.min()), float(batch.max())
    if batch.dtype != np.uint8 and not (low >= -SLACK and high <= 1 + SLACK):  # also NaN
        raise ValueError(
            f"expected values in [0, 1], before normalisation, got {low:.3g} to {high:.3g}; "
            "undo the normalisation first, x * std + mean, or divide by 255"
        )
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


def _as_pixels(image: Any) -> NDArray[Any]:
    """Float64 in [0, 1], a copy, of an image of any of the kinds."""
    values = image.double().numpy() if isinstance(image, Tensor) else image.astype(np.float64)
    return values / 255 if image.dtype == np.uint8 else np.clip(values, 0, 1)


def _as_values(pixels: NDArray[Any], image: Any) -> Any:
    """The way back, to what can be written into a batch of such images."""
    if isinstance(image, Tensor):
        return torch.from_numpy(pixels)
    return np.rint(pixels * 255) if image.dtype == np.uint8 else pixels
