"""The anatomy of a head: the parts of its attention
that follow from offset, position and content, in nat.

The selectivity of a head is its information over uniform attention U, mean log K - mean H(A) for K
visible keys. A chain of distributions splits it into parts that add up: T, the convolution that is
nearest to the mean M of A over images, the mean M itself, and A. By Pythagoras' theorem for the
Kullback-Leibler divergence (Csiszar 1975), KL(M || U) = KL(T || U) + KL(M || T); and as images and
queries are drawn independently, the information of image and key given the query is I(image; key) +
I(image; query given key). The functions take plain arrays, in float64.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Convolution",
    "convolution_inside",
    "nearest_convolution",
    "nearest_prefix",
    "parts_of_selectivity",
]

Array = NDArray[np.float64]
_TINY = np.finfo(np.float64).tiny


class Convolution(NamedTuple):
    """The convolution T inside each head: T_i(j) = kernel(offset from i to j) / normaliser
    of query i.

    Args:
        kernel: Shape (heads, offsets), up to a factor of each head; 0 at offsets without attention.
        entropy: Mean over queries of the cross entropy -sum_j M_i(j) log T_i(j), shape (heads,).
            For the nearest T it is the entropy of T.
    """

    kernel: Array
    entropy: Array


def nearest_convolution(
    mean: Array,
    index: NDArray[np.int64],
    seen: NDArray[np.bool_],
    start: Array | None = None,
    *,
    rounds: int = 30,
    tolerance: float = 1e-7,
) -> Convolution:
    """Fit the convolution T that is nearest to a mean attention M, see :func:`convolution_inside`.

    Args:
        mean: M, shape (heads, queries, keys).
        index: Index of the offset of each pair of query and key, shape (queries, keys).
        seen: Whether each query sees each key, shape (queries, keys).
        start: Kernels to start from.
        rounds, tolerance: See :func:`convolution_inside`.
    """
    queries = len(index)
    count = int(index.max()) + 1
    mean = _of_queries_that_see(mean, seen)
    masses = np.array(
        [np.bincount(index.ravel(), head.ravel(), count) for head in mean],
        dtype=np.float64,
    )
    # Entry (offset, query) is the number of keys that the query sees at the offset.
    cells = index * queries + np.arange(queries)[:, None]
    counts = np.bincount(cells.ravel(), seen.ravel(), count * queries)
    pairs = counts.reshape(count, queries).astype(np.float64)
    weights = mean.sum(-1)
    return convolution_inside(masses, pairs, weights, start, rounds=rounds, tolerance=tolerance)


def nearest_prefix(mean: Array, on_grid: NDArray[np.bool_], seen: NDArray[np.bool_]) -> Convolution:
    """Fit the attention P nearest to a mean M that is even over the grid:
    a convolution whose offsets are all alike.

    Args:
        mean: M, shape (heads, queries, keys).
        on_grid: Whether each key lies on the grid, shape (keys,); each other one has a weight of
            its own.
        seen: Whether each query sees each key, shape (queries, keys).
    """
    mean = _of_queries_that_see(mean, seen)
    # The only offset of the patches comes first.
    masses = np.hstack([mean[..., on_grid].sum((1, 2))[:, None], mean[..., ~on_grid].sum(1)])
    pairs = np.vstack([seen[:, on_grid].sum(1), seen[:, ~on_grid].T])
    return convolution_inside(masses, pairs.astype(np.float64), mean.sum(-1))


def _of_queries_that_see(mean: Array, seen: NDArray[np.bool_]) -> Array:
    """Set the rows of queries that see no key to zero."""
    # Where a mask lowers all logits of a query alike, its softmax is uniform over keys that it does
    # not see.
    return mean * seen.any(1, keepdims=True)


def convolution_inside(
    masses: Array,
    pairs: Array,
    weights: Array,
    start: Array | None = None,
    *,
    rounds: int = 30,
    tolerance: float = 1e-7,
) -> Convolution:
    """Fit the convolution T that minimises the mean over queries of KL(M_i || T_i),
    by iterative scaling.

    At the minimum T has the masses of M. With normalisers Z = kernel @ pairs this says that the
    kernel is masses / sum_i weights_i pairs_i / Z_i, which is iterated. The cross entropy decreases
    in each round, and differs from its minimum by the square of what the kernel lacks. Heads that
    need more rounds are those whose kernels have parts that few queries share; they are finished by
    Newton's method.

    Args:
        masses: Sum over queries of M at each offset, shape (heads, offsets). Each token off the
            grid, such as a class token, is an offset of its own.
        pairs: Number of visible keys of each query at each offset, shape (offsets, queries).
        weights: Sum over keys of M of each query, shape (heads, queries): 1, or 0 if all keys are
            hidden from it.
        start: Kernels to start from, such as those of similar masses.
        rounds: Largest number of rounds.
        tolerance: Decrease of the cross entropy in nat below which no further round follows.
    """
    # Where a mask lowers all logits of a query alike, its softmax is uniform over keys that it does
    # not see.
    weights = weights * (pairs.sum(0) > 0)
    kernel = masses / np.maximum(pairs.sum(1), 1) if start is None else start.copy()
    queries = weights.shape[1]
    entropy = np.full(len(masses), np.inf)
    normalisers = np.ones_like(weights)
    heads = np.arange(len(masses))  # that are not finished
    for _ in range(rounds):
        normalisers[heads] = np.where(weights[heads] > 0, kernel[heads] @ pairs, 1)
        total = (weights[heads] * np.log(normalisers[heads])).sum(1)
        total = (total + _cross_entropy(masses[heads], kernel[heads])) / queries
        # A head with NaN never decreases.
        decreases = entropy[heads] - total > tolerance
        entropy[heads], heads = total, heads[decreases]
        if not len(heads):
            break
        expected = (weights[heads] / normalisers[heads]) @ pairs.T
        kernel[heads] = masses[heads] / np.maximum(expected, _TINY)
    for head in heads:
        kernel[head], entropy[head] = _newton(
            masses[head], pairs, weights[head], np.log(normalisers[head]), tolerance
        )
    return Convolution(kernel, entropy)


def _newton(
    masses: Array, pairs: Array, weights: Array, start: Array, tolerance: float
) -> tuple[Array, Array]:
    """Return the kernel and the cross entropy of a head,
    by Newton's method in the logarithms of the normalisers Z.

    The cross entropy is, for the best kernel given Z, convex in -log Z: the sum over queries of
    weights log Z plus the sum over offsets of masses log(share / masses), where share = sum_i
    weights_i pairs_i / Z_i.
    """

    def shares(logarithms: Array) -> tuple[Array, Array, Any]:
        share: Array = pairs * (weights * np.exp(-logarithms))
        total: Array = np.maximum(share.sum(1), _TINY)
        value = weights @ logarithms - _cross_entropy(masses, total)
        return share, total, value

    logarithms, (share, total, value) = start, shares(start)
    for _ in range(50):
        ratio = share / total[:, None]
        expected = masses @ ratio
        curvature = np.diag(expected) - ratio.T @ (masses[:, None] * ratio)
        # The curvature is 0 along common factors of queries that share no offset, and so is the
        # slope.
        curvature[np.diag_indices_from(curvature)] += 1e-12 + 1e-9 * expected.max()
        step = np.linalg.solve(curvature, expected - weights)
        length, decrease = 2.0, np.nan
        # A step that is too long overflows, and its value is NaN.
        while not decrease >= 0 and length > 1e-6:
            length /= 2
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                trial = shares(logarithms + length * step)
                decrease = value - trial[2]
        if not decrease >= 0:
            break
        logarithms, (share, total, value) = logarithms + length * step, trial
        if decrease < tolerance * len(weights):
            break
    entropy = value + _cross_entropy(masses, masses)
    return masses / total, entropy / len(weights)


def parts_of_selectivity(
    mean: Array,
    entropy: Array,
    mean_entropy: Array,
    keys: Array,
    images: Array,
    population: int,
    convolution: Convolution | None = None,
    prefix: Convolution | None = None,
) -> dict[str, Array]:
    """Split the selectivity of heads into parts that add up.

    From few images and queries, differences between images look like differences between queries,
    and the reverse. The corrections are those of a two-way layout: exact to second order in the
    differences, and without effect on the sum.

    Args:
        mean: Mean M over images of A, shape (heads, windows, queries, keys), with the same number
            of sampled queries from each window.
        entropy: Mean over images of H(A), shape (heads, windows, queries).
        mean_entropy: Mean over images of H(mean over the window's queries of A), shape (heads,
            windows).
        keys: Number K of visible keys of each query, shape (windows, queries).
        images: Number n of images of each head, shape (heads,). From a single one only selectivity
            and offset are known, and the other parts are NaN.
        population: Number Q of queries of a window from which the queries were sampled.
        convolution: Convolution inside the heads; None if no grid is known, so that offset and
            position cannot be told.
        prefix: What :func:`nearest_prefix` finds; None if no grid is known.

    Returns:
        The parts that are known, by the names of the recording, shape (heads,) each, in nat. Prefix
        information is a part of offset information, by Pythagoras' theorem again.
    """
    unknown = np.where(images > 0, 0, np.nan)
    attention_entropy = entropy.mean((1, 2)) + unknown
    of_mean = _entropy(mean).mean((1, 2))
    of_window_mean = _entropy(mean.mean(2)).mean(1)
    log_keys = np.log(np.maximum(keys, 1)).mean()
    correction = images / np.where(images > 1, images - 1, np.nan)
    content = (of_mean - attention_entropy) * correction
    # I(key; image) before its correction.
    salience = of_window_mean - mean_entropy.mean(1)
    matching = content - salience * correction
    sampled = mean.shape[2]
    # A single query has nothing to be compared with.
    matching *= sampled * (population - 1) / (max(sampled - 1, 1) * population)
    matching *= sampled > 1
    parts = {
        "selectivity": log_keys - attention_entropy,
        "key_content_information": content - matching,
        "query_key_content_information": matching,
    }
    if convolution is not None:
        explained = convolution.entropy + unknown
        parts["offset_information"] = log_keys - explained
        parts["position_information"] = explained - of_mean - content / images
    if prefix is not None:
        parts["prefix_information"] = log_keys - prefix.entropy + unknown
    return parts


def _entropy(attention: Array) -> Array:
    return _cross_entropy(attention, attention)


def _cross_entropy(weights: Array, attention: Array) -> Array:
    """Return -sum_j weights_j log attention_j over the last axis, where 0 log 0 = 0."""
    logarithms = np.log(np.maximum(attention, _TINY))
    return -np.einsum("...j,...j->...", weights, logarithms)
