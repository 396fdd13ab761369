"""Noise of single pixels: Gaussian, shot and impulse noise.

Here and in the neighbouring files a corruption takes an image, float64 of shape (H, W, C) in [0,
1], which it does not modify; a source of random numbers, from which it draws in the order of the
published code; the scale (:func:`~tcnn_probe.evaluation.corruptions.resampling.scale_of`); and the
parameters of one severity, by keyword, with lengths in published pixels. It returns an array of the
image's shape, which the caller clips to [0, 1]. C is 1 or 3.

The source of all corruptions is Hendrycks & Dietterich 2019, Benchmarking Neural Network Robustness
to Common Corruptions and Perturbations, §3 and Appendix A; the parameters are those of its code for
224 x 224.
"""

from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

__all__ = ["gaussian_noise", "impulse_noise", "shot_noise"]


def gaussian_noise(
    image: NDArray[Any], random: RandomState, scale: float, *, deviation: float
) -> NDArray[Any]:
    """Add Gaussian noise of standard deviation ``deviation``."""
    return image + random.normal(scale=deviation, size=image.shape)


def shot_noise(
    image: NDArray[Any], random: RandomState, scale: float, *, photons: float
) -> NDArray[Any]:
    """Replace values by Poisson counts, with a mean of ``photons`` where the image is 1."""
    return random.poisson(image * photons) / photons


def impulse_noise(
    image: NDArray[Any], random: RandomState, scale: float, *, amount: float
) -> NDArray[Any]:
    """Set the share ``amount`` of the values to 0 or 1."""
    hit = random.random_sample(image.shape) <= amount
    salt = random.random_sample(image.shape) <= 0.5
    return np.where(hit, salt.astype(image.dtype), image)
