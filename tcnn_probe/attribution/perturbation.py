"""Infidelity and sensitivity (Yeh et al. 2019), by captum."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attribution.pixels import background
from tcnn_probe.models import batches, whole_number

__all__ = ["infidelity", "random_squares", "sensitivity"]


def infidelity(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    target: Tensor,
    *,
    baseline: float | Tensor = 0.0,
    samples: int = 16,
    normalize: bool = True,
    batch_size: int = 32,
    seed: int = 0,
) -> Tensor:
    """Mean of (I · s - (f(x) - f(x_I)))² over random squares I, that are covered in x_I; f is the target's score.

    I · s is the sum of the saliency s over the square's pixels. Squares have a side of 1 pixel to half of the image's
    shorter side, at random places, the same for all images. By captum's ``infidelity``. (Yeh et al. 2019, On the
    (In)fidelity and Sensitivity of Explanations, Definition 2.1; square removal, §2.3.)

    Args:
        model: gives class scores for images (B, C, H, W).
        images, maps, target: images, their saliency (B, H, W), and their classes (B,).
        baseline: what covers: a number, 0 being the grey of images normalised by their mean; or an image.
        samples: how many squares.
        normalize: whether each map is first scaled by the factor that suits it best, as it must be if maps with
            different units are compared.
        batch_size: images in the model at a time.
        seed: of the squares.

    Returns:
        shape (B,), from 0, in squares of the model's score; NaN for a map with a NaN.
    """
    from captum import metrics

    squares = random_squares(samples, (images.shape[2], images.shape[3]), seed)[:, None]
    found = []
    for which, some in batches(model, images, batch_size):
        cover = partial(_cover, iter(squares), len(some), baseline)
        of_channels = maps[which].to(some)[:, None].expand_as(some) / some.shape[1]
        common = _common(some, target[which], samples, batch_size)
        found.append(metrics.infidelity(model, cover, some, of_channels, normalize=normalize, **common))
    return torch.cat(found).cpu().double()


def sensitivity(
    model: nn.Module,
    images: Tensor,
    explain: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,
    *,
    radius: float = 0.02,
    samples: int = 16,
    batch_size: int = 32,
    seed: int = 0,
) -> Tensor:
    """Largest ‖s(x + δ) - s(x)‖ / ‖s(x)‖ over random δ, each number of which lies within ± radius; s is the map.

    The target stays what it was. By captum's ``sensitivity_max``. (Yeh et al. 2019, Definition 3.1.)

    Args:
        model: the images are put on its device, with its dtype.
        images, target: shapes (B, C, H, W) and (B,).
        explain: from images (B, C, H, W) and targets (B,) to maps (B, H, W).
        radius: in units of the images.
        samples: how many δ, the same for all images.
        batch_size: images at a time.
        seed: of δ.

    Returns:
        shape (B,), from 0; where the map is zero, the norm is not divided.

    Raises:
        ValueError: a radius or a number of samples that is not positive.
    """
    from captum import metrics

    if not radius > 0:
        raise ValueError(f"expected a positive radius, got {radius!r}")
    samples = whole_number(samples, "samples", 1)
    noise = torch.rand(samples, *images.shape[1:], generator=torch.Generator().manual_seed(seed)) * 2 - 1

    def maps_of(given: Tensor | tuple[Tensor, ...], target: Tensor) -> tuple[Tensor]:
        shaken = given[0] if isinstance(given, tuple) else given
        return (explain(shaken.clone(), target).contiguous(),)  # a method of the user's may change its images

    found = []
    for which, some in batches(model, images, batch_size):
        shake = partial(_shake, iter(noise), len(some), radius)
        common = _common(some, target[which], samples, batch_size)
        found.append(metrics.sensitivity_max(maps_of, some, shake, **common))
    return torch.cat(found).cpu().double()


def random_squares(samples: int, size: tuple[int, int], seed: int) -> Tensor:
    """Shape (samples, H, W), True inside."""
    samples = whole_number(samples, "samples", 1)
    generator = torch.Generator().manual_seed(seed)
    squares = torch.zeros(samples, *size, dtype=torch.bool)
    for square in squares:
        side = int(torch.randint(1, max(1, min(size) // 2) + 1, (), generator=generator))
        y, x = (int(torch.randint(0, whole - side + 1, (), generator=generator)) for whole in size)
        square[y : y + side, x : x + side] = True
    return squares


def _cover(squares: Iterator[Tensor], count: int, baseline: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """The next squares, and the images that they cover."""
    inside = _next(squares, count, images).expand_as(images)
    return inside.to(images.dtype), torch.where(inside, background(baseline, images), images)


def _shake(noise: Iterator[Tensor], count: int, radius: float, images: Tensor) -> Tensor:
    return images + radius * _next(noise, count, images).to(images.dtype)


def _next(samples: Iterator[Tensor], count: int, images: Tensor) -> Tensor:
    """A sample for each image, where captum repeats each of ``count`` for some samples at a time."""
    return torch.stack([*islice(samples, len(images) // count)]).to(images.device).repeat(count, 1, 1, 1)


def _common(images: Tensor, target: Tensor, samples: int, batch_size: int) -> dict[str, Any]:
    """What both of captum's metrics are told of some images."""
    at_once = min(max(batch_size, len(images)), len(images) * samples)
    return {"target": target.to(images.device), "n_perturb_samples": samples, "max_examples_per_batch": at_once}
