"""The mixture, on clusters that are known, and its posterior by hand."""

import math

import numpy as np
import pytest

from tcnn_probe.heads import Mixture, fit_mixture


def clusters(*about: tuple[tuple[float, ...], float, int], seed: int = 0) -> np.ndarray:
    """Gaussian points: of each cluster its centre, deviation and size."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(center, deviation, (count, len(center))) for center, deviation, count in about])


def by_hand(mixture: Mixture, point: np.ndarray) -> list[float]:
    """Bayes' rule, one component at a time."""
    densities = []
    for weight, mean, covariance in zip(mixture.weights, mixture.means, mixture.covariances, strict=True):
        off = point - mean
        exponent = -0.5 * off @ np.linalg.inv(covariance) @ off
        scale = math.sqrt((2 * math.pi) ** len(point) * np.linalg.det(covariance))
        densities.append(weight * math.exp(exponent) / scale)
    return [density / sum(densities) for density in densities]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_clusters_that_are_known(number: int) -> None:
    centers = [(0.9, 0.4, 0.3), (0.1, 0.6, 0.8), (0.5, 0.2, 0.6)][:number]
    sizes = [101, 53, 29][:number]
    mixture = fit_mixture(clusters(*((c, 0.05, n) for c, n in zip(centers, sizes, strict=True))))
    assert len(mixture.weights) == number
    assert len(mixture.bic) == 3
    assert int(np.argmin(mixture.bic)) == number - 1
    assert mixture.converged
    order = np.argsort(-mixture.weights)
    np.testing.assert_allclose(mixture.weights[order], np.array(sizes) / sum(sizes), atol=0.01)
    np.testing.assert_allclose(mixture.means[order], centers, atol=0.03)
    floor = 0.03**2
    deviations = np.sqrt(np.diagonal(mixture.covariances, axis1=1, axis2=2) - floor)
    np.testing.assert_allclose(deviations, 0.05, atol=0.02)


def test_posterior_by_hand() -> None:
    points = clusters(((0.3, 0.4), 0.09, 211), ((0.7, 0.5), 0.07, 103))
    mixture = fit_mixture(points)
    assert len(mixture.weights) == 2
    new = np.array([[0.5, 0.45], [0.3, 0.4], [0.55, 0.5], [0.0, 1.0]])
    found = mixture.posterior(new)
    assert found.shape == (4, 2)
    assert found[0].min() > 0.01  # not all of them are sure
    np.testing.assert_allclose(found, [by_hand(mixture, point) for point in new], rtol=1e-9)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-12)


def test_order_of_the_points_and_seed() -> None:
    points = clusters(((0.3, 0.4), 0.09, 211), ((0.7, 0.5), 0.07, 103))
    once, again = (fit_mixture(one) for one in (points, points[np.random.default_rng(1).permutation(len(points))]))
    np.testing.assert_array_equal(once.means, again.means)
    np.testing.assert_array_equal(once.posterior(points), again.posterior(points))
    np.testing.assert_array_equal(fit_mixture(points, seed=7).means, fit_mixture(points, seed=7).means)


@pytest.mark.parametrize(
    "points",
    [
        [[0.5, 0.25]],
        [[0.5, 0.25]] * 13,
        [[0.5, 0.25], [0.5 + 1e-12, 0.25]] * 7,
    ],
    ids=["one", "all alike", "all but alike"],
)
def test_heads_that_are_alike_are_one_component(points: list[list[float]]) -> None:
    mixture = fit_mixture(np.array(points))
    np.testing.assert_allclose(mixture.means, [[0.5, 0.25]], rtol=1e-9)
    np.testing.assert_allclose(mixture.covariances, [np.eye(2) * 0.03**2], atol=1e-12)
    np.testing.assert_array_equal(mixture.posterior(np.array(points)), np.ones((len(points), 1)))
    assert mixture.weights.tolist() == [1.0]
    assert len(mixture.bic) == 1


def test_fewer_points_than_components() -> None:
    mixture = fit_mixture(np.array([[0.1, 0.2], [0.9, 0.8]]))
    assert len(mixture.bic) == 2
    assert np.isfinite(mixture.posterior(np.array([[0.1, 0.2], [0.5, 0.5]]))).all()


def test_small_differences_are_no_components() -> None:
    """The nine taps of a new layer differ by a few hundredths in how far they look."""
    taps = np.array([(0.73, 0.38, 0.36 + 0.04 * (k % 2) - 0.04 * (k == 4)) for k in range(9)])
    assert len(fit_mixture(np.tile(taps, (4, 1))).weights) == 1


@pytest.mark.parametrize("points", [np.empty((0, 2)), np.array([[0.5, np.nan]]), np.array([0.5, 0.25])])
def test_what_cannot_be_fitted(points: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected finite points of shape \(n, F\), n >= 1, got the shape"):
        fit_mixture(points)
