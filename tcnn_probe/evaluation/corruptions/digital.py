"""Digital: contrast, elastic distortion, pixelation, JPEG.

``noise.py`` says what the functions have in common.
"""

import io
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image

from tcnn_probe.evaluation.corruptions.resampling import reference_shape

__all__ = ["contrast", "elastic_transform", "jpeg_compression", "pixelate"]


def contrast(image: NDArray[Any], random: RandomState, scale: float, *, kept: float) -> NDArray[Any]:
    """Draws every value towards its channel's mean, to this share of its distance."""
    mean = image.mean(axis=(0, 1), keepdims=True)
    return mean + (image - mean) * kept


def elastic_transform(
    image: NDArray[Any], random: RandomState, scale: float, *, amplitude: float, deviation: float, corners: float
) -> NDArray[Any]:
    """Applies a random affine map, then displaces by two smooth fields; linear interpolation, mirrored borders.

    The map moves three points by up to ``corners`` along each axis. A field is uniform noise from -1 to 1, smoothed by
    a Gaussian of this deviation, times the amplitude. White noise averaged over larger pixels is weaker by as much, so
    that the amplitude is multiplied by the square of the scale.
    """
    from scipy.ndimage import map_coordinates

    height, width, _ = image.shape
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    back = _back_from_affine(image.shape, random, scale, corners * scale)
    from_x, from_y = (row[0] * x + row[1] * y + row[2] for row in back)
    warped = [map_coordinates(part, (from_y, from_x), order=1, mode="mirror") for part in np.moveaxis(image, -1, 0)]
    smooth_y, smooth_x = (_smoothing(size, deviation * scale) for size in (height, width))
    right, down = (
        amplitude * scale**2 * (smooth_y @ random.uniform(-1, 1, size=(height, width)) @ smooth_x.T) for _ in range(2)
    )
    moved = [map_coordinates(part, (y + down, x + right), order=1, mode="reflect") for part in warped]
    return np.stack(moved, -1)


def _back_from_affine(shape: tuple[int, ...], random: RandomState, scale: float, reach: float) -> NDArray[Any]:
    """The inverse of the map that moves three of the corners of a square within ± reach; (2, 3), takes (x, y, 1)."""
    middle = np.array([shape[1] // 2, shape[0] // 2], dtype=float)
    half = min(reference_shape(shape, scale)) // 3 * scale
    before = middle + half * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + random.uniform(-reach, reach, size=before.shape)
    return np.linalg.solve(np.column_stack([after, np.ones(3)]), before).T


@lru_cache(maxsize=32)
def _smoothing(size: int, deviation: float) -> NDArray[Any]:
    """The Gaussian filter along an axis as a matrix, (size, size): it may be wider than the image by far."""
    from scipy.ndimage import gaussian_filter1d

    return gaussian_filter1d(np.eye(size), deviation, axis=0, mode="reflect", truncate=3.0)


def pixelate(image: NDArray[Any], random: RandomState, scale: float, *, kept: float) -> NDArray[Any]:
    """Shrinks the image to this share of its sides, and enlarges it again by boxes."""
    height, width, _ = image.shape
    small = max(1, int(width * kept)), max(1, int(height * kept))
    parts = []
    for part in np.moveaxis(image, -1, 0):
        boxes = Image.fromarray(part.astype(np.float32)).resize(small, Image.Resampling.BOX)
        parts.append(np.asarray(boxes.resize((width, height), Image.Resampling.BOX)))
    return np.stack(parts, -1).astype(image.dtype)


def jpeg_compression(image: NDArray[Any], random: RandomState, scale: float, *, quality: int) -> NDArray[Any]:
    """Rounds the image to 8 bits and compresses it by Pillow's JPEG."""
    pixels = np.rint(image * 255).astype(np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels[..., 0] if image.shape[2] == 1 else pixels).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file), dtype=image.dtype).reshape(image.shape) / 255
