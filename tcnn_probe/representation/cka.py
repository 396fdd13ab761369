"""Linear CKA: the similarity of two representations
of the same images, by layers, epochs or models.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tcnn_probe.representation.arrays import feature_matrix

__all__ = ["linear_cka"]

# The estimate of HSIC divides by n - 3.
_LEAST_IMAGES = 4


def linear_cka(features: ArrayLike, others: ArrayLike) -> float:
    """Compute the debiased linear CKA of two representations of the same images.

    CKA(x, y) = HSIC(x, y) / sqrt(HSIC(x, x) HSIC(y, y)) (Kornblith et al. 2019), with the unbiased
    estimate of HSIC (Song et al. 2012) that Nguyen et al. 2021 use. It is 1 if the representations
    are equal up to a rotation, a scale and a shift; if they are unrelated it is 0 on average, and
    can be negative. The usual estimate without debiasing is near 1 for any two representations of
    few images with many channels.

    Args:
        features, others: Features of the same images, shapes (n, ...) and (n, ...), n >= 4. The n x
            n products of images are formed, whatever the number of channels.

    Returns:
        The CKA; NaN if one of the two has no structure that n images could show.

    Raises:
        ValueError: There are fewer than 4 images, or different numbers of them.
    """
    x = feature_matrix(features, images=_LEAST_IMAGES)
    y = feature_matrix(others, "others", images=_LEAST_IMAGES)
    if len(x) != len(y):
        raise ValueError(f"expected features of the same images, got {len(x)} and {len(y)}")
    of_x, of_y = _products(x), _products(y)
    of_both, of_each = _hsic(of_x, of_y), (_hsic(of_x, of_x), _hsic(of_y, of_y))
    # An unbiased estimate can be negative, even for a matrix with itself. Then the images show no
    # structure.
    if min(of_each) <= 0:
        return float("nan")
    return of_both / (of_each[0] * of_each[1]) ** 0.5


def _products(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the products between images, without those of an image with itself: (n, n)."""
    # CKA does not depend on a shift. If the first image is subtracted, a large mean does not cost
    # precision, and equal features are exactly 0.
    x = x - x[0]
    products = x @ x.T
    np.fill_diagonal(products, 0)
    return products


def _hsic(k: NDArray[np.float64], m: NDArray[np.float64]) -> float:
    """Estimate HSIC without bias from products K and M of images (Song et al. 2012).

    [tr(KM) + 1K1 1M1 / ((n - 1)(n - 2)) - 2 1KM1 / (n - 2)] / (n(n - 3))
    """
    n = len(k)
    means = k.sum() * m.sum() / ((n - 1) * (n - 2))
    rows = k.sum(0) @ m.sum(0)
    return float(((k * m).sum() + means - 2 * rows / (n - 2)) / (n * (n - 3)))
