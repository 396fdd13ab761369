"""Blur: out of focus, through frosted glass, by motion, by zooming.

Arguments and results are described in ``noise.py``: ``scale`` is the shorter side of the image /
224, at most 1, and parameters are in pixels of 224 x 224.
"""

import math
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from tcnn_probe.evaluation.corruptions.resampling import area_weights, zoom
from tcnn_probe.extras import needed_for

__all__ = ["along_a_line", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"]


def defocus_blur(
    image: NDArray[Any],
    random: RandomState,
    scale: float,
    *,
    radius: int,
    smoothing: float,
) -> NDArray[Any]:
    """Convolve with a disc whose edge is softened by a Gaussian
    of deviation ``smoothing``; borders are mirrored.
    """
    with needed_for("a blur"):
        from scipy.signal import fftconvolve

    kernel = _disc(radius, smoothing, scale)
    half = len(kernel) // 2
    padded = np.pad(image, ((half, half), (half, half), (0, 0)), mode="reflect")
    return fftconvolve(padded, kernel[..., None], mode="valid", axes=(0, 1))


@lru_cache(maxsize=32)
def _disc(radius: int, smoothing: float, scale: float) -> NDArray[Any]:
    """Create the kernel, shape (k, k), k odd;
    it sums to 1, except for the smoothing at its border.
    """
    with needed_for("a blur"):
        from scipy.ndimage import correlate1d

    # These are the sizes of the published kernels, for which OpenCV uses 3 or 5 taps.
    half = max(8, radius)
    taps_each_side = 1 if radius <= 8 else 2
    squares = np.arange(-half, half + 1) ** 2
    disc = (squares[:, None] + squares <= radius**2).astype(float)
    offsets = np.arange(-taps_each_side, taps_each_side + 1)
    taps = np.exp(-(offsets**2) / (2 * smoothing**2))
    for axis in (0, 1):
        disc = correlate1d(disc, taps / taps.sum(), axis, mode="mirror")
    disc /= np.sum(squares[:, None] + squares <= radius**2)
    if scale == 1:
        return disc
    reach = math.ceil(half * scale)
    cells = area_weights(half + np.arange(-reach, reach + 1) / scale, 1 / scale, len(disc))
    return cells @ disc @ cells.T


def glass_blur(
    image: NDArray[Any],
    random: RandomState,
    scale: float,
    *,
    deviation: float,
    reach: int,
    rounds: int,
) -> NDArray[Any]:
    """Blur, replace each pixel by a nearby one, and blur again.

    Pixels are replaced in sequence, from the last to the first, so that some values travel far.
    (The published code intends to swap two pixels, but on an image with channels its second
    assignment does nothing.)

    Displacements are from -reach to reach - 1 along each axis, times the scale, rounded up or down
    at random. ``deviation`` is that of the Gaussian, and ``rounds`` the number of times that all
    pixels are replaced.
    """
    with needed_for("a blur"):
        from scipy.ndimage import gaussian_filter

    sigma = (deviation * scale, deviation * scale, 0)
    values = gaussian_filter(image, sigma, mode="nearest", truncate=4.0).reshape(-1, image.shape[2])
    for _ in range(rounds):
        values = values[_sources(image.shape[0], image.shape[1], random, scale, reach)]
    return gaussian_filter(values.reshape(image.shape), sigma, mode="nearest", truncate=4.0)


def _sources(
    height: int, width: int, random: RandomState, scale: float, reach: int
) -> NDArray[Any]:
    """Return for each pixel the index of the pixel whose value it has after a round,
    row-major, shape (H·W,).
    """
    margin = math.ceil(reach * scale)
    y, x = np.arange(height - margin, margin, -1), np.arange(width - margin, margin, -1)
    moves = random.randint(-reach, reach, size=(len(y), len(x), 2)).astype(float)
    if scale < 1:
        # With deterministic rounding, all displacements below a pixel would vanish, or all would
        # become one pixel.
        moves = np.floor(moves * scale + random.random_sample(moves.shape))
    from_y = np.clip(y[:, None] + moves[..., 1], 0, height - 1)
    from_x = np.clip(x + moves[..., 0], 0, width - 1)
    target = (y[:, None] * width + x).ravel()
    origin = (from_y * width + from_x).astype(int).ravel()

    # A pixel takes the value that its origin has at that time. An origin further on in the image
    # was replaced earlier, and has the value of its own origin. Such chains are followed to their
    # ends, in steps that double each time.
    source = np.arange(height * width)
    source[target] = origin
    replaced = np.zeros(height * width, dtype=bool)
    replaced[target] = True
    end = np.arange(height * width)
    end[target] = np.where((origin > target) & replaced[origin], origin, target)
    while not np.array_equal(end[end], end):
        end = end[end]
    return source[end]


def motion_blur(
    image: NDArray[Any],
    random: RandomState,
    scale: float,
    *,
    radius: int,
    deviation: float,
) -> NDArray[Any]:
    """Blur along a line of random direction within 45 degrees of the x axis."""
    return along_a_line(image, radius, deviation, random.uniform(-45, 45), scale)


def along_a_line(
    image: NDArray[Any], radius: int, deviation: float, angle: float, scale: float = 1.0
) -> NDArray[Any]:
    """Blur (H, W) or (H, W, C) along a line that starts at each pixel,
    by a half Gaussian; borders are repeated.

    The line has 2 radius + 1 points, one published pixel apart, at an angle in degrees.
    """
    points = np.arange(2 * radius + 1)
    weights = np.exp(-(points**2) / (2 * deviation**2))
    direction = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    # Several points may fall on the same pixel.
    total: Counter[tuple[int, int]] = Counter()
    for point, weight in zip(points * scale, weights / weights.sum(), strict=True):
        total[
            # Halves are rounded down, as in imagecorruptions.
            math.ceil(point * direction[0] - 0.5), math.ceil(point * direction[1] - 0.5)
        ] += weight
    margin = [max(abs(move[axis]) for move in total) for axis in (0, 1)]
    padded = np.pad(image, ((margin[0],) * 2, (margin[1],) * 2, (0, 0))[: image.ndim], mode="edge")
    blurred = np.zeros_like(image)
    for (down, right), weight in total.items():
        y, x = margin[0] + down, margin[1] + right
        blurred += weight * padded[y : y + image.shape[0], x : x + image.shape[1]]
    return blurred


def zoom_blur(
    image: NDArray[Any], random: RandomState, scale: float, *, until: float, step: float
) -> NDArray[Any]:
    """Average the image with its middle enlarged by the factors 1,
    1 + step, ... below ``until``.
    """
    # Sums are rounded to float32, as in the published code.
    single = image.astype(np.float32)
    total, factors = single.copy(), np.arange(1, until, step)
    for factor in factors:
        total += zoom(single, float(factor))[: image.shape[0], : image.shape[1]]
    return (total / (len(factors) + 1)).astype(image.dtype)
