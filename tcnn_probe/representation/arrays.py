"""Checks of features and labels."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["as_array", "feature_matrix", "label_vector"]


def as_array(values: Any, dtype: Any = None) -> np.ndarray:
    """Return an array of values, also of a tensor on any device, in any precision."""
    if hasattr(values, "detach"):  # a tensor, which is recognised without importing torch
        values = values.detach().cpu()
        # NumPy has no bfloat16.
        values = values.double() if values.is_floating_point() else values
    return np.asarray(values, dtype)


def feature_matrix(features: ArrayLike, name: str = "features", images: int = 1) -> np.ndarray:
    """Return finite features in float64, shape (n, C);
    raise ValueError for fewer than ``images`` images.
    """
    matrix = as_array(features, np.float64)
    if matrix.ndim < 2 or len(matrix) < images or not matrix.size:
        raise ValueError(
            f"expected {name} of {images} images or more, shape (n, ...), got the shape "
            f"{matrix.shape}"
        )
    if not np.isfinite(matrix).all():
        raise ValueError(
            f"expected finite {name}, got NaN or infinities: leave these layers or images out"
        )
    return matrix.reshape(len(matrix), -1)


def label_vector(labels: ArrayLike, features: np.ndarray, name: str = "labels") -> np.ndarray:
    """Return a label for each image, shape (n,); raise ValueError for another number of labels."""
    vector = as_array(labels)
    if vector.shape != (len(features),):
        raise ValueError(
            f"expected {name} of shape ({len(features)},), one for each image, got {vector.shape}"
        )
    return vector
