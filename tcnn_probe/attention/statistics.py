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
from tcnn_model.gpsa.statistics import AttentionStatistics
from tcnn_model.precision import widest_dtype
from tcnn_probe.attention.layout import Tokens
from tcnn_probe.attention.patterns import Pattern, PatternSum, gated_patterns
from tcnn_probe.attention.softmax_rows import (
    LOWEST,
    SoftmaxRows,
    rows_by_blocks,
    rows_by_kernel,
)

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
        by_query: Statistics of each row.
        rows: Rows of the attention; None unless :attr:`~tcnn_probe.attention.attention.Attention.detailed`.
    """

    means: dict[str, Tensor]
    pattern: Pattern
    by_query: SoftmaxRows
    rows: ContentRows | None


@torch.no_grad()
def measure_softmax(attention: "SoftmaxAttention") -> SoftmaxMeasurements:
    """Measure softmax attention, exact: on a GPU with the kernel where it can, else a block of queries at a time.

    Args:
        attention: Attention of B images.
    """
    layout, patterns = attention.layout, PatternSum(attention)
    measure = rows_by_kernel if attention.logits.on_kernel else rows_by_blocks
    rows = measure(attention, patterns)
    by_query = {"entropy": rows.entropy}
    pattern = patterns.pattern(rows.entropy)
    largest = attention.by_image(rows.largest.amax(-1)).amax(1)
    if attention.logits.masked:  # masked logits can all be hidden
        largest = largest.masked_fill(largest <= LOWEST, -torch.inf)
    if layout.queries is not None:
        on_grid = slice(layout.queries.prefix, None)
        if rows.prefix is not None:
            by_query["prefix_attention"] = rows.prefix[..., on_grid]
        if rows.distance is not None:
            by_query["attention_distance"] = rows.distance[..., on_grid]
    means = {
        name: attention.by_image(values.mean(-1)).mean(1)
        for name, values in by_query.items()
    }
    means["max_logit"] = largest
    if rows.received is None:
        return SoftmaxMeasurements(means, pattern, rows, None)
    content = ContentRows(
        entropy=attention.by_image(rows.entropy),
        received=attention.by_image(rows.received / attention.queries),
        similarity=patterns.similarity(),
    )
    return SoftmaxMeasurements(means, pattern, rows, content)


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
