"""Sums over images of gated attention and its content part,
and the similarity of heads of the latter.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.precision import at_least_float32, widest_dtype
from tcnn_probe.attention.patterns import (
    Pattern,
    entropy_of,
    row_products,
    similarity_of_heads,
)
from tcnn_probe.attention.sampled_queries import QUERIES, sample_queries

__all__ = ["content_similarity", "gated_patterns"]


@torch.no_grad()
def gated_patterns(
    attention: GatedAttention, limit: int | None, block: int
) -> tuple[Pattern, Pattern]:
    """Return sums over the first ``limit`` images,
    or all, of gated attention A and of its content part C.

    The keys of A are the real pixels, and after them the padding. Those of C are the real pixels.

    Args:
        attention: Attention of a batch.
        limit: Number of images; None for all.
        block: Number of weights to compute at a time.
    """
    query, images = attention.query, len(attention.query[:limit])
    y, x = attention.y, attention.x
    # The image is the only window, so its queries are in the first row of indices.
    sampled = sample_queries(1, query.shape[2], QUERIES)[1][0]
    query_cells = np.indices((y.queries, x.queries)).reshape(2, -1).T[sampled.numpy()]
    query_places = query_cells * [y.stride, x.stride] + [y.first_query, x.first_query]
    extended = np.indices((y.keys, x.keys)).reshape(2, -1).T - [y.before, x.before]
    is_real = ((extended >= 0) & (extended < [y.length, x.length])).all(1)
    key_places = np.concatenate([extended[is_real], extended[~is_real]])
    sampled, real = (i.to(query.device) for i in (sampled, torch.from_numpy(is_real)))
    rows, columns = attention.factors()
    along_y, along_x = rows[:, sampled // x.queries], columns[:, sampled % x.queries]
    both = (along_y[..., :, None] * along_x[..., None, :]).flatten(2)
    gate = attention.gate[:, None, None]
    positional = both[..., real].to(at_least_float32(query.dtype))
    whole_sum = _AttentionSum(positional.shape, gate.to(both) * both[..., ~real], 2)
    content_sum = _AttentionSum(positional.shape, both[..., :0], 1)
    step = max(1, block // positional.numel())
    for start in range(0, images, step):
        batch = slice(start, min(start + step, images))
        weights = replace(attention, query=query[batch], key=attention.key[batch]).content(sampled)
        scratch = torch.empty_like(weights)
        content_sum.add(weights, scratch, start)
        # A = (1 - g) C + g P (T-CNN Eq. 7) overwrites C, which has been added by now.
        weights.lerp_(positional, gate.to(weights))
        whole_sum.add(weights, scratch, start)
    whole = replace(
        whole_sum.pattern(images),
        visible=images,
        queries=query_places,
        keys=key_places,
        padding=len(extended) - int(is_real.sum()),
        population=query.shape[2],
    )
    return whole, content_sum.pattern(images)


@torch.no_grad()
def content_similarity(attention: GatedAttention, limit: int | None, block: int) -> Tensor:
    """Return the mean cosine between each head's rows of C
    and those of the other heads, over the sampled queries.

    Args:
        attention: Attention of a batch of B images.
        limit: Number of first images to compare; None for all.
        block: Number of weights to compute at a time.

    Returns:
        Shape (B, heads), zeros for images beyond the limit.
    """
    query, key = attention.query, attention.key
    sampled = sample_queries(1, query.shape[2], QUERIES)[1][0].to(query.device)
    images, heads = query.shape[:2]
    shape = images, len(sampled), heads, heads
    products = torch.zeros(shape, dtype=at_least_float32(query.dtype), device=query.device)
    step = max(1, block // (heads * len(sampled) * key.shape[2]))
    for start in range(0, len(query[:limit]), step):
        batch = slice(start, min(start + step, len(query[:limit])))
        part = replace(attention, query=query[batch], key=key[batch])
        products[batch] = row_products(part.content(sampled))
    # A row of content attention has a positive length, unless it is NaN.
    return similarity_of_heads(products, products.diagonal(dim1=2, dim2=3).isfinite().all(-1))


class _AttentionSum:
    """Sums over images of attention in float64, to which (B, heads, queries, keys) are added.

    Args:
        shape: Sizes (heads, queries, keys) without the padding.
        padding: Attention to the padding, the same for all images, shape (heads, queries, n).
        halves: 2 to sum images with even and with odd numbers separately, and the entropies of
            means over queries.
    """

    def __init__(self, shape: Sequence[int], padding: Tensor, halves: int) -> None:
        # An image with NaN does not count, and gates of NaN make all images so.
        self._padding = padding.to(widest_dtype(padding.device)).nan_to_num()
        self._sums = self._padding.new_zeros((halves, *shape))
        heads, queries, _ = shape
        self._rows = self._padding.new_zeros(halves, heads, 2 * queries + halves - 1)

    def add(self, weights: Tensor, scratch: Tensor, start: int) -> None:
        """Add the attention of images from number ``start`` on;
        ``scratch``, with as many elements, is overwritten.
        """
        # A logit of NaN makes its whole row NaN, so one key shows which rows count.
        is_counted = weights[..., 0].isfinite()
        weights = weights.nan_to_num()
        rows = [entropy_of(weights, scratch.view(weights.shape)), is_counted]
        halves = len(self._sums)
        if halves == 2:
            counts = is_counted.sum(2, keepdim=True).clamp_min(1)
            rows.append(entropy_of(weights.sum(2) / counts)[..., None])
        by_image = torch.cat(rows, -1)
        for offset in range(min(halves, len(weights))):
            half, images = (start + offset) % halves, slice(offset, None, halves)
            part = weights[images]
            # A sum over one image would only copy it, and += would copy the sums onto themselves.
            self._sums[half].add_(part[0] if len(part) == 1 else part.sum(0))
            self._rows[half].add_(by_image[images].sum(0))

    def pattern(self, images: int) -> Pattern:
        """Return the sums over a number of images, with the padding."""
        sums, rows, padding = self._sums, self._rows, self._padding
        queries = sums.shape[2]
        counts = rows[..., queries : 2 * queries]
        rows[..., :queries] += counts * entropy_of(padding)
        most = counts.amax(-1, keepdim=True)
        rows[..., 2 * queries :] += most * entropy_of(padding.mean(1))[:, None]
        of_padding = counts[..., None] * padding
        return Pattern(torch.cat([sums, of_padding], -1), rows, images)
