"""Statistics of softmax attention in one pass, by the kernel on a GPU or by blocks of queries."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tcnn_model.kernels import TokenGrid, trial
from tcnn_probe.attention.attention import ContentRows
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.patterns import Pattern, PatternSum

if TYPE_CHECKING:
    from tcnn_probe.attention.logits import Logits
    from tcnn_probe.attention.softmax import SoftmaxAttention

__all__ = ["LOWEST", "SoftmaxMeasurements", "SoftmaxRows", "measure_softmax"]

# This replaces minus infinity, because minus infinity times an attention of zero is NaN.
LOWEST = -1e30

# Tables of up to this number of distances (4 MiB in float32) are cached; larger ones are computed
# block by block.
_SMALL_TABLE = 1 << 20


@dataclass(frozen=True)
class SoftmaxRows:
    """Statistics of each row of the attention A over all keys, shape (rows, heads, N_query) each.

    Args:
        entropy: -sum_j A_j log A_j in nats; 0 for queries from which all keys are hidden, as in
            torch's fused attention.
        largest: Largest logit, at most :data:`LOWEST` or minus infinity if all keys are hidden.
        prefix: Sum of A_j over class and register tokens; None if there are none.
        distance: Mean distance to the keys on the grid, with A renormalised over these keys; None
            if the queries' grid is unknown.
        frame_distance: Mean distance over the frames of a video, in frames; None for images.
        received: sum_i A_ij over the queries, shape (rows, heads, N_key); None unless the attention
            is ``detailed``.
        of_tokens: A of the class and the distillation token, shape (rows, heads, N_key) each, by
            their index among the queries; empty if they were not kept.
        find_first: Function that returns the sum of A_j over the first ``count`` keys; None if
            there are no tokens before the grid.
    """

    entropy: Tensor
    largest: Tensor
    prefix: Tensor | None
    distance: Tensor | None
    frame_distance: Tensor | None
    received: Tensor | None
    of_tokens: Mapping[int, Tensor] = field(default_factory=dict)
    find_first: Callable[[int], Tensor] | None = None


@dataclass(frozen=True)
class SoftmaxMeasurements:
    """Measurements of a softmax attention, computed in one pass over its logits.

    Args:
        means: Means over the queries and windows of each image, shape (B, heads), in float32
            (float64 for float64): ``entropy`` over all keys, in nats; if the grids are known,
            ``attention_distance`` from queries to keys on the grid, with A renormalised over these
            keys, in cells of the finer grid, and for videos ``frame_distance``; if there are class
            or register tokens, ``prefix_attention``, the attention that they receive from queries
            on the grid. ``max_logit`` is the largest logit of all queries and keys.
        pattern: Sum over images of the attention of some queries.
        by_query: Statistics of each row.
        rows: Rows of the attention; None unless
            :attr:`~tcnn_probe.attention.attention.Attention.detailed`.
    """

    means: dict[str, Tensor]
    pattern: Pattern
    by_query: SoftmaxRows
    rows: ContentRows | None


@torch.no_grad()
def measure_softmax(attention: "SoftmaxAttention") -> SoftmaxMeasurements:
    """Measure softmax attention exactly: by blocks of queries,
    or by the kernel if it is switched on and agrees.

    Args:
        attention: Attention of B images.
    """
    layout = attention.layout
    visibility = attention.visibility
    # The kernel supports no frames, and its sums over queries include padding.
    on_kernel = attention.logits.on_kernel and not layout.is_video
    on_kernel = on_kernel and not (visibility and attention.detailed)
    by_blocks = partial(_measure_rows, _rows_by_blocks, attention)
    rows, patterns = _tried(attention, by_blocks) if on_kernel else by_blocks()
    by_query, counted = {"entropy": rows.entropy}, rows.entropy
    highest = rows.largest
    if visibility is not None:
        is_counted = visibility.queries.flatten(0, 1)[:, None]
        counted = counted.where(is_counted, torch.nan)
        highest = highest.where(is_counted, -torch.inf)
    pattern = patterns.pattern(counted)
    largest = attention.by_image(highest.amax(-1)).amax(1)
    if attention.logits.masked:  # a mask can hide all logits
        largest = largest.masked_fill(largest <= LOWEST, -torch.inf)
    if layout.queries is not None:
        on_grid = slice(layout.queries.prefix, None)
        if rows.prefix is not None:
            by_query["prefix_attention"] = rows.prefix[..., on_grid]
        if rows.distance is not None:
            by_query["attention_distance"] = rows.distance[..., on_grid]
        if rows.frame_distance is not None:
            by_query["frame_distance"] = rows.frame_distance[..., on_grid]
    means = {
        name: attention.by_image(values).mean((1, 3))
        if visibility is None
        else visibility.mean(values, attention.queries - values.shape[-1])
        for name, values in by_query.items()
    }
    means["max_logit"] = largest
    if rows.received is None:
        return SoftmaxMeasurements(means, pattern, rows, None)
    count: int | Tensor = attention.queries
    if visibility is not None:
        count = visibility.queries.flatten(0, 1).sum(-1).clamp_min(1)[:, None, None]
    content = ContentRows(
        entropy=attention.by_image(rows.entropy),
        received=attention.by_image(rows.received / count),
        similarity=patterns.similarity(counted),
    )
    return SoftmaxMeasurements(means, pattern, rows, content)


def _measure_rows(
    measure: "Callable[[SoftmaxAttention, PatternSum], SoftmaxRows]",
    attention: "SoftmaxAttention",
) -> tuple[SoftmaxRows, PatternSum]:
    patterns = PatternSum(attention)
    return measure(attention, patterns), patterns


def _tried(
    attention: "SoftmaxAttention",
    by_blocks: Callable[[], tuple[SoftmaxRows, PatternSum]],
) -> tuple[SoftmaxRows, PatternSum]:
    """Measure rows by the kernel, unless it disagreed
    with the blocks in the first forward of this shape.
    """
    logits = attention.logits

    def tensors(measured: tuple[SoftmaxRows, PatternSum]) -> tuple[Tensor | None, ...]:
        rows, _ = measured
        largest = rows.largest.clamp(min=LOWEST)  # where all keys are hidden
        return rows.entropy, largest, rows.prefix, rows.distance, rows.received

    source = logits.source
    return trial.tried(
        "softmax statistics",
        (
            logits.shape,
            source.shape[-1],
            source.dtype,
            source.device,
            logits.masked,
            attention.layout,
            attention.detailed,
        ),
        partial(_measure_rows, _rows_by_kernel, attention),
        by_blocks,
        tensors,
        logits=lambda: logits.bound,
        dtype=logits.dtype,
    )


def _rows_by_kernel(attention: "SoftmaxAttention", patterns: PatternSum) -> SoftmaxRows:
    """Measure the rows in one pass of the kernel,
    and compute the attention of the sampled queries only.

    Args:
        attention: Attention whose logits are
            :attr:`~tcnn_probe.attention.softmax.Logits.on_kernel`.
        patterns: Sums over images, to which the sampled queries are added.
    """
    layout = attention.layout
    patterns.add_sampled()
    measured = attention.logits.statistics(
        _token_grid(layout.queries), _token_grid(layout.keys), attention.detailed
    )
    return SoftmaxRows(
        entropy=measured.entropy,
        largest=measured.largest,
        prefix=measured.prefix if layout.prefix else None,
        distance=measured.distance,
        frame_distance=None,
        received=measured.received,
        find_first=partial(_first_by_kernel, attention.logits, _token_grid(layout.keys))
        if layout.prefix
        else None,
    )


def _first_by_kernel(logits: "Logits", keys: TokenGrid | None, count: int) -> Tensor:
    """Return the sum of A_j over the first keys,
    in another pass in which only these count as the prefix.
    """
    assert keys is not None
    return logits.statistics(None, keys._replace(prefix=count), False).prefix


def _token_grid(tokens: Tokens | None) -> TokenGrid | None:
    if tokens is None:
        return None
    return TokenGrid(tokens.prefix, tokens.width, tokens.spacing, tokens.origin)


def _rows_by_blocks(attention: "SoftmaxAttention", patterns: PatternSum) -> SoftmaxRows:
    """Measure the rows by blocks of queries.

    The sums over keys on the grid are computed first, and class and register tokens are added
    afterwards. If they were subtracted from sums over all keys, the distance would be inaccurate
    when they get nearly all attention.

    Args:
        attention: Attention to measure.
        patterns: Sums over images, to which each block is added.
    """
    grid, prefix_logits = _rows_over_grid(attention, patterns)
    if prefix_logits is None:
        entropy = grid.zero_if_empty(grid.entropy)
        return SoftmaxRows(
            entropy,
            grid.top,
            None,
            grid.distance,
            grid.frame_distance,
            grid.received,
            grid.of_tokens,
        )
    entropy, to_prefix = _with_prefix(grid, prefix_logits)
    counted = to_prefix
    if attention.visibility is not None:
        is_counted = attention.visibility.queries.flatten(0, 1)[:, None, :, None]
        counted = to_prefix.where(is_counted, 0)
    patterns.add_prefix(counted)
    before_grid = slice(to_prefix.shape[-1])
    if grid.received is not None:
        grid.received[..., before_grid] = counted.sum(-2)
    for query, row in grid.of_tokens.items():
        row[..., before_grid] = to_prefix[:, :, query]
    # The lambda does not refer to the attention, which keeps these rows: a cycle would keep
    # activations alive.
    return SoftmaxRows(
        entropy=grid.zero_if_empty(entropy),
        largest=torch.maximum(grid.top, prefix_logits.amax(-1)),
        prefix=to_prefix.sum(-1),
        distance=grid.distance,
        frame_distance=grid.frame_distance,
        received=grid.received,
        of_tokens=grid.of_tokens,
        find_first=lambda count: to_prefix[..., :count].sum(-1),
    )


@dataclass(frozen=True)
class _GridRows:
    """Sums over the keys on the grid, with A normalised over these keys,
    shape (rows, heads, N_query) each.

    The largest logit m is subtracted from the logits s_j, so that all sums are accurate for logits
    of any size.

    Args:
        top: m.
        lse: log sum_j exp(s_j - m).
        expected: sum_j A_j (s_j - m).
        distance: sum_j A_j ||delta_j||; None if the queries' grid is unknown.
        frame_distance: sum_j A_j |f_j|, where f_j is the number of frames from the query to key j;
            None for images.
        empty: Whether a mask hides all of these keys; None without a mask.
        received: sum_i A_ij with A normalised over all keys, shape (rows, heads, N_key), 0 for
            class and register tokens; None unless the attention is ``detailed``.
        of_tokens: Rows of A as in :class:`SoftmaxRows`, without class and register tokens.
    """

    top: Tensor
    lse: Tensor
    expected: Tensor
    distance: Tensor | None
    frame_distance: Tensor | None
    empty: Tensor | None
    received: Tensor | None
    of_tokens: Mapping[int, Tensor]

    @property
    def entropy(self) -> Tensor:
        """-sum_j A_j log A_j, where log A_j = s_j - m - lse."""
        return self.lse - self.expected

    def zero_if_empty(self, values: Tensor) -> Tensor:
        """Return values of rows, 0 for rows from which all keys are hidden,
        as in torch's fused attention.
        """
        return (
            values if self.empty is None else values.masked_fill(self.empty & ~values.isfinite(), 0)
        )


def _rows_over_grid(
    attention: "SoftmaxAttention", patterns: PatternSum
) -> tuple[_GridRows, Tensor | None]:
    """Sum over the keys on the grid.

    The only large tensors are two buffers for one block; everything else is computed for all rows
    at once.

    Args:
        attention: Attention to sum over.
        patterns: Sums over images, to which each block is added.

    Returns:
        The sums, and the logits of the class and register tokens, shape (rows, heads, N_query,
        prefix); None if there are none.
    """
    logits, layout = attention.logits, attention.layout
    prefix = layout.prefix
    sums = logits.new_empty(4, *logits.shape[:3])
    top, total, expected, distances = sums
    prefix_logits = logits.new_empty(*logits.shape[:3], prefix) if prefix else None
    distance = None if layout.queries is None else distances
    frame_distance = torch.empty_like(top) if layout.is_video else None
    received = None
    if attention.detailed:
        received = logits.new_empty(*logits.shape[:2], attention.keys).zero_()
    is_small = attention.queries * attention.keys <= _SMALL_TABLE
    table = (
        _table(layout, logits.dtype, logits.device) if distance is not None and is_small else None
    )
    visibility = attention.visibility
    counted = None if visibility is None else visibility.queries.flatten(0, 1)
    tokens = (attention.class_query, attention.distillation_query)
    of_tokens = {
        query: logits.new_empty(*logits.shape[:2], attention.keys)
        for query in tokens
        if query is not None
    }
    largest = attention.queries_at_once * attention.heads * attention.keys
    # Large buffers are given back to the system in each layer, which then clears all their pages
    # anew.
    buffers = [logits.new_empty(min(largest, math.prod(logits.shape))) for _ in range(2)]
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
        m, z, weighted, mean_length = sums[:, *at].unbind()
        logits(rows, queries, out=s)
        if prefix_logits is not None:
            prefix_logits[at] = s[..., :prefix]
            # These keys get no attention in the following sums.
            s[..., :prefix] = -torch.inf if logits.masked else LOWEST
        torch.amax(s, -1, out=m)
        # In masked logits, a maximum of minus infinity (all keys hidden) becomes 0, and hidden keys
        # become LOWEST.
        if logits.masked:
            m = m.masked_fill(m == -torch.inf, 0)
            s.sub_(m[..., None]).clamp_(min=LOWEST)
        else:
            s.sub_(m[..., None])
        torch.exp(s, out=weights)
        torch.sum(weights, -1, out=z)
        torch.sum(s.mul_(weights), -1, out=weighted)
        if distance is not None:
            lengths = (
                layout.distances(queries, logits.dtype, logits.device)
                if table is None
                else table[queries]
            )
            torch.sum(torch.mul(weights, lengths, out=s), -1, out=mean_length)
        if frame_distance is not None:
            lengths = layout.frame_distances(queries, logits.dtype, logits.device)
            frame_distance[at] = torch.mul(weights, lengths, out=s).sum(-1)
        grid_share: Tensor | int = 1
        if prefix_logits is not None:
            others = prefix_logits[at] - m[..., None]
            others = others[..., 0] if prefix == 1 else others.logsumexp(-1)
            grid_share = (z.log() - others).sigmoid_()
        factor = (grid_share / z).nan_to_num_()  # z is 0 if a mask hides all keys
        for query, row in of_tokens.items():
            if queries.start <= query < queries.stop:
                number = query - queries.start
                torch.mul(weights[:, :, number], factor[:, :, number, None], out=row[rows])
        if counted is not None:
            factor = factor.where(counted[rows, None, queries], 0)
        patterns.add(block, weights, factor)
        if received is not None:
            received[rows] += (factor[..., None, :] @ weights)[..., 0, :]
    empty = top == -torch.inf if logits.masked else None
    lse = total.log()
    if empty is not None:
        top, total = top.masked_fill_(empty, LOWEST), total.masked_fill_(empty, 1)
    for mean_distance in (distance, frame_distance):
        if mean_distance is not None:
            mean_distance.div_(total)
    grid = _GridRows(
        top, lse, expected.div_(total), distance, frame_distance, empty, received, of_tokens
    )
    return grid, prefix_logits


def _with_prefix(grid: _GridRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy over all keys, and the attention to each class
    and register token, shaped as ``logits``.

    Let m be the largest logit of the row and Z = sum_j exp(s_j - m) over all keys, Z_grid the same
    over the grid. Then the grid gets the attention Z_grid / Z, and the entropy is log Z - sum_j A_j
    (s_j - m).

    Args:
        grid: Sums of the rows over the keys on the grid.
        logits: Logits of class and register tokens, shape (rows, heads, N_query, prefix).
    """
    # The clamp is needed for masks that hide keys with the smallest finite number.
    top = torch.maximum(grid.top, logits.amax(-1))
    lower = (grid.top - top).clamp_(min=LOWEST)
    logits = logits - top[..., None]
    to_grid, attention = (grid.lse + lower).exp_(), logits.exp()
    # Z is at least 1, as the largest logit adds 1, unless all keys are hidden.
    total = (to_grid + attention.sum(-1)).clamp_(min=1)
    to_grid, attention = to_grid.div_(total), attention.div_(total[..., None])
    finite = logits if grid.empty is None else logits.clamp(min=LOWEST)
    expected = (grid.expected + lower) * to_grid + (finite * attention).sum(-1)
    return total.log() - expected, attention


@lru_cache(maxsize=16)
def _table(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the cached table of distances of a small grid, shape (N_query, N_key)."""
    return layout.distances(slice(None), dtype, device)
