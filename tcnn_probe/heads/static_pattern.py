"""What a head's mean attention over images says: how much of the attention is content, and whether it is a convolution.

Plain arrays in, numbers of each head out, in float64.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["information", "translation_equivariance"]


def information(mean: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    """Content information: how much of where a head looks the image decides, in nat.

    I = mean over queries i of [H(mean over images b of A_b(i, .)) - mean over b of H(A_b(i, .))], the mutual
    information of image and key given the query, or the Jensen-Shannon divergence of the images' attentions. It is 0
    where attention does not depend on the image, and at most log min(images, keys).

    The estimate from n images is too low on average, because the mean of more images is more even. For large n it lacks
    about 1/2n sum_j Var_b(A_b(i, j)) / A(i, j). So compare numbers from as many images.

    Args:
        mean: over images of A, shape (heads, queries, keys). Keys whose attention no image changes, such as padding,
            may be left out of both.
        entropy: mean over images and queries of H(A_b(i, .)), over the same keys, shape (heads,).

    Returns:
        shape (heads,).
    """
    logarithms = np.maximum(mean, np.finfo(mean.dtype).tiny)
    np.log(logarithms, out=logarithms)
    return -np.einsum("hij,hij->h", mean, logarithms) / mean.shape[1] - entropy


def translation_equivariance(mean: ArrayLike, queries: ArrayLike, keys: ArrayLike) -> np.ndarray:
    """Share of a static pattern that depends on the offset from query to key alone, as in a convolution.

    The variance that the means over pairs of equal offset explain, corrected for how much they explain by chance:
    1 - [W / (n - g)] / [T / (n - 1)], for n pairs of query and key with g different offsets, W being the sum of squares
    around the mean of each offset, and T that around the mean of all. 1 for a Toeplitz pattern, on average 0 for
    independent random numbers, of which the offsets explain (g - 1) / (n - 1) without the correction.

    Args:
        mean: over images of A, shape (heads, queries, keys); numbers of any dtype.
        queries, keys: row and column of each, shape (queries, 2) and (keys, 2), NaN for one that lies on no grid.

    Returns:
        shape (heads,); 1 for a pattern that is the same everywhere, NaN where no two pairs have an offset in common.

    Raises:
        ValueError: not one place for each query and key.
    """
    mean = np.asarray(mean)
    queries, keys = np.asarray(queries, dtype=float), np.asarray(keys, dtype=float)
    if mean.shape[1:] != (len(queries), len(keys)):
        raise ValueError(
            f"expected attention (heads, {len(queries)}, {len(keys)}), of so many queries and keys, got {mean.shape}"
        )
    pairs, group, count = _offsets_of_pairs(queries.tobytes(), keys.tobytes())
    free = group.size - count.size
    if free < 1:
        return np.full(len(mean), np.nan)
    found = np.ones(len(mean))
    for head, row in enumerate(mean.reshape(len(mean), -1)):
        values = row[pairs].astype(np.float64, copy=False)
        values -= values.mean()
        total = values @ values
        if total > 0:
            among = (np.bincount(group, values) ** 2 / count).sum()
            found[head] = 1 - (max(total - among, 0) / free) / (total / (group.size - 1))
        elif not np.isfinite(total):
            found[head] = np.nan
    return found


@lru_cache(maxsize=16)  # most layers of a model have the same grid
def _offsets_of_pairs(queries: bytes, keys: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of positions on the grid, given in float64: their indices, the number of each one's offset, and counts."""
    rows, columns = (np.frombuffer(one).view(complex) for one in (queries, keys))  # a place is one number: y + ix
    offsets = (columns - rows[:, None]).ravel()
    pairs = np.flatnonzero(np.isfinite(offsets))
    _, group, count = np.unique(offsets[pairs], return_inverse=True, return_counts=True)
    return pairs, group, count
