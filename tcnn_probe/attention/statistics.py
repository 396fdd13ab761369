"""Statistics of attention per image and head: plain tensors in, plain tensors out."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.gpsa.statistics import measure
from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.layout import Layout

__all__ = ["attention_received", "attention_statistics", "gated_attention_statistics"]

_SMALL_TABLE = 1 << 20  # distances that are kept rather than computed for every block: 4 MiB
_LEAST = -1e30  # in place of minus infinity, which times an attention of zero would be no number


@torch.no_grad()
def gated_attention_statistics(attention: GatedAttention) -> dict[str, Tensor]:
    """Entropies and mean distance of gated positional attention, exact, without an N x N tensor for large N.

    Means over the queries of each image of what :class:`~tcnn_model.AttentionStatistics` defines: ``entropy``,
    ``content_entropy``, ``positional_entropy`` (in nats) and ``attention_distance`` (in input pixels of the layer).

    Args:
        attention: of a batch of B images.

    Returns:
        for each name, the mean over queries for every image and head, shape (B, heads), in float32 (float64 if the
        attention is in float64).
    """
    measured = measure(attention)
    means = {
        name: getattr(measured, name).mean(-1)
        for name in ("entropy", "content_entropy", "positional_entropy", "attention_distance")
    }
    means["positional_entropy"] = means["positional_entropy"].expand_as(means["entropy"])
    return means


@torch.no_grad()
def attention_statistics(call: AttentionCall) -> dict[str, Tensor]:
    """Entropy and mean distance of softmax attention, exact, a block of queries at a time.

    Args:
        call: attention of B images.

    Returns:
        means over the queries (and windows) of each image, shape (B, heads), in float32 (float64 for float64):
        ``entropy`` over all keys and queries, in nats; where the layout is known ``attention_distance``, of queries
        and keys on the grid, rows renormalised over these, in cells of the finer grid; and where there are class or
        register tokens ``prefix_attention``, what the queries on the grid spend on them.
    """
    layout, prefix = call.layout, call.layout.prefix
    on_grid = None if layout.queries is None else slice(layout.queries.prefix, None)
    grid = _Rows(call)
    statistics = {"entropy": grid.lse - grid.expected}
    if prefix:
        statistics["entropy"], spent = grid.with_others()
        if on_grid is not None:
            statistics["prefix_attention"] = spent[..., on_grid]
    statistics["entropy"] = grid.unless_empty(statistics["entropy"])
    if grid.distance is not None and on_grid is not None:
        statistics["attention_distance"] = grid.distance[..., on_grid]
    return {name: call.by_image(of_queries.mean(-1)).mean(1) for name, of_queries in statistics.items()}


class _Rows:
    """Softmax over the keys on the grid, one number for each query: shapes (rows, heads, N_query).

    With the log-sum-exp of a row, log A = s - lse, so its entropy is lse - sum_j A_j s_j. The class and register tokens
    are added to the keys on the grid, not taken away from a whole row: a mean over the grid stays exact where nearly
    all attention goes elsewhere. What is small is done for all rows at once; what is large, in two buffers.

    Args:
        call: the attention.
    """

    def __init__(self, call: AttentionCall) -> None:
        shape, logits, layout = call.logits.shape[:3], call.logits, call.layout
        prefix, located = layout.prefix, layout.queries is not None
        small = call.queries * call.keys <= _SMALL_TABLE
        table = _table(layout, logits.dtype, logits.device) if located and small else None
        self._masked = logits.masked
        self.top, largest, self.expected = (logits.new_empty(*shape) for _ in range(3))
        self.distance = logits.new_empty(*shape) if located else None
        self._others = logits.new_empty(*shape, prefix)
        keys = slice(prefix, call.keys)
        size = max(call.block, call.heads * call.keys)
        buffers = [logits.new_empty(size) for _ in range(2)]  # making them anew would cost more than the arithmetic
        for rows, queries in call.blocks():
            block = rows.stop - rows.start, call.heads, queries.stop - queries.start, keys.stop - keys.start
            s, share = (buffer[: math.prod(block)].view(block) for buffer in buffers)
            at = rows, slice(None), queries
            logits(rows, queries, keys, out=s)
            if prefix:
                self._others[at] = logits(rows, queries, slice(0, prefix))
            top = torch.amax(s, -1, keepdim=True)
            torch.softmax(s, -1, out=share)
            largest[at] = share.amax(-1)
            self.top[at] = top[..., 0]
            if self._masked:  # rows that may see none of these keys, and keys that a row may not see
                empty = top == -torch.inf
                share.masked_fill_(empty, 0)
                s.sub_(top.masked_fill_(empty, 0)).clamp_(min=_LEAST)
            else:
                s.sub_(top)
            self.expected[at] = s.mul_(share).sum(-1)
            if self.distance is not None:
                far = layout.distances(queries, logits.dtype, logits.device) if table is None else table[queries]
                self.distance[at] = torch.mul(share, far, out=s).sum(-1)
        self._empty = self.top == -torch.inf if self._masked else None
        if self._empty is not None:
            self.top.masked_fill_(self._empty, 0)
            largest.masked_fill_(self._empty, torch.inf)
        self.lse = -largest.log()  # less the largest logit, as all that follows: precise however large the logits

    def with_others(self) -> tuple[Tensor, Tensor]:
        """Of the whole rows: their entropy, and the share of the class and register tokens."""
        top = torch.maximum(self.top, self._others.amax(-1))  # a mask may hide keys with the least of all numbers
        lower = (self.top - top).clamp_(min=_LEAST)
        logits, on_grid = self._others - top[..., None], self.lse + lower
        lse = torch.logsumexp(torch.cat([on_grid[..., None], logits], -1), -1)
        share = (logits - lse[..., None]).exp()
        finite = logits.clamp(min=_LEAST) if self._masked else logits
        expected = (self.expected + lower) * (on_grid - lse).exp() + (finite * share).sum(-1)
        return lse - expected, self.unless_empty(share.sum(-1))

    def unless_empty(self, of_rows: Tensor) -> Tensor:
        """0 for rows that may see no key at all, as torch's own attention has it."""
        return of_rows if self._empty is None else of_rows.masked_fill(self._empty & ~of_rows.isfinite(), 0)


@torch.no_grad()
def attention_received(call: AttentionCall, images: Sequence[int]) -> Tensor:
    """Mean over the queries of A_ij: how much each key is looked at, shape (images, windows, heads, N_key)."""
    step = max(1, call.block // (call.windows * call.heads * call.keys))
    received = []
    for image in images:
        blocks = [slice(start, start + step) for start in range(0, call.queries, step)]
        total = torch.stack([call.weights(block, image)[0].sum(-2) for block in blocks]).sum(0)
        received.append(total / call.queries)
    return torch.stack(received)


@lru_cache(maxsize=16)
def _table(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All distances of a small grid, shape (N_query, keys on the grid)."""
    return layout.distances(slice(None), dtype, device)
