"""Statistics of attention for each image and head, and what they would be if attention were uniform."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tcnn_model import Axis, GatedAttention
from tcnn_model.gpsa.precision import widest_dtype
from tcnn_model.gpsa.statistics import AttentionStatistics
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.patterns import Pattern, PatternSum, gated_patterns

if TYPE_CHECKING:
    from tcnn_probe.attention.attention import SoftmaxAttention

__all__ = [
    "ContentRows",
    "SoftmaxMeasurements",
    "gated_means",
    "gated_statistics",
    "measure_softmax",
    "softmax_statistics",
    "uniform_distance",
    "uniform_gated_attention",
    "uniform_softmax_attention",
]

# Up to so many distances (4 MiB in float32) are kept from forward to forward; more are computed block by block.
_SMALL_TABLE = 1 << 20
_LN2 = math.log(2)
# In place of minus infinity, which times an attention of zero would be NaN.
_LOWEST = -1e30


@dataclass(frozen=True)
class ContentRows:
    """Attention that images decide, the content part of gated layers, query by query and key by key.

    Args:
        entropy: -sum_j A_ij log A_ij of each query, shape (B, windows, heads, N_query).
        received: Mean over queries of A_ij, shape (B, windows, heads, N_key).
        similarity: Mean cosine of a head's rows A_i with those of the layer's other heads, of a sample of the queries,
            shape (B, heads); zeros for images beyond :attr:`~tcnn_probe.attention.attention.Attention.limit`.
    """

    entropy: Tensor
    received: Tensor
    similarity: Tensor


def softmax_statistics(
    attention: "SoftmaxAttention", measurements: "SoftmaxMeasurements"
) -> dict[str, Any]:
    """Return what recordings keep of a softmax attention: its means, the uniform scale, and its pattern."""
    return {
        **measurements.means,
        **uniform_softmax_attention(attention),
        "content_information": measurements.pattern,
    }


def gated_statistics(
    attention: GatedAttention,
    measured: AttentionStatistics,
    limit: int | None,
    block: int,
) -> dict[str, Any]:
    """Return what recordings keep of a gated attention: its means, the uniform scale, and the patterns of A and C.

    Args:
        attention: Attention of a batch of B images.
        measured: Its statistics.
        limit: Number of images, the first ones, that count in the patterns; None for all.
        block: Number of weights to form at a time.
    """
    pattern, content = gated_patterns(attention, limit, block)
    patterns = {"content_information": pattern, "content_part_information": content}
    return {**gated_means(measured), **uniform_gated_attention(attention), **patterns}


@torch.no_grad()
def gated_means(measured: AttentionStatistics) -> dict[str, Tensor]:
    """Return entropies, mean distance and largest logit of gated positional attention.

    These are means over the queries of what :class:`~tcnn_model.AttentionStatistics` defines, of logits the largest.

    Args:
        measured: Statistics of the attention of a batch of B images.

    Returns:
        ``entropy``, ``content_entropy`` and ``positional_entropy`` in nats, ``attention_distance`` in input pixels
        of the layer and ``max_logit``, shape (B, heads), in float32 (float64 if the attention is in float64).
    """
    names = ("entropy", "content_entropy", "positional_entropy", "attention_distance")
    means = {name: getattr(measured, name).mean(-1) for name in names}
    means["positional_entropy"] = means["positional_entropy"].expand_as(
        means["entropy"]
    )
    if measured.largest_logit is not None:
        means["max_logit"] = measured.largest_logit.amax(-1)
    return means


@dataclass(frozen=True)
class SoftmaxMeasurements:
    """Measurements of a softmax attention, formed in one pass over its logits.

    Args:
        means: ``entropy`` of all queries over all keys, in nats; where the grids are known ``attention_distance``, from
            queries to keys on the grid, with rows renormalised over these, in cells of the finer grid; where there are
            class or register tokens ``prefix_attention``, the attention that queries on the grid pay to them: means
            over the queries and windows of each image, shape (B, heads), in float32 (float64 for float64). And
            ``max_logit``, the largest logit of all queries and keys.
        pattern: Sum over images of the attention of some queries.
        rows: Rows of the attention; None unless :attr:`~tcnn_probe.attention.attention.Attention.detailed`.
    """

    means: dict[str, Tensor]
    pattern: Pattern
    rows: ContentRows | None


@torch.no_grad()
def measure_softmax(attention: "SoftmaxAttention") -> SoftmaxMeasurements:
    """Measure softmax attention, exact, a block of queries at a time.

    The class and register tokens are added to the keys on the grid, not taken away from whole rows: so the distance
    stays exact where nearly all attention goes to them.

    Args:
        attention: Attention of B images.
    """
    layout, patterns = attention.layout, PatternSum(attention)
    rows, prefix = _rows_over_grid(attention, patterns)
    entropy, to_prefix = (
        (rows.entropy, None) if prefix is None else _with_prefix(rows, prefix)
    )
    by_query = {"entropy": rows.zero_if_empty(entropy)}
    pattern = patterns.pattern(by_query["entropy"], to_prefix)
    largest = rows.top if prefix is None else torch.maximum(rows.top, prefix.amax(-1))
    largest = attention.by_image(largest.amax(-1)).amax(1)
    if rows.empty is not None:  # masked logits can all be hidden
        largest = largest.masked_fill(largest <= _LOWEST, -torch.inf)
    if layout.queries is not None:
        on_grid = slice(layout.queries.prefix, None)
        if to_prefix is not None:
            by_query["prefix_attention"] = to_prefix.sum(-1)[..., on_grid]
        if rows.distance is not None:
            by_query["attention_distance"] = rows.distance[..., on_grid]
    means = {
        name: attention.by_image(values.mean(-1)).mean(1)
        for name, values in by_query.items()
    }
    means["max_logit"] = largest
    if rows.received is None:
        return SoftmaxMeasurements(means, pattern, None)
    if to_prefix is not None:
        rows.received[..., : to_prefix.shape[-1]] = to_prefix.sum(-2)
    content = ContentRows(
        entropy=attention.by_image(by_query["entropy"]),
        received=attention.by_image(rows.received / attention.queries),
        similarity=patterns.similarity(to_prefix),
    )
    return SoftmaxMeasurements(means, pattern, content)


@dataclass(frozen=True)
class _Rows:
    """Sums over the keys on the grid of each query's attention A, shape (rows, heads, N_query) each.

    Logits s_j are counted from the largest one, m: so all sums are precise, however large the logits are.

    Args:
        top: m.
        lse: log sum_j exp(s_j - m).
        expected: sum_j A_j (s_j - m).
        distance: sum_j A_j ||delta_j||; None where it is unknown where the queries lie.
        empty: Whether a mask hides all of these keys; None without a mask.
        received: sum_i A_ij over whole rows, shape (rows, heads, N_key), 0 for class and register tokens; None unless
            the attention is to be measured in detail.
    """

    top: Tensor
    lse: Tensor
    expected: Tensor
    distance: Tensor | None
    empty: Tensor | None
    received: Tensor | None

    @property
    def entropy(self) -> Tensor:
        """-sum_j A_j log A_j, where log A_j = s_j - m - lse."""
        return self.lse - self.expected

    def zero_if_empty(self, values: Tensor) -> Tensor:
        """Return values of rows, 0 for those that can see no key at all, as torch's own attention has it."""
        return (
            values
            if self.empty is None
            else values.masked_fill(self.empty & ~values.isfinite(), 0)
        )


