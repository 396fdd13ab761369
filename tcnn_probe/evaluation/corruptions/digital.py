"""Digital: contrast, elastic distortion, pixelation, JPEG.

``noise.py`` describes the arguments and results of the functions.
"""

import io
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image

from tcnn_probe.evaluation.corruptions.resampling import reference_shape
from tcnn_probe.extras import needed_for

__all__ = ["contrast", "elastic_transform", "jpeg_compression", "pixelate"]


def contrast(
    image: NDArray[Any], random: RandomState, scale: float, *, kept: float
) -> NDArray[Any]:
    """Move every value towards its channel's mean, to the share ``kept`` of its distance."""
    mean = image.mean(axis=(0, 1), keepdims=True)
    return mean + (image - mean) * kept


def elastic_transform(
    image: NDArray[Any],
    random: RandomState,
    scale: float,
    *,
    amplitude: float,
    deviation: float,
    corners: float,
) -> NDArray[Any]:
    """Apply a random affine map, then displace by two smooth fields,
    with linear interpolation and mirrored borders.

    The map moves three points by up to ``corners`` along each axis. A field is uniform noise from
    -1 to 1, smoothed by a Gaussian of this deviation, times the amplitude. The amplitude is
    multiplied by the square of the scale: once as a length, and once because white noise is weaker
    after it is averaged over larger pixels.
    """
    with needed_for("an elastic transform"):
        from scipy.ndimage import map_coordinates

    height, width, _ = image.shape
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    inverse = _inverse_affine(image.shape, random, scale, corners * scale)
    from_x, from_y = (row[0] * x + row[1] * y + row[2] for row in inverse)
    smooth_y, smooth_x = (
        _smoothing(height, deviation * scale),
        _smoothing(width, deviation * scale),
    )
    right, down = (
        amplitude * scale**2 * (smooth_y @ random.uniform(-1, 1, size=(height, width)) @ smooth_x.T)
        for _ in range(2)
    )
    channels = []
    for channel in np.moveaxis(image, -1, 0):
        # "mirror" is OpenCV's BORDER_REFLECT_101, which the published code uses for the map; for
        # the displacement it uses SciPy's "reflect".
        warped = map_coordinates(channel, (from_y, from_x), order=1, mode="mirror")
        channels.append(map_coordinates(warped, (y + down, x + right), order=1, mode="reflect"))
    return np.stack(channels, -1)


def _inverse_affine(
    shape: tuple[int, ...], random: RandomState, scale: float, reach: float
) -> NDArray[Any]:
    """Invert an affine map that moves three corners
    of a square within ± reach; (2, 3), takes (x, y, 1).
    """
    middle = np.array([shape[1] // 2, shape[0] // 2], dtype=float)
    # The division by three, its rounding and the choice of corners are those of the published code.
    half = min(reference_shape(shape, scale)) // 3 * scale
    before = middle + half * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + random.uniform(-reach, reach, size=before.shape)
    return np.linalg.solve(np.column_stack([after, np.ones(3)]), before).T


@lru_cache(maxsize=32)
def _smoothing(size: int, deviation: float) -> NDArray[Any]:
    """Return the Gaussian filter along an axis as a matrix (size, size);
    it may be much wider than the image.
    """
    with needed_for("an elastic transform"):
        from scipy.ndimage import gaussian_filter1d

    # The filter is linear, so its matrix is its result for the unit vectors. truncate is that of
    # the published code; SciPy's default is 4.
    return gaussian_filter1d(np.eye(size), deviation, axis=0, mode="reflect", truncate=3.0)


def pixelate(
    image: NDArray[Any], random: RandomState, scale: float, *, kept: float
) -> NDArray[Any]:
    """Shrink the image to the share ``kept`` of its sides,
    and enlarge it again, both with a box filter.
    """
    height, width, _ = image.shape
    small = max(1, int(width * kept)), max(1, int(height * kept))
    channels = []
    # PIL resizes floating-point images of a single channel only.
    for channel in np.moveaxis(image, -1, 0):
        boxes = Image.fromarray(channel.astype(np.float32)).resize(small, Image.Resampling.BOX)
        channels.append(np.asarray(boxes.resize((width, height), Image.Resampling.BOX)))
    return np.stack(channels, -1).astype(image.dtype)


def jpeg_compression(
    image: NDArray[Any], random: RandomState, scale: float, *, quality: int
) -> NDArray[Any]:
    """Round the image to 8 bits and compress it with Pillow's JPEG encoder."""
    pixels = np.rint(image * 255).astype(np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels[..., 0] if image.shape[2] == 1 else pixels).save(
            file, "JPEG", quality=quality
        )
        return np.asarray(Image.open(file), dtype=image.dtype).reshape(image.shape) / 255
