"""Features and labels as users give them, as checked arrays."""

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["as_features", "as_labels"]


def as_features(given: ArrayLike, what: str = "features", least: int = 1) -> np.ndarray:
    """Finite numbers in float64, shape (n, C).

    Raises:
        ValueError: there are fewer than ``least`` images, or numbers that are not finite.
    """
    features = np.asarray(given, dtype=np.float64)
    if features.ndim < 2 or len(features) < least or not features.size:
        raise ValueError(f"expected {what} of {least} images or more, shape (n, ...), got the shape {features.shape}")
    if not np.isfinite(features).all():
        raise ValueError(f"expected finite {what}, got NaN or infinities: leave these layers or images out")
    return features.reshape(len(features), -1)


def as_labels(given: ArrayLike, features: np.ndarray, what: str = "labels") -> np.ndarray:
    """A label for each image, shape (n,).

    Raises:
        ValueError: there are more, or fewer.
    """
    labels = np.asarray(given)
    if labels.shape != (len(features),):
        raise ValueError(f"expected {what} of shape ({len(features)},), one for each image, got {labels.shape}")
    return labels
