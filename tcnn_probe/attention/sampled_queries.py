"""The queries of an image whose attention is summed over images:
an even sample, always the same.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["QUERIES", "rows_of_block", "sample_queries", "sampled_index"]

# Largest number of queries whose attention is summed. The sums take QUERIES * N_key numbers per
# head, in float64 100 kB for 196 keys.
QUERIES = 64

# Smallest number of queries that are sampled from a window, if it has as many: their mean is
# compared between images.
_LEAST_QUERIES = 8

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@lru_cache(maxsize=64)
def sample_queries(windows: int, queries: int, limit: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Sample queries of an image evenly and deterministically.

    Of each sampled window at least eight queries are sampled, or all if there are fewer, because
    the mean over the queries of a window is measured, too. Different queries are sampled in each
    window. The sampled queries are the multiples of s modulo N, for an s near 0.618 N that is
    coprime to N (a golden-ratio sequence), so that all rows and columns are represented; and so are
    the sampled windows.

    Args:
        windows: Number of windows.
        queries: Number of queries of each window.
        limit: Largest number of queries to sample.
        first: Index of the first query to sample; class and register tokens come before it.

    Returns:
        Indices of windows, shape (w,), and of queries in each of these, shape (w, n).
    """
    count = queries - first
    sampled_windows = min(windows, max(1, limit // min(count, _LEAST_QUERIES)))
    per_window = min(count, limit // sampled_windows)
    index = _golden_sequence(count, sampled_windows * per_window)
    index = index.view(sampled_windows, per_window).sort(-1).values + first
    return _golden_sequence(windows, sampled_windows).sort().values, index


def _golden_sequence(size: int, count: int) -> Tensor:
    """Return the first numbers of a sequence that visits 0,
    ..., size - 1 evenly, again and again: shape (count,).
    """
    step = max(1, round(size * _GOLDEN_RATIO))
    while math.gcd(step, size) != 1:
        step += 1
    # As the step and the size have no common divisor, no number comes twice before all have come.
    return torch.arange(1, count + 1) * step % size


@lru_cache(maxsize=64)
def sampled_index(sampling: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Return the indices of the sampled queries among those of all windows."""
    windows, queries = sample_queries(*sampling)
    return (windows[:, None] * sampling[1] + queries).flatten().to(device)


@lru_cache(maxsize=64)
def rows_of_block(
    sampling: tuple[int, int, int, int],
    images: int,
    heads: int,
    windows: tuple[int, int],
    queries: tuple[int, int],
    device: torch.device,
) -> tuple[slice, Tensor]:
    """Return the sampled queries in a block,
    and their rows in its attention, by image, query and head.

    Args:
        sampling: Arguments of :func:`sample_queries`.
        images, heads: Numbers of images and heads of the block.
        windows, queries: Start and stop of the block's windows and of its queries.
        device: Device of the rows.
    """
    window, query = sample_queries(*sampling)
    window, query = window[:, None] - windows[0], query - queries[0]
    block_windows, block_queries = windows[1] - windows[0], queries[1] - queries[0]
    in_block = (window >= 0) & (window < block_windows) & (query >= 0) & (query < block_queries)
    # The sampled queries of a block are contiguous, as blocks cut windows and queries in order.
    sampled = in_block.flatten().nonzero()[:, 0].tolist()
    row = torch.arange(images)[:, None] * block_windows + window.expand_as(query)[in_block]
    index = (row[..., None] * heads + torch.arange(heads)) * block_queries + query[in_block][
        :, None
    ]
    return slice(sampled[0], sampled[-1] + 1) if sampled else slice(0), index.flatten().to(device)
