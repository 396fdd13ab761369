"""The rule of types before attention was recorded in parts:
thresholds, or a mixture of Gaussians. Deprecated.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture

from tcnn_probe.extras import needed_for

__all__ = [
    "FORMER_DEFINITIONS",
    "FORMER_TYPES",
    "Thresholds",
    "fit_mixture",
    "former_types",
    "types_by_mixture",
]

FORMER_TYPES = ("convolutional", "averaging", "content", "mixed")
FORMER_DEFINITIONS = {
    "convolutional": "content_information <= {information[0]:.4g} log keys, entropy <= "
    "{entropy[0]:.4g} uniform_entropy, attention_distance <= {distance:.4g} "
    "uniform_distance, translation_equivariance >= {equivariance:.4g}",
    "averaging": "content_information <= {information[0]:.4g} log keys, entropy >= "
    "{entropy[1]:.4g} uniform_entropy",
    "content": "content_information >= {information[1]:.4g} log keys",
}


@dataclass(frozen=True)
class Thresholds:
    """Limits between types of heads. Deprecated: types follow from the parts of their attention.

    Args:
        information: Shares of log keys up to which a head is static, and from which on it is
            "content".
        entropy: Shares of the entropy of uniform attention up to which a static head can be
            "convolutional", and from which on it is "averaging".
        distance: Largest distance of a convolutional head, as a share of that of uniform attention.
        equivariance: Smallest equivariance of a convolutional head.
        gate: Shares of positional attention, as in :func:`tcnn_probe.head_types`.
    """

    information: Sequence[float] = (0.02, 0.1)
    entropy: Sequence[float] = (0.85, 0.95)
    distance: float = 0.8
    equivariance: float = 0.5
    gate: Sequence[float] = (1 / 3, 2 / 3)

    def __post_init__(self) -> None:
        warnings.warn(
            "Thresholds will be removed in the next version: head_types() needs none but its gate=",
            DeprecationWarning,
            stacklevel=3,
        )


def former_types(
    information: np.ndarray,
    evenness: np.ndarray,
    reach: np.ndarray,
    equivariance: np.ndarray,
    thresholds: Thresholds,
) -> np.ndarray:
    """Classify heads by shares of log keys,
    of the entropy and distance of uniform attention, and equivariance.
    """
    static = information <= thresholds.information[0]
    dynamic = information >= thresholds.information[1]
    uneven = static & (evenness <= thresholds.entropy[0])
    types = np.full(np.shape(information), "mixed", dtype=object)
    types[dynamic] = "content"
    types[static & (evenness >= thresholds.entropy[1])] = "averaging"
    is_local = (reach <= thresholds.distance) & (equivariance >= thresholds.equivariance)
    types[uneven & is_local] = "convolutional"
    # Evenness matters for static heads only, and reach and equivariance for uneven static heads
    # only.
    defined = np.isfinite(information) & (dynamic | ~static | np.isfinite(evenness))
    defined &= ~uneven | (np.isfinite(reach) & np.isfinite(equivariance))
    types[~defined] = ""
    return types


def fit_mixture(points: np.ndarray, *, seed: int = 0) -> "tuple[GaussianMixture, list[float]]":
    """Fit one to three Gaussians, as many as BIC selects. Deprecated:
    use scikit-learn's GaussianMixture.

    Args:
        points: Finite points, shape (n, F), n >= 1.
        seed: Seed of the three initialisations, of which the best is used.

    Returns:
        The :class:`sklearn.mixture.GaussianMixture`, and the criteria of mixtures of 1, 2, ...
        components.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        ValueError: There are no points, or not all points are finite.
    """
    warnings.warn(
        "fit_mixture() will be removed in the next version: use sklearn.mixture.GaussianMixture",
        DeprecationWarning,
        stacklevel=2,
    )
    return _fit(points, seed)


def _fit(points: np.ndarray, seed: int) -> "tuple[GaussianMixture, list[float]]":
    with needed_for("a mixture"):
        from sklearn.mixture import GaussianMixture
    if points.ndim != 2 or not len(points) or not np.isfinite(points).all():
        raise ValueError(
            f"expected finite points of shape (n, F), n >= 1, got the shape {points.shape}"
        )
    # The initialisation draws points by index. Sorting makes it independent of the order of the
    # heads.
    ordered = points[np.lexsort(points.T)].astype(np.float64)
    distinct = len(np.unique(ordered.round(6), axis=0))
    if len(ordered) == 1:
        ordered = ordered.repeat(2, axis=0)  # GaussianMixture.fit requires two samples
    # Without a bound on the covariance, a few nearly equal heads would be a perfect component.
    options = {"reg_covar": 0.03**2, "n_init": 3, "max_iter": 500, "random_state": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = range(1, min(3, distinct) + 1)
        mixtures = [GaussianMixture(count, **options).fit(ordered) for count in counts]
    criteria = [float(mixture.bic(ordered)) for mixture in mixtures]
    return mixtures[int(np.argmin(criteria))], criteria


def types_by_mixture(points: np.ndarray, thresholds: Thresholds, seed: int) -> np.ndarray:
    """Return the types of the means of the most probable components;
    "" where a feature is not finite.
    """
    finite = np.isfinite(points).all(-1)
    labels = np.full(finite.shape, "", dtype=object)
    if finite.any():
        mixture, _ = _fit(points[finite], seed)
        means: Any = mixture.means_.T
        components = former_types(*[*means, thresholds])
        labels[finite] = components[mixture.predict(points[finite])]
    return labels
