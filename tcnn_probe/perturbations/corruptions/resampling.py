"""How the corruptions' lengths follow from the size of an image, and how arrays are brought from one grid to another.

The published parameters are for images of 224 x 224. A smaller image is treated as one of that size seen at a lower
resolution: kernels are averaged over its larger pixels, layers (snow, frost) are made at the published size and then
averaged. A larger one is treated as published, in its own pixels.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["REFERENCE", "area_weights", "linear_weights", "reference_shape", "scale_of", "shrink", "zoom"]

REFERENCE = 224


def scale_of(shape: tuple[int, ...]) -> float:
    """How long a published pixel is in an image of shape (H, W, ...): its shorter side over 224, at most 1."""
    return min(1.0, min(shape[:2]) / REFERENCE)


def reference_shape(shape: tuple[int, ...], scale: float) -> tuple[int, int]:
    """What (H, W, ...) is in published pixels, ``scale`` being the length of one."""
    return round(shape[0] / scale), round(shape[1] / scale)


def area_weights(centres: NDArray[Any], width: float, count: int) -> NDArray[Any]:
    """How much of each of ``count`` pixels, which are 1 wide and centred at 0, 1, ..., lies in each cell.

    Args:
        centres: of the cells, shape (cells,).
        width: of every cell.
        count: of the pixels.

    Returns:
        shape (cells, count); a row sums to ``width`` where its cell lies among the pixels.
    """
    cells, pixels = np.asarray(centres)[:, None], np.arange(count)[None]
    ends = np.minimum(cells + width / 2, pixels + 0.5)
    return np.clip(ends - np.maximum(cells - width / 2, pixels - 0.5), 0, None)


def linear_weights(found: int, wanted: int) -> NDArray[Any]:
    """Linear interpolation of ``found`` values at ``wanted`` places from the first to the last, (wanted, found)."""
    places = np.linspace(0, found - 1, wanted)
    return np.clip(1 - np.abs(places[:, None] - np.arange(found)), 0, None)


def shrink(layer: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Means over the pixels of a coarser grid.

    Args:
        layer: shape (H, W) or (H, W, C).
        shape: (h, w, ...), no larger.

    Returns:
        shape (h, w) or (h, w, C).
    """
    if layer.shape[:2] == shape[:2]:
        return layer
    weights = []
    for fine, coarse in zip(layer.shape[:2], shape[:2], strict=True):
        width = fine / coarse
        weights.append(area_weights((np.arange(coarse) + 0.5) * width - 0.5, width, fine) / width)
    return _along_axes(weights[0], layer, weights[1])


def zoom(image: NDArray[Any], factor: float) -> NDArray[Any]:
    """The middle of an image, enlarged linearly to its size or up to ``factor`` pixels more.

    Args:
        image: shape (H, W) or (H, W, C).
        factor: from 1.

    Returns:
        shape (H', W') or (H', W', C), H' >= H, W' >= W.
    """
    parts, weights = [], []
    for size in image.shape[:2]:
        kept = math.ceil(size / factor)
        start = (size - kept) // 2
        parts.append(slice(start, start + kept))
        weights.append(linear_weights(kept, max(size, round(kept * factor))).astype(image.dtype))
    return _along_axes(weights[0], image[parts[0], parts[1]], weights[1])


def _along_axes(rows: NDArray[Any], image: NDArray[Any], columns: NDArray[Any]) -> NDArray[Any]:
    if image.ndim == 2:
        return rows @ image @ columns.T
    return np.moveaxis(rows @ np.moveaxis(image, -1, 0) @ columns.T, 0, -1)
