"""Sums over images of what a head's attention is: from them its static pattern and its content information."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.gpsa.precision import at_least_float32, widest_dtype
from tcnn_probe.attention.call import AttentionCall, Block
from tcnn_probe.attention.layout import Tokens

__all__ = ["QUERIES", "Pattern", "PatternSum", "gated_patterns", "pattern_of_query", "sampled"]

QUERIES = 64
"""Queries of a layer that are looked at; all of them if there are no more."""


@dataclass(frozen=True)
class Pattern:
    """Sums over images of the attention A of some queries: all that content information needs of them.

    Args:
        attention: sum of A, shape (heads, queries, keys); a tensor in float64 (float32 on MPS), or an array.
        entropy: sum over images of the mean over queries of -sum_j A_ij log A_ij, shape (heads,).
        images: how many.
        queries, keys: row and column of each on the layer's grid, shape (n, 2), NaN of class and register tokens; None
            where no grid is known.
        size: whatever has to be the same for patterns to be added: the size of the images.
    """

    attention: Any
    entropy: Any
    images: int
    queries: np.ndarray | None = None
    keys: np.ndarray | None = None
    size: object = None

    def plus(self, other: "Pattern") -> "Pattern | None":
        """Sums over the images of both; None if these have different sizes."""
        if self.size != other.size or self.attention.shape != other.attention.shape:
            return None
        total, entropy = self.attention + other.attention, self.entropy + other.entropy
        return replace(self, attention=total, entropy=entropy, images=self.images + other.images)


@lru_cache(maxsize=64)
def sampled(windows: int, queries: int, most: int) -> tuple[Tensor, Tensor]:
    """Choose at most so many of the queries of an image, evenly: always the same ones.

    Windows are taken at equal distances, and in each of them others of its queries. Every s-th query is taken, round
    and round, for s near 0.618 N that has no divisor in common with N: so rows, and columns, all have their share.

    Args:
        windows, queries: how many there are, and how many queries each window has.
        most: how many to choose.

    Returns:
        indices of windows, shape (w,), and of queries in each of these, shape (w, n).
    """
    chosen = min(windows, most)
    each = min(queries, most // chosen)
    step = max(1, round(queries * (math.sqrt(5) - 1) / 2))
    step = next(one for one in range(step, step + queries + 1) if math.gcd(one, queries) == 1)
    at = (torch.arange(1, chosen * each + 1) * step % queries).view(chosen, each)
    return torch.arange(chosen) * windows // chosen, at.sort(-1).values


class PatternSum:
    """Adds up, block by block, the attention of some 64 queries; each position in each window is a query.

    Args:
        call: whose first images are added up, all that count.
    """

    def __init__(self, call: AttentionCall) -> None:
        self._call, self._layout, device = call, call.layout, call.logits.device
        self._images = min(call.images, call.images if call.limit is None else call.limit)
        self._given = call.windows, call.queries, QUERIES
        self._windows, self._queries = sampled(*self._given)
        self._sum = torch.zeros(call.heads, self._queries.numel(), call.keys, dtype=widest_dtype(device), device=device)

    def add(self, block: Block, weights: Tensor, factor: Tensor) -> None:
        """Add a block.

        Args:
            block: of the call.
            weights: attention but for a factor, 0 to class and register tokens, shape (rows, heads, queries, keys).
            factor: of each query, shape (rows, heads, queries).
        """
        images = min(block.images.stop, self._images) - block.images.start
        where = [(part.start, part.stop) for part in (block.windows, block.queries)]
        chosen, index = _rows(self._given, max(images, 0), len(self._sum), *where, weights.device)
        if not index.numel():
            return
        some = weights.flatten(0, 2).index_select(0, index)
        some.mul_(factor.flatten().index_select(0, index)[:, None])
        by_image = some.view(images, len(self._sum), -1, some.shape[1])
        self._sum[:, chosen] += by_image[0] if images == 1 else by_image.sum(0)

    def pattern(self, entropy: Tensor, prefix: Tensor | None) -> Pattern:
        """The sums.

        Args:
            entropy: of all queries, shape (rows, heads, N_query).
            prefix: their attention to class and register tokens, shape (rows, heads, N_query, prefix).
        """
        if prefix is not None:
            self._sum[..., : prefix.shape[-1]] = self._of(prefix)
        total = self._of(entropy[..., None]).sum((1, 2)) / self._queries.numel()
        found, queries, keys = Pattern(self._sum, total, self._images), self._layout.queries, self._layout.keys
        if queries is None or keys is None:
            return found
        return replace(found, queries=_places(queries)[self._queries.flatten().numpy()], keys=_places(keys))

    def _of(self, values: Tensor) -> Tensor:
        """(rows, heads, N_query, n), of the chosen queries and summed over images: (heads, queries, n)."""
        windows, queries = (one.to(values.device) for one in (self._windows[:, None], self._queries))
        some = self._call.by_image(values)[: self._images, windows, :, queries]  # (w, n, images, heads, n)
        return some.sum(2, dtype=self._sum.dtype).flatten(0, 1).transpose(0, 1)


@lru_cache(maxsize=64)
def _rows(
    given: tuple[int, int, int],
    images: int,
    heads: int,
    windows: tuple[int, int],
    queries: tuple[int, int],
    device: torch.device,
) -> tuple[slice, Tensor]:
    """Which of the chosen queries a block has, and their rows in its attention, image by image, head by head.

    Args:
        given: what :func:`sampled` is given.
        images, heads: how many the block has.
        windows, queries: the first one of the block, and the first one after it.
        device: of the rows.
    """
    window, query = sampled(*given)
    window, query = window[:, None] - windows[0], query - queries[0]
    each, many = windows[1] - windows[0], queries[1] - queries[0]
    there = (window >= 0) & (window < each) & (query >= 0) & (query < many)
    chosen = there.flatten().nonzero()[:, 0].tolist()  # neighbours
    row = torch.arange(images)[:, None] * each + window.expand_as(query)[there]
    index = (row[:, None] * heads + torch.arange(heads)[:, None]) * many + query[there]
    return slice(chosen[0], chosen[-1] + 1) if chosen else slice(0), index.flatten().to(device)


def pattern_of_query(call: AttentionCall, attention: Tensor, entropy: Tensor) -> Pattern:
    """Sums over the images that count of one query of each window, such as a class token.

    Args:
        call: of which it is a query.
        attention: A of the query, shape (B, windows, heads, N_key).
        entropy: of the same, shape (B, windows, heads).
    """
    some, wide = attention[: call.limit], widest_dtype(attention.device)
    return Pattern(some.sum(0, dtype=wide).transpose(0, 1), entropy[: call.limit].mean(1).sum(0, dtype=wide), len(some))


@torch.no_grad()
def gated_patterns(attention: GatedAttention, limit: int | None) -> tuple[Pattern, Pattern]:
    """Sums over the first so many images, or all, of gated attention A and of its content part C, at some 64 queries.

    Over the real pixels: what A has on the padding is the same for all images, and counts for nothing.
    """
    query, images = attention.query, len(attention.query[:limit])
    at = sampled(1, query.shape[2], QUERIES)[1][0]
    axes = attention.y, attention.x
    places = [np.indices(grid).reshape(2, -1).T for grid in zip(*((a.queries, a.length) for a in axes), strict=True)]
    queries = places[0][at.numpy()] * [a.stride for a in axes] + [a.first_query for a in axes]
    at = at.to(query.device)
    positional = attention.positional_on_pixels(at).to(at_least_float32(query.dtype))
    total = [_Total(positional.shape, query) for _ in range(2)]
    step = max(1, AttentionCall.block_on(query.device) // positional.numel())
    for start in range(0, images, step):
        some = slice(start, min(start + step, images))
        content = replace(attention, query=query[some], key=attention.key[some]).content(at)
        scratch = torch.empty_like(content)
        total[1].add(content, scratch)
        content.lerp_(positional, attention.gate.to(content)[:, None, None])
        total[0].add(content, scratch)
    whole, part = (one.pattern(images) for one in total)
    return replace(whole, queries=queries, keys=places[1]), part


class _Total:
    """Adds up attention, (B, heads, queries, keys) at a time, in float64."""

    def __init__(self, each: Sequence[int], like: Tensor) -> None:
        self._attention = torch.zeros(each, dtype=widest_dtype(like.device), device=like.device)
        self._entropy = self._attention.new_zeros(len(self._attention))

    def add(self, weights: Tensor, scratch: Tensor) -> None:
        """Add the attention of some images; ``scratch`` has as many elements."""
        self._attention += weights[0] if len(weights) == 1 else weights.sum(0)
        logarithms = scratch.view(weights.shape).copy_(weights).clamp_(min=torch.finfo(weights.dtype).tiny).log_()
        self._entropy -= logarithms.mul_(weights).sum((0, 2, 3))

    def pattern(self, images: int) -> Pattern:
        return Pattern(self._attention, self._entropy / self._attention.shape[1], images)


@lru_cache(maxsize=64)
def _places(tokens: Tokens) -> np.ndarray:
    """Row and column of each token, (count, 2); NaN for those before the grid."""
    places = torch.stack(tokens.positions(torch.float64, torch.device("cpu")), 1).numpy()
    places[: tokens.prefix] = np.nan
    places.flags.writeable = False  # all calls share it
    return places
