"""Infidelity and sensitivity (Yeh et al. 2019), by captum."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.outputs import class_scores
from tcnn_probe.attribution.pixels import background
from tcnn_probe.extras import needed_for
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
    """Average (I · s - (f(x) - f(x_I)))² over random squares I,
    which are covered in x_I; f is the target's score.

    I · s is the sum of the saliency s over the square's pixels. Squares have a side of 1 pixel to
    half of the image's shorter side and random positions, and are the same for all images. The
    computation is captum's ``infidelity``. (Yeh et al. 2019, On the (In)fidelity and Sensitivity of
    Explanations, Definition 2.1; square removal, §2.3.)

    Args:
        model: Model that returns class scores.
        images: Images, shape (B, C, H, W).
        maps: Saliency, shape (B, H, W).
        target: Classes, shape (B,).
        baseline: Value of covered pixels: a number, 0 being the grey of images normalised by their
            mean; or an image.
        samples: Number of squares.
        normalize: Whether each map is first scaled by its optimal factor, which is necessary to
            compare maps with different units.
        batch_size: Number of images in the model at a time.
        seed: Seed of the squares.

    Returns:
        Shape (B,), at least 0, in units of the squared score; NaN for a map with a NaN.
    """
    with needed_for("infidelity"):
        from captum import metrics  # a second to import

    scores = partial(class_scores, model)
    squares = random_squares(samples, (images.shape[2], images.shape[3]), seed)[:, None]
    values = []
    for rows, batch in batches(model, images, batch_size):
        cover = partial(_cover, iter(squares), len(batch), baseline)
        # captum needs an attribution of each channel. Channels get equal shares, because a square
        # covers all of them.
        by_channel = maps[rows].to(batch)[:, None].expand_as(batch) / batch.shape[1]
        common = _common_options(batch, target[rows], samples, batch_size)
        values.append(
            metrics.infidelity(scores, cover, batch, by_channel, normalize=normalize, **common)
        )
    return torch.cat(values).cpu().double()


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
    """Find the largest ‖s(x + δ) - s(x)‖ / ‖s(x)‖ over random δ
    with entries within ± radius; s is the map.

    The target does not change. The computation is captum's ``sensitivity_max``. (Yeh et al. 2019,
    Definition 3.1.)

    Args:
        model: Model; the images are moved to its device and dtype.
        images: Images, shape (B, C, H, W).
        target: Classes, shape (B,).
        explain: Function from images (B, C, H, W) and targets (B,) to maps (B, H, W).
        radius: Largest change of an entry of the image, in its units.
        samples: Number of δ, which are the same for all images.
        batch_size: Number of images at a time.
        seed: Seed of δ.

    Returns:
        Shape (B,), at least 0; if the map is zero, the norm of the difference is not divided.

    Raises:
        ValueError: The radius or the number of samples is not positive.
    """
    with needed_for("sensitivity"):
        from captum import metrics

    if not radius > 0:
        raise ValueError(f"expected a positive radius, got {radius!r}")
    samples = whole_number(samples, "samples", 1)
    # The noise is drawn once, so that batches of any size have the same noise.
    noise = (
        torch.rand(samples, *images.shape[1:], generator=torch.Generator().manual_seed(seed)) * 2
        - 1
    )

    def maps_of(inputs: Tensor | tuple[Tensor, ...], target: Tensor) -> tuple[Tensor]:
        # captum passes a tensor for the original images and a tuple for the changed ones.
        shaken = inputs[0] if isinstance(inputs, tuple) else inputs
        # The images are copied because a method of the user may change them.
        return (explain(shaken.clone(), target).contiguous(),)

    values = []
    for rows, batch in batches(model, images, batch_size):
        shake = partial(_shake, iter(noise), len(batch), radius)
        common = _common_options(batch, target[rows], samples, batch_size)
        values.append(metrics.sensitivity_max(maps_of, batch, shake, **common))
    return torch.cat(values).cpu().double()


def random_squares(samples: int, size: tuple[int, int], seed: int) -> Tensor:
    """Draw squares of random side and position: shape (samples, H, W), True inside."""
    samples = whole_number(samples, "samples", 1)
    generator = torch.Generator().manual_seed(seed)
    squares = torch.zeros(samples, *size, dtype=torch.bool)
    for square in squares:
        side = int(torch.randint(1, max(1, min(size) // 2) + 1, (), generator=generator))
        y, x = (
            int(torch.randint(0, length - side + 1, (), generator=generator)) for length in size
        )
        square[y : y + side, x : x + side] = True
    return squares


def _cover(
    squares: Iterator[Tensor], count: int, baseline: Any, images: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next squares, and the images with these squares covered."""
    covered = _next(squares, count, images).expand_as(images)
    return covered.to(images.dtype), torch.where(covered, background(baseline, images), images)


def _shake(noise: Iterator[Tensor], count: int, radius: float, images: Tensor) -> Tensor:
    return images + radius * _next(noise, count, images).to(images.dtype)


def _next(samples: Iterator[Tensor], count: int, images: Tensor) -> Tensor:
    """Return a sample for each image; captum repeats each
    of ``count`` images for several samples at a time.
    """
    return (
        torch.stack([*islice(samples, len(images) // count)])
        .to(images.device)
        .repeat(count, 1, 1, 1)
    )


def _common_options(
    images: Tensor, target: Tensor, samples: int, batch_size: int
) -> dict[str, Any]:
    """Return the options that both of captum's metrics share."""
    # captum computes whole repetitions of the batch, at least one, and at most one per sample.
    at_once = min(max(batch_size, len(images)), len(images) * samples)
    return {
        "target": target.to(images.device),
        "n_perturb_samples": samples,
        "max_examples_per_batch": at_once,
    }
