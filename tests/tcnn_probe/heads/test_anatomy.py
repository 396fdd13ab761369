"""The parts of selectivity: an independent fit of the convolution,
and corrections against many draws.
"""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize

from tcnn_probe.heads import anatomy
from tcnn_probe.heads.anatomy import (
    Convolution,
    convolution_inside,
    parts_of_selectivity,
)
from tcnn_probe.heads.static_pattern import offsets_of_pairs
from tests.tcnn_probe.attention.bruteforce import entropy, grid

pytestmark = pytest.mark.numerical

Array = NDArray[np.float64]
PARTS = (
    "offset_information",
    "position_information",
    "key_content_information",
    "query_key_content_information",
)


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def nearest_convolution(mean: Array, index: NDArray[np.int64], seen: Array) -> float:
    """Minimise the mean cross entropy of a head's mean attention (queries, keys) to a convolution,
    by L-BFGS.

    The variables are the logits theta of the offsets, as in the definition.
    """

    def loss(theta: Array) -> tuple[float, Array]:
        logits = np.where(seen, theta[index], -np.inf)
        top = logits.max(1, keepdims=True)
        lse = top[:, 0] + np.log(np.exp(logits - top).sum(1))
        model = np.exp(logits - lse[:, None])
        on_seen = np.where(seen, theta[index], 0)
        value = (lse - (mean * on_seen).sum(1)).mean()
        slope = np.bincount(index.ravel(), (model - mean).ravel(), len(theta))
        return value, slope / len(mean)

    options = {"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-11, "maxcor": 50}
    start = np.zeros(index.max() + 1)
    result = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return float(result.fun)


def fitted(mean: Array, index: NDArray[np.int64], seen: Array, rounds: int) -> Array:
    """Return the cross entropies (heads,) that the package finds."""
    count = index.max() + 1
    masses = np.zeros((len(mean), count))
    pairs = np.zeros((count, len(index)))
    for i, j in itertools.product(*map(range, index.shape)):
        masses[:, index[i, j]] += mean[:, i, j]
        pairs[index[i, j], i] += seen[i, j]
    return convolution_inside(masses, pairs, mean.sum(-1), rounds=rounds).entropy


@pytest.mark.study(but=["0-0.0-2.0", "2-0.3-8.0"])
@pytest.mark.parametrize(
    ("prefix", "hidden", "gain"),
    [(0, 0.0, 2.0), (0, 0.3, 8.0), (2, 0.0, 8.0), (2, 0.3, 0.3), (2, 0.3, 8.0)],
)
def test_the_fit_equals_that_of_a_convex_solver(gain: float, hidden: float, prefix: int) -> None:
    """Also with tokens off the grid, with keys that are hidden from some queries,
    and for peaked attention.
    """
    rng = np.random.default_rng(0)
    places = np.array([p or (np.nan, np.nan) for p in grid(3, 5, prefix=prefix)])
    index, offsets = offsets_of_pairs(places[prefix:], places)
    assert len(offsets) == 5 * 9
    assert index.max() + 1 == len(offsets) + prefix
    seen = rng.random(index.shape) >= hidden
    seen[:, prefix] = True  # no query is without keys
    mean = softmax(np.where(seen, gain * rng.normal(size=(3, *index.shape)), -np.inf))
    expected = [nearest_convolution(head, index, seen) for head in mean]
    for rounds in (2, 30):  # Newton's method follows where these do not suffice
        entropies = fitted(mean, index, seen, rounds)
        np.testing.assert_allclose(entropies, expected, atol=1e-6)


def test_a_convolution_is_found_exactly() -> None:
    """The kernel, too, up to a factor."""
    rng = np.random.default_rng(0)
    places = np.array(grid(5, 7), dtype=float)
    index, offsets = offsets_of_pairs(places[::3], places)
    theta = 3 * rng.normal(size=(2, len(offsets)))
    mean = softmax(theta[:, index])
    masses = np.stack([np.bincount(index.ravel(), head.ravel()) for head in mean])
    pairs = np.stack([np.bincount(row, minlength=len(offsets)) for row in index], 1)
    found = convolution_inside(masses, pairs.astype(float), mean.sum(-1), tolerance=0)
    np.testing.assert_allclose(found.entropy, entropy(mean).mean(-1), atol=1e-12)
    ratio = np.log(found.kernel) - theta
    assert np.ptp(ratio, axis=1).max() < 1e-5


def estimates(weights: Array, population: int, images: int) -> Array:
    """Return the mean over groups of images of the parts, offset and position as their sum.

    Args:
        weights: Shape (all images, queries, keys).
        population: Number of queries of which these are a sample.
        images: Number of images of a group.
    """
    groups = weights.reshape(-1, images, *weights.shape[1:])  # groups instead of heads
    measured = parts_of_selectivity(
        groups.mean(1)[:, None],
        entropy(groups).mean(1)[:, None],
        entropy(groups.mean(2)).mean(1)[:, None],
        np.full((1, weights.shape[1]), weights.shape[2]),
        np.full(len(groups), images),
        population,
        # What a convolution explains moves between offset and position, and does not change their
        # sum.
        Convolution(np.ones((len(groups), 1)), np.ones(len(groups))),
    )
    total = sum(measured[name] for name in PARTS)
    np.testing.assert_allclose(total, measured["selectivity"], atol=1e-12)
    static = measured["offset_information"] + measured["position_information"]
    content = [measured[name] for name in PARTS[2:]]
    return np.stack([static, *content]).mean(1)


QUERIES, KEYS, IMAGES = 67, 23, 1024


@pytest.fixture(scope="module")
def images_and_queries() -> Array:
    """Attention with weak parts of all kinds, so that corrections of second order suffice."""
    rng = np.random.default_rng(0)
    logits = 0.3 * rng.normal(size=(1, QUERIES, KEYS))
    logits = logits + 0.3 * rng.normal(size=(IMAGES, 1, KEYS))
    return softmax(logits + 0.2 * rng.normal(size=(IMAGES, QUERIES, KEYS)))


@pytest.mark.study(but=["8-64", "2-7", "8-1"])
@pytest.mark.parametrize("sampled", [1, 7, 64])
@pytest.mark.parametrize("images", [2, 8, 32, 128])
def test_parts_do_not_depend_on_the_numbers_of_images_and_queries(
    images_and_queries: Array, images: int, sampled: int
) -> None:
    """Without the corrections, from two images and seven queries,
    parts are off by 30 to 80 per cent.
    """
    expected = estimates(images_and_queries, QUERIES, IMAGES)
    assert (expected > 0.015).all()
    order = np.random.default_rng(1).permutation(QUERIES)
    # Each query is in as many samples as any other, so that their differences average out.
    starts = range(0, QUERIES, 1 if sampled == 1 else 5)
    samples = [order[(start + np.arange(sampled)) % QUERIES] for start in starts]
    drawn = [estimates(images_and_queries[:, at], QUERIES, images) for at in samples]
    mean = np.mean(drawn, 0)
    if sampled == 1:
        # One query shows no differences between queries, and all content as that of keys.
        expected = np.array([expected[0], expected[1] + expected[2], 0])
    # The standard error over samples of seven queries is 3 per cent; higher orders are about 2.
    np.testing.assert_allclose(mean, expected, rtol=0.08, atol=1e-12)


def test_one_image_shows_selectivity_and_offset_alone(
    images_and_queries: Array,
) -> None:
    measured = parts_of_selectivity(
        images_and_queries[0][None, None],
        entropy(images_and_queries[0])[None, None],
        entropy(images_and_queries[0].mean(0))[None, None],
        np.full((1, QUERIES), KEYS),
        np.ones(1),
        QUERIES,
        Convolution(np.ones((1, 1)), np.ones(1)),
    )
    known = {name for name, values in measured.items() if np.isfinite(values).all()}
    assert known == {"selectivity", "offset_information"}


def test_steps_that_overflow_are_shortened() -> None:
    """Kernels so sharp that Newton's method begins with steps that are far too long
    are still found.
    """
    places = np.array(grid(4, 4), dtype=float)
    index, offsets = offsets_of_pairs(places, places)
    kernels = [100 * np.random.default_rng(seed).normal(size=len(offsets)) for seed in range(20)]
    attention = softmax(np.array(kernels)[:, index])
    convolution = anatomy.nearest_convolution(attention, index, np.ones((16, 16), dtype=bool))
    np.testing.assert_allclose(convolution.entropy, entropy(attention).mean(-1), atol=1e-5)
