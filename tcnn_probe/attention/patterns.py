"""Sums over images of what a head's attention is: from them its static pattern and its content information."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.attention.call import AttentionCall, Logits
from tcnn_probe.attention.layout import Tokens

__all__ = ["QUERIES", "Pattern", "gated_patterns", "pattern", "pattern_of_queries", "sampled"]

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


def sampled(windows: int, queries: int) -> tuple[Tensor, Tensor]:
    """Choose at most 64 of the queries of an image, evenly: always the same ones.

    Windows are taken at equal distances, and in each of them others of its queries. Every s-th query is taken, round
    and round, for s near 0.618 N that has no divisor in common with N: so rows, and columns, all have their share.

    Args:
        windows, queries: how many there are, and how many queries each window has.

    Returns:
        indices of windows, shape (w,), and of queries in each of these, shape (w, n).
    """
    chosen = min(windows, QUERIES)
    each = min(queries, QUERIES // chosen)
    step = max(1, round(queries * (math.sqrt(5) - 1) / 2))
    step = next(one for one in range(step, step + queries + 1) if math.gcd(one, queries) == 1)
    at = (torch.arange(1, chosen * each + 1) * step % queries).view(chosen, each)
    return torch.arange(chosen) * windows // chosen, at.sort(-1).values


@torch.no_grad()
def pattern(call: AttentionCall, images: int) -> Pattern:
    """Sum over the first so many images of A at some 64 queries; each position in each window is a query."""
    windows, at = sampled(call.windows, call.queries)
    found = _sum(call, windows, at, images)
    if call.layout.queries is None or call.layout.keys is None:
        return found
    return replace(found, queries=_places(call.layout.queries)[at.flatten().numpy()], keys=_places(call.layout.keys))


@torch.no_grad()
def pattern_of_queries(call: AttentionCall, queries: slice, images: int) -> Pattern:
    """The same of given queries, such as class tokens."""
    at = torch.arange(call.queries)[queries].expand(call.windows, -1)
    return _sum(call, torch.arange(call.windows), at, images)


@torch.no_grad()
def gated_patterns(attention: GatedAttention, images: int) -> tuple[Pattern, Pattern]:
    """Sums over the first so many images of gated attention A, and of its content part C, at some 64 queries.

    Over the real pixels: what A has on the padding is the same for all images, and counts for nothing.
    """
    query = attention.query
    at = sampled(1, query.shape[2])[1][0]
    axes = attention.y, attention.x
    places = [np.indices(grid).reshape(2, -1).T for grid in zip(*((a.queries, a.length) for a in axes), strict=True)]
    queries = places[0][at.numpy()] * [a.stride for a in axes] + [a.first_query for a in axes]
    at = at.to(query.device)
    positional = attention.positional_on_pixels(at).to(at_least_float32(query.dtype))
    total = [_Total((1, *positional.shape), query) for _ in range(2)]
    step = max(1, AttentionCall.block_on(query.device) // positional.numel())
    for start in range(0, images, step):
        some = slice(start, min(start + step, images))
        content = replace(attention, query=query[some], key=attention.key[some]).content(at)
        scratch = torch.empty_like(content)
        total[1].add(content[:, None], scratch)
        content.lerp_(positional, attention.gate.to(content)[:, None, None])
        total[0].add(content[:, None], scratch)
    whole, part = (one.pattern(images) for one in total)
    return replace(whole, queries=queries, keys=places[1]), part


class _Total:
    """Adds up attention, (B, windows, heads, queries, keys) at a time, in float64."""

    def __init__(self, each: tuple[int, ...], like: Tensor) -> None:
        wide = torch.float32 if like.device.type == "mps" else torch.float64
        windows, heads, queries, keys = each
        self._queries = windows * queries
        self._attention = torch.zeros(heads, self._queries, keys, dtype=wide, device=like.device)
        self._by_window = self._attention.unflatten(1, (windows, queries)).transpose(0, 1)
        self._entropy = self._attention.new_zeros(heads)

    def add(self, weights: Tensor, scratch: Tensor) -> None:
        """Of some images; ``scratch`` has as many elements."""
        self._by_window += weights[0] if len(weights) == 1 else weights.sum(0)
        logarithms = scratch.view(weights.shape).copy_(weights).clamp_(min=torch.finfo(weights.dtype).tiny).log_()
        self._entropy -= logarithms.mul_(weights).sum((0, 1, 3, 4))

    def pattern(self, images: int) -> Pattern:
        return Pattern(self._attention, self._entropy / self._queries, images)


def _sum(call: AttentionCall, windows: Tensor, at: Tensor, images: int) -> Pattern:
    """Sum over images, of some windows, (w,), and of some queries in each, (w, n)."""
    logits: Logits = call.logits.sampled(call.windows, windows, at)
    each = (len(windows), *logits.shape[1:])
    total = _Total(each, logits.source)
    step = min(images, max(1, call.block // math.prod(each)))
    buffers = [logits.new_empty(step * each[0], *each[1:]) for _ in range(2)]
    for start in range(0, images, step):
        rows = slice(start * each[0], min(start + step, images) * each[0])
        s, weights = (buffer[: rows.stop - rows.start] for buffer in buffers)
        logits.softmax(logits(rows, slice(None), out=s), out=weights)
        total.add(weights.unflatten(0, (-1, each[0])), scratch=s)
    return total.pattern(images)


def _places(tokens: Tokens) -> np.ndarray:
    """Row and column of each token, (count, 2); NaN for those before the grid."""
    places = torch.stack(tokens.positions(torch.float64, torch.device("cpu")), 1).numpy()
    places[: tokens.prefix] = np.nan
    return places
