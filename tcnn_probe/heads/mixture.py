"""A Gaussian mixture of heads, fitted by scikit-learn."""

import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

__all__ = ["fit_mixture"]

_COMPONENTS = 3  # at most one for each of convolutional, averaging and content heads
_INITIALISATIONS = 3  # EM ends in local optima
# Without this bound, a few nearly equal heads would be a perfect component.
_SMALLEST_DEVIATION = 0.03


def fit_mixture(
    points: np.ndarray, *, seed: int = 0
) -> "tuple[GaussianMixture, list[float]]":
    """Fit one to three Gaussians with full covariances, as many as the Bayesian information criterion selects.

    Features are shares of similar size and are not rescaled: scaled to unit variance, heads that differ by a hundredth
    would form three types. No component is narrower than a standard deviation of 0.03, and there are no more components
    than distinct points. The order of the points does not matter.

    Args:
        points: Finite points, shape (n, F), n >= 1.
        seed: Seed of the three initialisations, of which the best is used.

    Returns:
        The :class:`sklearn.mixture.GaussianMixture`, and the criteria of mixtures of 1, 2, ... components, the smallest
        of which belongs to the returned mixture.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed; ``pip install "tcnn-probe[stats]"``.
        ValueError: There are no points, or not all points are finite.
    """
    try:
        from sklearn.mixture import GaussianMixture
    except ModuleNotFoundError as error:
        message = "a mixture needs scikit-learn: pip install 'tcnn-probe[stats]'"
        raise ModuleNotFoundError(message, name=error.name) from error

    if points.ndim != 2 or not len(points) or not np.isfinite(points).all():
        raise ValueError(
            f"expected finite points of shape (n, F), n >= 1, got the shape {points.shape}"
        )
    # The initialisation draws points by index. Sorting makes it independent of the order of the heads.
    ordered = points[np.lexsort(points.T)].astype(np.float64)
    # More components than distinct points would be degenerate; 1e-6 is far below the resolution of recorded shares.
    distinct = len(np.unique(ordered.round(6), axis=0))
    if len(ordered) == 1:
        ordered = ordered.repeat(2, axis=0)  # GaussianMixture.fit requires two samples
    options = {
        "reg_covar": _SMALLEST_DEVIATION**2,
        "n_init": _INITIALISATIONS,
        "max_iter": 500,
        "random_state": seed,
    }
    with warnings.catch_warnings():
        # A ConvergenceWarning is redundant, because `converged_` is recorded.
        warnings.simplefilter("ignore")
        counts = range(1, min(_COMPONENTS, distinct) + 1)
        mixtures = [GaussianMixture(count, **options).fit(ordered) for count in counts]
    criteria = [float(mixture.bic(ordered)) for mixture in mixtures]
    return mixtures[int(np.argmin(criteria))], criteria
