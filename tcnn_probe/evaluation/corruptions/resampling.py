"""Lengths of the corruptions for images of any size,
and resampling of arrays from one grid to another.

The published parameters are for images of 224 x 224. A smaller image is treated as an image of that
size at a lower resolution: kernels are averaged over its larger pixels, and layers (snow, frost)
are computed at the published size and then averaged. For a larger image the published lengths are
used in its own pixels.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["area_weights", "reference_shape", "scale_of", "shrink", "zoom"]

_REFERENCE = 224  # in pixels: ImageNet-C was made from images of 224 x 224


def scale_of(shape: tuple[int, ...]) -> float:
    """Return the length of a published pixel in an image (H, W, ...):
    its shorter side over 224, at most 1.
    """
    return min(1.0, min(shape[:2]) / _REFERENCE)


def reference_shape(shape: tuple[int, ...], scale: float) -> tuple[int, int]:
    """Return (H, W) in published pixels, whose length is ``scale``."""
    return round(shape[0] / scale), round(shape[1] / scale)


def area_weights(centres: NDArray[Any], width: float, count: int) -> NDArray[Any]:
    """Compute the overlap of cells with ``count`` pixels,
    1 wide and centred at 0, 1, ...; shape (cells, count).

    ``centres`` and ``width`` are those of the cells. A row sums to ``width`` if its cell lies
    within the pixels.
    """
    cells, pixels = np.asarray(centres)[:, None], np.arange(count)[None]
    ends = np.minimum(cells + width / 2, pixels + 0.5)
    return np.clip(ends - np.maximum(cells - width / 2, pixels - 0.5), 0, None)


def shrink(layer: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Average (H, W) or (H, W, C) over the pixels of a coarser grid (h, w, ...)."""
    if layer.shape[:2] == shape[:2]:
        return layer
    weights = []
    for fine, coarse in zip(layer.shape[:2], shape[:2], strict=True):
        width = fine / coarse
        weights.append(area_weights((np.arange(coarse) + 0.5) * width - 0.5, width, fine) / width)
    return _along_axes(weights[0], layer, weights[1])


def zoom(image: NDArray[Any], factor: float) -> NDArray[Any]:
    """Enlarge the middle of an image, (H, W) or (H, W, C),
    linearly to its size or up to ``factor`` pixels more.
    """
    # Two small products replace scipy.ndimage.zoom with order=1, which the published code calls.
    crop, weights = [], []
    for size in image.shape[:2]:
        width = math.ceil(size / factor)
        start = (size - width) // 2
        crop.append(slice(start, start + width))
        # SciPy rounds the size, which can be a pixel less than that of the image.
        places = np.linspace(0, width - 1, max(size, round(width * factor)))
        weights.append(
            np.clip(1 - np.abs(places[:, None] - np.arange(width)), 0, None).astype(image.dtype)
        )
    return _along_axes(weights[0], image[tuple(crop)], weights[1])


def _along_axes(rows: NDArray[Any], image: NDArray[Any], columns: NDArray[Any]) -> NDArray[Any]:
    if image.ndim == 2:
        return rows @ image @ columns.T
    return np.moveaxis(rows @ np.moveaxis(image, -1, 0) @ columns.T, 0, -1)
