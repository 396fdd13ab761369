"""Weather: snow, frost, fog, brightness.

``noise.py`` describes the arguments and results of the functions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from tcnn_probe.evaluation.corruptions.blur import along_a_line
from tcnn_probe.evaluation.corruptions.frost_pictures import crop, texture
from tcnn_probe.evaluation.corruptions.resampling import reference_shape, shrink, zoom

__all__ = ["brightness", "fog", "frost", "grey", "snow"]


def grey(image: NDArray[Any]) -> NDArray[Any]:
    """Return the luminance, (H, W, 1), of an image (H, W, C), with the weights of ITU-R BT.601."""
    return image if image.shape[2] == 1 else image @ np.array([[0.299], [0.587], [0.114]])


def snow(
    image: NDArray[Any],
    random: RandomState,
    scale: float,
    *,
    mean: float,
    deviation: float,
    size: float,
    threshold: float,
    radius: int,
    streak: float,
    kept: float,
) -> NDArray[Any]:
    """Whiten the image and add flakes, motion-blurred at 45 to 135 degrees,
    and a copy of them rotated by 180 degrees.

    Flakes are computed at the published size and averaged. They are normal values with this mean
    and deviation, one per pixel, enlarged by ``size``; values below the threshold are set to 0.
    ``streak`` is the deviation of the motion blur with this radius, and ``kept`` the share of the
    image that is not whitened.
    """
    height, width = reference_shape(image.shape, scale)
    flakes = zoom(random.normal(mean, deviation, size=(height, width)), size)
    flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1)
    flakes = along_a_line(flakes, radius, streak, random.uniform(-135, -45))[:height, :width]
    layer = shrink(flakes + np.rot90(flakes, k=2), image.shape)
    whitened = np.maximum(image, 1.5 * grey(image) + 0.5)
    return kept * image + (1 - kept) * whitened + layer[..., None]


def frost(
    image: NDArray[Any],
    random: RandomState,
    scale: float,
    *,
    kept: float,
    added: float,
    photographs: Sequence[NDArray[Any]] = (),
) -> NDArray[Any]:
    """Multiply the image by ``kept``, and add a random crop of a picture of frost times ``added``.

    The picture is one of the photographs, each of shape (H', W', 3) in [0, 1], or our own texture
    if there are none. Its pixels are published pixels.
    """
    pictures = photographs or [texture()]
    layer = crop(
        pictures[random.randint(len(pictures))],
        reference_shape(image.shape, scale),
        random,
    )
    layer = shrink(layer, image.shape)
    return kept * image + added * (grey(layer) if image.shape[2] == 1 else layer)


def fog(
    image: NDArray[Any],
    random: RandomState,
    scale: float,
    *,
    added: float,
    decay: float,
) -> NDArray[Any]:
    """Add a fractal height map times ``added``, and scale the sum to the image's maximum.

    The amplitude of the map's detail decreases by the factor ``decay`` at each halving of its
    length.
    """
    height, width, _ = image.shape
    # Squares are halved down to a pixel, so the side is the next power of two.
    fractal = _plasma(1 << (max(height, width) - 1).bit_length(), decay, random)[
        :height, :width, None
    ]
    brightest = image.max()
    return (image + added * fractal) * brightest / (brightest + added)


def _plasma(size: int, decay: float, random: RandomState) -> NDArray[Any]:
    """Create a periodic height map in [0, 1] by the diamond-square algorithm,
    (size, size); size is a power of two.
    """
    heights = np.zeros((size, size))
    # The initial strength is the published one, although heights are scaled to [0, 1] in the end.
    step, strength = size, 100.0
    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        pairs = corners + np.roll(corners, -1, 0)
        heights[half::step, half::step] = _roughened(
            pairs + np.roll(pairs, -1, 1), strength, random
        )
        centres = heights[half::step, half::step]
        rows = centres + np.roll(centres, 1, 0) + corners + np.roll(corners, -1, 1)
        heights[::step, half::step] = _roughened(rows, strength, random)
        columns = centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 0)
        heights[half::step, ::step] = _roughened(columns, strength, random)
        step, strength = half, strength / decay
    heights -= heights.min()
    return heights / heights.max()


def _roughened(sums: NDArray[Any], strength: float, random: RandomState) -> NDArray[Any]:
    # The strength enters twice, as in the published code.
    return sums / 4 + strength * random.uniform(-strength, strength, sums.shape)


def brightness(
    image: NDArray[Any], random: RandomState, scale: float, *, added: float
) -> NDArray[Any]:
    """Add ``added`` to the value in HSV, the largest of the channels;
    hue and saturation are kept.
    """
    value = image.max(axis=2, keepdims=True)
    brighter = np.clip(value + added, 0, 1)
    # A black pixel has no hue and becomes grey.
    return np.where(value > 0, image * (brighter / np.where(value > 0, value, 1)), brighter)