def _rows_over_grid(
    attention: "SoftmaxAttention", patterns: PatternSum
) -> tuple[_Rows, Tensor | None]:
    """Sum over the keys on the grid.

    The only large tensors are two buffers, which hold one block; the rest is done for all rows at once.

    Args:
        attention: Attention to sum over.
        patterns: Sums over images, to which each block is added.

    Returns:
        The sums, and the logits of the class and register tokens, shape (rows, heads, N_query, prefix); None if there
        are none.
    """
    logits, layout, prefix = attention.logits, attention.layout, attention.layout.prefix
    top, total, expected = (logits.new_empty(*logits.shape[:3]) for _ in range(3))
    prefix_logits = logits.new_empty(*logits.shape[:3], prefix) if prefix else None
    distance = None if layout.queries is None else torch.empty_like(top)
    received = None
    if attention.detailed:
        received = logits.new_empty(*logits.shape[:2], attention.keys).zero_()
    is_small = attention.queries * attention.keys <= _SMALL_TABLE
    table = (
        _table(layout, logits.dtype, logits.device)
        if distance is not None and is_small
        else None
    )
    buffers = [
        logits.new_empty(max(attention.block, attention.heads * attention.keys))
        for _ in range(2)
    ]
    for block in attention.blocks():
        rows, queries = attention.rows_of(block), block.queries
        at = rows, slice(None), queries
        shape = (
            rows.stop - rows.start,
            attention.heads,
            queries.stop - queries.start,
            attention.keys,
        )
        s, weights = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
        logits(rows, queries, out=s)
        if prefix_logits is not None:
            prefix_logits[at] = s[..., :prefix]
            s[..., :prefix] = (
                -torch.inf if logits.masked else _LOWEST
            )  # no attention, in the sums that follow
        m = s.amax(-1, keepdim=True)
        top[at] = m[..., 0]
        if (
            logits.masked
        ):  # rows that see none of these keys, and keys that a row does not see
            s.sub_(m.masked_fill_(m == -torch.inf, 0)).clamp_(min=_LOWEST)
        else:
            s.sub_(m)
        # From here on in bits: torch.exp takes twice the time of torch.exp2 (torch 2.13 on a CPU).
        torch.exp2(s.mul_(1 / _LN2), out=weights)
        z = weights.sum(-1)
        total[at] = z
        expected[at] = s.mul_(weights).sum(-1)
        if distance is not None:
            lengths = (
                layout.distances(queries, logits.dtype, logits.device)
                if table is None
                else table[queries]
            )
            distance[at] = torch.mul(weights, lengths, out=s).sum(-1)
        grid_share = (
            1
            if prefix_logits is None
            else (z.log() - (prefix_logits[at] - m).logsumexp(-1)).sigmoid_()
        )
        factor = (grid_share / z).nan_to_num_()  # 0 / 0 where a mask hides all
        patterns.add(block, weights, factor)
        if received is not None:
            received[rows] += (factor[..., None, :] @ weights)[..., 0, :]
    empty = top == -torch.inf if logits.masked else None
    lse = total.log()
    if empty is not None:
        top, total = top.masked_fill_(empty, _LOWEST), total.masked_fill_(empty, 1)
    mean_distance = None if distance is None else distance.div_(total)
    mean_logit = expected.div_(total).mul_(_LN2)
    return _Rows(top, lse, mean_logit, mean_distance, empty, received), prefix_logits


