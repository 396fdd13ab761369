"""Infidelity and sensitivity (Yeh et al. 2019), by captum."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attribution.given import as_baseline, captum
from tcnn_probe.models import batches

__all__ = ["infidelity", "sensitivity"]


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
        model: gives class scores.
        images: shape (B, C, H, W).
        maps: saliency, shape (B, H, W).
        target: class of each image, shape (B,).
        baseline: what covers: a number, 0 being the grey of images normalised by their mean; or an image.
        samples: how many squares.
        normalize: whether each map is first scaled by the factor that suits it best, as it must be if maps with
            different units are compared.
        batch_size: images in the model at a time.
        seed: of the squares.

    Returns:
        shape (B,), from 0, in squares of the model's score; NaN for a map with a NaN.
    """
    metric = captum("metrics").infidelity
    squares = random_squares(samples, (images.shape[2], images.shape[3]), seed)
    found = []
    for which, some in batches(model, images, batch_size):
        count, channels = len(some), some.shape[1]
        spread = maps[which].to(some)[:, None].expand_as(some) / channels
        found.append(
            metric(
                model,
                _Cover(squares, count, baseline),
                some,
                spread,
                target=target[which].to(some.device),
                n_perturb_samples=samples,
                max_examples_per_batch=_at_once(batch_size, count, samples),
                normalize=normalize,
            )
            .cpu()
            .double()
        )
    return torch.cat(found)


def random_squares(samples: int, size: tuple[int, int], seed: int) -> Tensor:
    """Shape (samples, H, W), True inside.

    Raises:
        ValueError: no samples.
    """
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"expected a positive number of samples, got {samples!r}")
    generator = torch.Generator().manual_seed(seed)
    squares = torch.zeros(samples, *size, dtype=torch.bool)
    for square in squares:
        side = int(torch.randint(1, max(1, min(size) // 2) + 1, (), generator=generator))
        y, x = (int(torch.randint(0, whole - side + 1, (), generator=generator)) for whole in size)
        square[y : y + side, x : x + side] = True
    return squares


class _Cover:
    """The perturbation as captum asks for it: some samples of every image at a time.

    Args:
        squares: shape (samples, H, W).
        count: how many images there are.
        baseline: what covers.
    """

    def __init__(self, squares: Tensor, count: int, baseline: Any) -> None:
        self._squares, self._count, self._baseline, self._next = squares, count, baseline, 0

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Squares and covered images, both of the shape of the images, in which each is repeated for its samples."""
        samples = len(images) // self._count
        squares = self._squares[self._next : self._next + samples].to(images.device)
        self._next += samples
        inside = squares.repeat(self._count, 1, 1)[:, None].expand_as(images)
        cover = torch.as_tensor(as_baseline(self._baseline, images)).to(images)
        return inside.to(images.dtype), torch.where(inside, cover, images)


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
        model: whose dtype and device count.
        images: shape (B, C, H, W).
        explain: from images (B, C, H, W) and targets (B,) to maps (B, H, W).
        target: class of each image, shape (B,).
        radius: in units of the images.
        samples: how many δ, the same for all images.
        batch_size: images at a time.
        seed: of δ.

    Returns:
        shape (B,), from 0; the norm is not divided by where the map is zero.

    Raises:
        ValueError: a radius or a number of samples that is not positive.
    """
    metric = captum("metrics").sensitivity_max
    if not radius > 0:
        raise ValueError(f"expected a positive radius, got {radius!r}")
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"expected a positive number of samples, got {samples!r}")
    noise = torch.rand(samples, *images.shape[1:], generator=torch.Generator().manual_seed(seed)) * 2 - 1

    def maps_of(given: Tensor | tuple[Tensor, ...], target: Tensor) -> tuple[Tensor]:
        shaken = given[0] if isinstance(given, tuple) else given
        return (explain(shaken.clone(), target).contiguous(),)  # a method of the user's may change its images

    found = []
    for which, some in batches(model, images, batch_size):
        found.append(
            metric(
                maps_of,
                some,
                perturb_func=_Shake(noise.to(some) * radius, len(some)),
                n_perturb_samples=samples,
                max_examples_per_batch=_at_once(batch_size, len(some), samples),
                target=target[which].to(some.device),
            )
            .cpu()
            .double()
        )
    return torch.cat(found)


class _Shake:
    """Adds some of the noise to every image at a time, as captum asks for it.

    Args:
        noise: shape (samples, C, H, W).
        count: how many images there are.
    """

    def __init__(self, noise: Tensor, count: int) -> None:
        self._noise, self._count, self._next = noise, count, 0

    def __call__(self, images: Tensor) -> Tensor:
        """Of images in which each is repeated for its samples."""
        samples = len(images) // self._count
        noise = self._noise[self._next : self._next + samples]
        self._next += samples
        return images + noise.repeat(self._count, 1, 1, 1)


def _at_once(batch_size: int, images: int, samples: int) -> int:
    """Examples at a time, as captum wants the number."""
    return min(max(batch_size, images), images * samples)
