"""Measures of a head's mean attention over images:
its dependence on content, and its similarity to a convolution.

The functions take plain arrays and return one number per head, in float64.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["information", "offsets_of_pairs", "translation_equivariance"]


def information(mean: np.ndarray, entropy: np.ndarray, images: int | np.ndarray) -> np.ndarray:
    """Measure how strongly attention depends on the image: content information, in nat.

    I = n / (n - 1) times the mean over queries i of [H(mean over images b of A_b(i, .)) - mean over
    b of H(A_b(i, .))]: the mutual information of image and key given the query, or the
    Jensen-Shannon divergence of the images' attentions. It is 0 if attention does not depend on the
    image.

    Without the factor, the estimate from n images is too low on average, because the mean of more
    images is more even: to second order in the differences between images, it is too low by 1/2n
    sum_j Var_b(A_b(i, j)) / A(i, j), while the true value is 1/2 of that sum, so the factor removes
    this bias. If attention depends strongly on the image, the estimate is still too low: from n
    images it is at most n / (n - 1) log min(n, keys).

    Args:
        mean: Mean over images of A, shape (heads, queries, keys). Keys that receive the same
            attention in all images, such as padding, may be left out of mean and entropy.
        entropy: Mean over images of H(A_b(i, .)), over the same keys, shape (heads, queries), or
            (heads,) if it is a mean over queries, too.
        images: Number n of images, or of those that count for each query, shape (heads, queries).

    Returns:
        Content information, shape (heads,), over the queries with two images or more; NaN if there
        are none.
    """
    logarithms = np.maximum(mean, np.finfo(mean.dtype).tiny)  # 0 log 0 is 0
    np.log(logarithms, out=logarithms)
    entropy = entropy if entropy.ndim > 1 else entropy[:, None]
    divergence = -np.einsum("hij,hij->hi", mean, logarithms) - entropy
    images = np.broadcast_to(images, divergence.shape)
    compared = images > 1
    unbiased = divergence * images / np.where(compared, images - 1, 1)
    queries = np.where(compared.any(1), compared.sum(1), np.nan)
    return np.where(compared, unbiased, 0).sum(1) / queries


def translation_equivariance(mean: ArrayLike, queries: ArrayLike, keys: ArrayLike) -> np.ndarray:
    """Compute the share of a static pattern
    that depends only on the offset from query to key, as in a convolution.

    This is the share of the variance that the means over pairs of equal offset explain, corrected
    for chance: 1 - [W / (n - g)] / [T / (n - 1)], for n pairs of query and key with g different
    offsets, where W is the sum of squares around the mean of each offset, and T the sum of squares
    around the overall mean. It is 1 for a Toeplitz pattern and on average 0 for independent random
    numbers, for which the uncorrected share is (g - 1) / (n - 1).

    Args:
        mean: Mean over images of A, shape (heads, queries, keys); numbers of any dtype.
        queries, keys: Row and column of each query and key, shape (queries, 2) and (keys, 2); NaN
            for tokens off the grid.

    Returns:
        Equivariances, shape (heads,); 1 for a constant pattern, NaN if no two pairs have the same
        offset.

    Raises:
        ValueError: The number of positions differs from that of queries or keys.
    """
    mean = np.asarray(mean)
    queries, keys = np.asarray(queries, dtype=float), np.asarray(keys, dtype=float)
    if mean.shape[1:] != (len(queries), len(keys)):
        raise ValueError(
            f"expected attention (heads, {len(queries)}, {len(keys)}), "
            f"a row for each query and a column for each key, got {mean.shape}"
        )
    index, offsets = offsets_of_pairs(queries, keys)
    pairs = np.flatnonzero(index < len(offsets))
    group = index.ravel()[pairs]
    count = np.bincount(group, minlength=len(offsets))
    degrees_of_freedom = group.size - count.size
    if degrees_of_freedom < 1:
        return np.full(len(mean), np.nan)
    shares = np.ones(len(mean))
    for head, pattern in enumerate(mean.reshape(len(mean), -1)):
        values = pattern[pairs].astype(np.float64, copy=False)
        # Values are centred first: with a mean far from 0, differences of large sums would lose
        # precision.
        values -= values.mean()
        total = values @ values
        if total > 0:
            # Sum over offsets of n_g times the squared mean of the group.
            explained = (np.bincount(group, values) ** 2 / count).sum()
            # By rounding, the explained sum can exceed the total.
            residual = max(total - explained, 0)
            residual_variance = residual / degrees_of_freedom
            shares[head] = 1 - residual_variance / (total / (group.size - 1))
        elif not np.isfinite(total):
            shares[head] = np.nan
    return shares


def offsets_of_pairs(queries: ArrayLike, keys: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Group pairs of query and key by the offset between them.

    Args:
        queries, keys: Row and column of each query and key, shape (queries, 2) and (keys, 2); NaN
            for keys off the grid.

    Returns:
        The index of the offset of each pair, shape (queries, keys), and the n offsets, rows and
        columns, shape (n, 2). A pair off the grid has the index n + key: a class token is an offset
        of its own.
    """
    queries, keys = (np.asarray(places, dtype=float) for places in (queries, keys))
    return _offsets_of_pairs(queries.tobytes(), keys.tobytes())


@lru_cache(maxsize=16)  # most layers of a model have the same grid
def _offsets_of_pairs(queries: bytes, keys: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Group pairs; positions are the bytes of float64 arrays, which can be keys of the cache."""
    rows = np.frombuffer(queries).view(complex)  # a position as a single number, y + ix
    columns = np.frombuffer(keys).view(complex)
    offsets = columns - rows[:, None]
    on_grid = np.isfinite(offsets)
    values, group = np.unique(offsets[on_grid], return_inverse=True)
    index = np.broadcast_to(len(values) + np.arange(len(columns)), offsets.shape).copy()
    index[on_grid] = group
    index.flags.writeable = False  # all heads with this grid share the array
    return index, values.view(float).reshape(-1, 2)