def _with_prefix(grid: _Rows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy of whole rows, and their attention to each class and register token, shaped as ``logits``.

    With m the largest logit of a whole row and lse = log(sum over the grid + sum over the prefix), again counted from
    m, the grid has the share exp(lse_grid - lse) of the row, and H = lse - sum_j A_j (s_j - m).

    Args:
        grid: Sums of the same rows over the keys on the grid.
        logits: Logits of the other keys, shape (rows, heads, N_query, prefix).
    """
    top = torch.maximum(
        grid.top, logits.amax(-1)
    )  # a mask can hide keys with the least of all numbers
    lower = (grid.top - top).clamp_(min=_LOWEST)
    logits, lse_grid = logits - top[..., None], grid.lse + lower
    lse = torch.logsumexp(torch.cat([lse_grid[..., None], logits], -1), -1)
    attention = (logits - lse[..., None]).exp()
    finite = logits if grid.empty is None else logits.clamp(min=_LOWEST)
    expected = (grid.expected + lower) * (lse_grid - lse).exp() + (
        finite * attention
    ).sum(-1)
    return lse - expected, attention if grid.empty is None else attention.nan_to_num(0)


@lru_cache(maxsize=16)
def _table(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return all distances of a small grid, shape (N_query, N_key)."""
    return layout.distances(slice(None), dtype, device)


def uniform_softmax_attention(attention: "SoftmaxAttention") -> dict[str, Tensor]:
    """Return ``uniform_entropy`` over all keys and ``uniform_distance`` over the grid, for each image: shape (B,).

    Keys that a mask hides from a query count as keys. Where no grid is known there is no distance.
    """
    queries, keys = attention.layout.queries, attention.layout.keys
    distance = (
        None if queries is None or keys is None else _distance_between(queries, keys)
    )
    values = {"uniform_entropy": math.log(attention.keys), "uniform_distance": distance}
    return _for_images(attention.source, attention.images, values)


def uniform_gated_attention(attention: GatedAttention) -> dict[str, Tensor]:
    """Return ``uniform_entropy`` and ``uniform_distance`` over real and padding pixels, for each image: shape (B,).

    ``uniform_content_entropy`` is over real pixels.
    """
    y, x = attention.y, attention.x
    values = {
        "uniform_entropy": math.log(y.keys * x.keys),
        "uniform_content_entropy": math.log(y.length * x.length),
        "uniform_distance": _distance_on_axes(y, x),
    }
    return _for_images(attention.query, len(attention.query), values)


def uniform_distance(
    query_y: np.ndarray, key_y: np.ndarray, query_x: np.ndarray, key_x: np.ndarray
) -> float:
    """Return the mean distance between all queries and all keys of two rectangular grids, in float64.

    Args:
        query_y, query_x: Rows and columns of the queries, one-dimensional.
        key_y, key_x: Rows and columns of the keys, one-dimensional.
    """
    offsets_y, pairs_y = _offsets(query_y, key_y)
    offsets_x, pairs_x = _offsets(query_x, key_x)
    total = pairs_y @ np.hypot(offsets_y[:, None], offsets_x[None, :]) @ pairs_x
    return float(total / (pairs_y.sum() * pairs_x.sum()))


def _for_images(
    like: Tensor, images: int, values: Mapping[str, float | None]
) -> dict[str, Tensor]:
    dtype = widest_dtype(like.device)
    return {
        name: torch.full((images,), value, dtype=dtype, device=like.device)
        for name, value in values.items()
        if value is not None
    }


def _offsets(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances along one axis and the number of pairs at each: no N x N table for a grid of N."""
    distances, pairs = np.unique(
        np.abs(keys[None, :] - queries[:, None]), return_counts=True
    )
    return distances, pairs.astype(np.float64)


@lru_cache(maxsize=256)
def _distance_on_axes(y: Axis, x: Axis) -> float:
    like = torch.empty(0, dtype=torch.float64)
    places = [
        positions(like).numpy()
        for axis in (y, x)
        for positions in (axis.query_positions, axis.key_positions)
    ]
    return uniform_distance(*places)


@lru_cache(maxsize=256)
def _distance_between(queries: Tokens, keys: Tokens) -> float:
    query_y, query_x = _rows_and_columns(queries)
    key_y, key_x = _rows_and_columns(keys)
    return uniform_distance(query_y, key_y, query_x, key_x)


def _rows_and_columns(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(tokens.height) * tokens.spacing[0] + tokens.origin[0]
    columns = np.arange(tokens.width) * tokens.spacing[1] + tokens.origin[1]
    return rows, columns
