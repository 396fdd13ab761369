"""Statistics of attention for each image and head: plain tensors in, plain tensors out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.gpsa.statistics import measure
from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.layout import Layout
from tcnn_probe.attention.patterns import Pattern, PatternSum

__all__ = ["attention_received", "attention_statistics", "gated_attention_statistics"]

_SMALL_TABLE = 1 << 20  # distances that are kept rather than computed for every block: 4 MiB
_LN2 = math.log(2)
_LEAST = -1e30  # in place of minus infinity, which times an attention of zero would be no number


@torch.no_grad()
def gated_attention_statistics(attention: GatedAttention) -> dict[str, Tensor]:
    """Entropies and mean distance of gated positional attention, exact, without an N x N tensor for large N.

    These are means over the queries of what :class:`~tcnn_model.AttentionStatistics` defines.

    Args:
        attention: of a batch of B images.

    Returns:
        ``entropy``, ``content_entropy`` and ``positional_entropy`` in nats and ``attention_distance`` in input pixels
        of the layer, shape (B, heads) each, in float32 (float64 if the attention is in float64).
    """
    measured = measure(attention)
    names = ("entropy", "content_entropy", "positional_entropy", "attention_distance")
    means = {name: getattr(measured, name).mean(-1) for name in names}
    means["positional_entropy"] = means["positional_entropy"].expand_as(means["entropy"])
    return means


@torch.no_grad()
def attention_statistics(call: AttentionCall) -> tuple[dict[str, Tensor], Pattern]:
    """Entropy and mean distance of softmax attention, exact, a block of queries at a time; and what content it has.

    The class and register tokens are added to the keys on the grid, not taken away from whole rows: so the distance
    stays exact where nearly all attention goes to them.

    Args:
        call: attention of B images.

    Returns:
        means over the queries and windows of each image, shape (B, heads), in float32 (float64 for float64):
        ``entropy``, of all queries over all keys, in nats; where the grids are known ``attention_distance``, from
        queries to keys on the grid, with rows renormalised over these, in cells of the finer grid; and where there are
        class or register tokens ``prefix_attention``, the attention that queries on the grid pay to them. And the sum
        over images of the attention of some queries.
    """
    layout, patterns = call.layout, PatternSum(call)
    rows, prefix = _rows_over_grid(call, patterns)
    entropy, to_prefix = (rows.entropy, None) if prefix is None else _with_prefix(rows, prefix)
    statistics = {"entropy": rows.unless_empty(entropy)}
    pattern = patterns.pattern(statistics["entropy"], to_prefix)
    if layout.queries is not None:
        on_grid = slice(layout.queries.prefix, None)
        if to_prefix is not None:
            statistics["prefix_attention"] = to_prefix.sum(-1)[..., on_grid]
        if rows.distance is not None:
            statistics["attention_distance"] = rows.distance[..., on_grid]
    return {name: call.by_image(of_queries.mean(-1)).mean(1) for name, of_queries in statistics.items()}, pattern


@dataclass(frozen=True)
class _Rows:
    """Attention A of each query over the keys on the grid, and sums over these: shape (rows, heads, N_query) each.

    Logits s_j are counted from the largest one, m: so all sums are precise, however large the logits are.

    Args:
        top: m.
        lse: log sum_j exp(s_j - m).
        expected: sum_j A_j (s_j - m).
        distance: sum_j A_j ||delta_j||; None where it is not known where the queries lie.
        empty: whether a mask hides all of these keys; None without a mask.
    """

    top: Tensor
    lse: Tensor
    expected: Tensor
    distance: Tensor | None
    empty: Tensor | None

    @property
    def entropy(self) -> Tensor:
        """-sum_j A_j log A_j, where log A_j = s_j - m - lse."""
        return self.lse - self.expected

    def unless_empty(self, of_rows: Tensor) -> Tensor:
        """0 for rows that can see no key at all, as torch's own attention has it."""
        return of_rows if self.empty is None else of_rows.masked_fill(self.empty & ~of_rows.isfinite(), 0)


