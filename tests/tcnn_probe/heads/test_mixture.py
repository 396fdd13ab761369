"""The mixture on known clusters."""

import numpy as np
import pytest

from tcnn_probe.heads import fit_mixture


@pytest.mark.parametrize("number", [1, 2, 3])
def test_known_clusters_are_found(number: int) -> None:
    rng = np.random.default_rng(0)
    centers, sizes = (
        [(0.9, 0.4, 0.3), (0.1, 0.6, 0.8), (0.5, 0.2, 0.6)][:number],
        # Sizes differ, so that components can be told apart.
        [101, 53, 29][:number],
    )
    points = np.concatenate(
        [rng.normal(c, 0.05, (n, 3)) for c, n in zip(centers, sizes, strict=True)]
    )
    mixture, criteria = fit_mixture(points)
    assert len(mixture.weights_) == number == int(np.argmin(criteria)) + 1
    assert len(criteria) == 3
    assert mixture.converged_
    order = np.argsort(-mixture.weights_)
    # Fewer than two of the points may be assigned to another cluster.
    np.testing.assert_allclose(
        mixture.weights_[order], np.array(sizes) / sum(sizes), atol=0.01
    )
    # The tolerance is three standard errors of the smallest cluster's mean, 0.05 / sqrt(29) each.
    np.testing.assert_allclose(mixture.means_[order], centers, atol=0.03)
    # Each variance includes the floor of 0.03^2.
    deviations = np.sqrt(np.diagonal(mixture.covariances_, axis1=1, axis2=2) - 0.03**2)
    np.testing.assert_allclose(deviations, 0.05, atol=0.02)
    again, _ = fit_mixture(points[rng.permutation(len(points))])
    np.testing.assert_array_equal(
        mixture.predict_proba(points), again.predict_proba(points)
    )


@pytest.mark.parametrize(
    "points",
    [[[0.5, 0.25]], [[0.5, 0.25], [0.5 + 1e-12, 0.25]] * 7],
    ids=["one", "nearly alike"],
)
def test_equal_heads_are_one_component(points: list[list[float]]) -> None:
    mixture, criteria = fit_mixture(np.array(points))
    np.testing.assert_allclose(mixture.means_, [[0.5, 0.25]], rtol=1e-9)
    np.testing.assert_allclose(mixture.covariances_, [np.eye(2) * 0.03**2], atol=1e-12)
    np.testing.assert_array_equal(
        mixture.predict_proba(np.array(points)), np.ones((len(points), 1))
    )
    assert len(criteria) == 1


def test_few_points_and_small_differences() -> None:
    """The nine taps of a new layer differ by a few hundredths in their distance, and must be one component."""
    # There are no more components than points.
    assert len(fit_mixture(np.array([[0.1, 0.2], [0.9, 0.8]]))[1]) == 2
    taps = np.array(
        [(0.73, 0.38, 0.36 + 0.04 * (k % 2) - 0.04 * (k == 4)) for k in range(9)]
    )
    assert len(fit_mixture(np.tile(taps, (4, 1)))[0].weights_) == 1
    with pytest.raises(
        ValueError,
        match=r"expected finite points of shape \(n, F\), n >= 1, got the shape \(0, 2\)",
    ):
        fit_mixture(np.empty((0, 2)))
