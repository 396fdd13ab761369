"""Spectra of features: shares of their variance, and the effective number of their directions."""

import numpy as np
from numpy.typing import ArrayLike

from tcnn_probe.extras import needed_for
from tcnn_probe.representation.arrays import feature_matrix

__all__ = ["participation_ratio", "pca_energy"]


def pca_energy(features: ArrayLike) -> np.ndarray:
    """Compute the share of the variance in the first 1, 2,
    ... principal components (Touvron's thesis, Fig. 2.1).

    The lower the curve, the more directions share the variance.

    Args:
        features: Features of the images, shape (n, ...), C numbers per image, n >= 2.

    Returns:
        Shares, shape (min(n, C),), ascending to 1; NaN if all images have the same features.
    """
    with needed_for("a spectrum"):
        from sklearn.decomposition import PCA

    x = feature_matrix(features, images=2)
    if not np.ptp(x, axis=0).any():
        return np.full(min(x.shape), np.nan)
    return np.cumsum(PCA(svd_solver="full").fit(x).explained_variance_ratio_)


def participation_ratio(features: ArrayLike) -> float:
    """Compute the effective number of principal components,
    (sum of variances)^2 / sum of squared variances.

    It is 1 if a single direction has all the variance, and C if all C directions have the same
    variance, but at most n - 1. With few images it is too low. (Gao et al. 2017, A theory of
    multineuronal dimensionality, dynamics and measurement.)

    Args:
        features: Features of the images, shape (n, ...), n >= 2.

    Returns:
        The participation ratio; NaN if all images have the same features.
    """
    x = feature_matrix(features, images=2)
    if not np.ptp(x, axis=0).any():
        return float("nan")
    x = x - x.mean(0)
    # The smaller of x^T x and x x^T is used, which have the same eigenvalues apart from zeros.
    products = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
    return float(np.trace(products) ** 2 / (products**2).sum())