def _rows_over_grid(call: AttentionCall, patterns: PatternSum) -> tuple[_Rows, Tensor | None]:
    """Large tensors are two buffers, which hold one block; the rest is done for all rows at once.

    Args:
        call: which.
        patterns: takes note of each block.

    Returns:
        the sums, and the logits of the class and register tokens, shape (rows, heads, N_query, prefix); None if there
        are none.
    """
    logits, layout, first = call.logits, call.layout, call.layout.prefix
    top, total, expected = (logits.new_empty(*logits.shape[:3]) for _ in range(3))
    prefix = logits.new_empty(*logits.shape[:3], first) if first else None
    distance = None if layout.queries is None else torch.empty_like(top)
    small = distance is not None and call.queries * call.keys <= _SMALL_TABLE
    table = _table(layout, logits.dtype, logits.device) if small else None
    buffers = [logits.new_empty(max(call.block, call.heads * call.keys)) for _ in range(2)]
    for block in call.blocks():
        rows, queries = call.rows(block), block.queries
        at = rows, slice(None), queries
        shape = rows.stop - rows.start, call.heads, queries.stop - queries.start, call.keys
        s, weights = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
        logits(rows, queries, out=s)
        if prefix is not None:
            prefix[at] = s[..., :first]
            s[..., :first] = -torch.inf if logits.masked else _LEAST  # no attention, in the sums that follow
        m = s.amax(-1, keepdim=True)
        top[at] = m[..., 0]
        if logits.masked:  # rows that see none of these keys, and keys that a row does not see
            s.sub_(m.masked_fill_(m == -torch.inf, 0)).clamp_(min=_LEAST)
        else:
            s.sub_(m)
        torch.exp2(s.mul_(1 / _LN2), out=weights)  # from here on in bits: torch.exp takes twice the time
        total[at] = z = weights.sum(-1)
        expected[at] = s.mul_(weights).sum(-1)
        if distance is not None:
            far = layout.distances(queries, logits.dtype, logits.device) if table is None else table[queries]
            distance[at] = torch.mul(weights, far, out=s).sum(-1)
        share = 1 if prefix is None else (z.log() - (prefix[at] - m).logsumexp(-1)).sigmoid_()
        patterns.add(block, weights, (share / z).nan_to_num_())  # 0 / 0 where a mask hides all
    empty = top == -torch.inf if logits.masked else None
    lse = total.log()
    if empty is not None:
        top, total = top.masked_fill_(empty, _LEAST), total.masked_fill_(empty, 1)
    mean_distance = None if distance is None else distance.div_(total)
    return _Rows(top, lse, expected.div_(total).mul_(_LN2), mean_distance, empty), prefix


def _with_prefix(grid: _Rows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The entropy of whole rows, and their attention to each class and register token, shaped as ``logits``.

    With m the largest logit of a whole row and lse = log(sum over the grid + sum over the prefix), again counted from
    m, the grid has the share exp(lse_grid - lse) of the row, and H = lse - sum_j A_j (s_j - m).

    Args:
        grid: the same rows over the keys on the grid.
        logits: of the other keys, shape (rows, heads, N_query, prefix).
    """
    top = torch.maximum(grid.top, logits.amax(-1))  # a mask can hide keys with the least of all numbers
    lower = (grid.top - top).clamp_(min=_LEAST)
    logits, lse_grid = logits - top[..., None], grid.lse + lower
    lse = torch.logsumexp(torch.cat([lse_grid[..., None], logits], -1), -1)
    attention = (logits - lse[..., None]).exp()
    finite = logits if grid.empty is None else logits.clamp(min=_LEAST)
    expected = (grid.expected + lower) * (lse_grid - lse).exp() + (finite * attention).sum(-1)
    return lse - expected, attention if grid.empty is None else attention.nan_to_num(0)


@torch.no_grad()
def attention_received(call: AttentionCall, images: Sequence[int]) -> Tensor:
    """How much each key is looked at: mean over the queries of A_ij, shape (images, windows, heads, N_key)."""
    step = max(1, call.block // (call.windows * call.heads * call.keys))
    received = []
    for image in images:
        blocks = [slice(start, start + step) for start in range(0, call.queries, step)]
        total = torch.stack([call.weights(block, image)[0].sum(-2) for block in blocks]).sum(0)
        received.append(total / call.queries)
    return torch.stack(received)


@lru_cache(maxsize=16)
def _table(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All distances of a small grid, shape (N_query, N_key)."""
    return layout.distances(slice(None), dtype, device)
