"""A Gaussian mixture of heads, fitted by scikit-learn."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Mixture", "fit_mixture"]

_COMPONENTS = 3
_INITIALISATIONS = 3
_LEAST_DEVIATION = 0.03  # of shares: without it a few heads that are nearly equal would be a perfect component


@dataclass(frozen=True)
class Mixture:
    """A mixture of K Gaussians, as :func:`fit_mixture` finds it.

    Args:
        weights: shape (K,), which sum to one.
        means: shape (K, F).
        covariances: shape (K, F, F).
        bic: Bayesian information criterion of 1, 2, ... components; the number with the least was chosen.
        converged: whether expectation maximisation converged.
    """

    weights: np.ndarray
    means: np.ndarray
    covariances: np.ndarray
    bic: tuple[float, ...]
    converged: bool
    _model: Any

    def posterior(self, points: np.ndarray) -> np.ndarray:
        """Probability of each component, given a point: (n, F) -> (n, K), rows sum to one."""
        return np.asarray(self._model.predict_proba(points), dtype=np.float64)


def fit_mixture(points: np.ndarray, *, seed: int = 0) -> Mixture:
    """Fit one to three Gaussians with full covariances; the Bayesian information criterion says how many.

    Features are shares of the same size and are not rescaled: scaled to unit variance, heads that differ by a
    hundredth would be three kinds. No component is narrower than a standard deviation of 0.03, and there are no more
    components than different points. The order of the points does not matter.

    Args:
        points: finite, shape (n, F), n >= 1.
        seed: of the initialisations, of which the best of three counts.

    Returns:
        :class:`Mixture`.

    Raises:
        ValueError: there are no points, or one is not finite.
    """
    if points.ndim != 2 or not len(points) or not np.isfinite(points).all():
        raise ValueError(f"expected finite points of shape (n, F), n >= 1, got the shape {points.shape}")
    ordered = points[np.lexsort(points.T)].astype(np.float64)
    different = len(np.unique(ordered.round(6), axis=0))
    if len(ordered) == 1:
        ordered = ordered.repeat(2, axis=0)  # scikit-learn wants two at least
    models = [_fit(ordered, count, seed) for count in range(1, min(_COMPONENTS, different) + 1)]
    bic = tuple(float(model.bic(ordered)) for model in models)
    best = models[int(np.argmin(bic))]
    return Mixture(best.weights_, best.means_, best.covariances_, bic, bool(best.converged_), best)


def _fit(points: np.ndarray, components: int, seed: int) -> Any:
    from sklearn.mixture import GaussianMixture

    model = GaussianMixture(
        components, reg_covar=_LEAST_DEVIATION**2, n_init=_INITIALISATIONS, max_iter=500, random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged is said by the mixture itself
        return model.fit(points)
