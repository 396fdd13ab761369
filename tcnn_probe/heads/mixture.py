"""A Gaussian mixture of heads, fitted by scikit-learn."""

import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

__all__ = ["fit_mixture"]

_COMPONENTS = 3
_INITIALISATIONS = 3
_LEAST_DEVIATION = 0.03  # of shares: without it a few heads that are nearly equal would be a perfect component


def fit_mixture(points: np.ndarray, *, seed: int = 0) -> "tuple[GaussianMixture, list[float]]":
    """Fit one to three Gaussians with full covariances; the Bayesian information criterion says how many.

    Features are shares of the same size and are not rescaled: scaled to unit variance, heads that differ by a
    hundredth would be three kinds. No component is narrower than a standard deviation of 0.03, and there are no more
    components than different points. The order of the points does not matter.

    Args:
        points: finite, shape (n, F), n >= 1.
        seed: of the initialisations, of which the best of three counts.

    Returns:
        the :class:`sklearn.mixture.GaussianMixture`; and the criterion of 1, 2, ... components, of which it is the
        least.

    Raises:
        ValueError: there are no points, or one is not finite.
    """
    from sklearn.mixture import GaussianMixture

    if points.ndim != 2 or not len(points) or not np.isfinite(points).all():
        raise ValueError(f"expected finite points of shape (n, F), n >= 1, got the shape {points.shape}")
    ordered = points[np.lexsort(points.T)].astype(np.float64)
    different = len(np.unique(ordered.round(6), axis=0))
    if len(ordered) == 1:
        ordered = ordered.repeat(2, axis=0)  # scikit-learn wants two at least
    options = {"reg_covar": _LEAST_DEVIATION**2, "n_init": _INITIALISATIONS, "max_iter": 500, "random_state": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged is said by the mixture itself
        counts = range(1, min(_COMPONENTS, different) + 1)
        mixtures = [GaussianMixture(count, **options).fit(ordered) for count in counts]
    criteria = [float(mixture.bic(ordered)) for mixture in mixtures]
    return mixtures[int(np.argmin(criteria))], criteria
