"""Attention between segments: groups of tokens such as class tokens, registers and patches."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tcnn_probe.attention.feature_maps import MOST_SPECIAL
from tcnn_probe.attention.softmax_statistics import LOWEST, SoftmaxRows

if TYPE_CHECKING:
    from tcnn_probe.attention.softmax import SoftmaxAttention

__all__ = ["SEGMENTS", "share_between_segments"]

SEGMENTS = ("class", "register", "patch", "text", "other")
"""The segments: class and distillation tokens, registers, patches on the grid, words that the model
gets beside images, and other tokens, such as latents or queries.
"""


@torch.no_grad()
def share_between_segments(attention: "SoftmaxAttention", rows: SoftmaxRows) -> Tensor | None:
    """Return sums of A_ij over the keys of each segment, as means over the queries of each segment.

    Args:
        attention: Attention of B images.
        rows: Statistics of the attention's rows.

    Returns:
        Shape (B, heads, segments of queries, segments of keys), 0 for segments without queries;
        None if the grid of keys is unknown.
    """
    if attention.layout.keys is None:
        return None
    # This is 0, but NaN where the attention is NaN.
    none = 0 * rows.entropy
    prefix = none if rows.prefix is None else rows.prefix

    def first(count: int) -> Tensor:
        """Return the attention to the first ``count`` tokens before the grid."""
        if rows.find_first is None or count == attention.layout.prefix:
            return prefix
        return rows.find_first(count) if count else none

    classes, specials = first(attention.class_tokens), first(_special_tokens(attention))
    # A query from which all keys are hidden does not attend to patches, either.
    blind = (rows.largest == LOWEST) | (rows.largest == -torch.inf)
    shares = dict.fromkeys(SEGMENTS, none)
    shares["class"] = classes
    # The clamps remove negative numbers, which rounding can leave if a segment gets no attention.
    shares[_unplaced(attention)] = (specials - classes).clamp_(min=0)
    shares["text"] = (prefix - specials).clamp_(min=0)
    shares["patch"] = (1 - prefix).clamp_(min=0).masked_fill_(blind, 0)
    by_key = torch.stack(list(shares.values()), -1)
    counted = attention.by_image(torch.ones_like(blind[:, :1]))
    if attention.visibility is not None:
        counted = attention.visibility.queries[:, :, None]
    by_image = attention.by_image(by_key)  # (B, windows, heads, N_query, segments)
    shape = attention.images, attention.heads, len(SEGMENTS), len(SEGMENTS)
    by_segment = by_key.new_zeros(shape)
    for segment, queries in _queries(attention):
        real = counted[..., queries, None]
        total = by_image[:, :, :, queries].where(real, 0).sum((1, 3))
        share = total / real.sum((1, 3)).clamp_min(1)
        by_segment[:, :, SEGMENTS.index(segment)] = share
    return by_segment


def _special_tokens(attention: "SoftmaxAttention") -> int:
    """Return the number of tokens before the grid that are not words."""
    return attention.layout.prefix - attention.layout.words


def _unplaced(attention: "SoftmaxAttention") -> str:
    """Return the segment of tokens before the grid
    that are neither class tokens nor known to be words.
    """
    # More than MOST_SPECIAL tokens must be words, prompts or the queries of a detector.
    return "register" if _special_tokens(attention) <= MOST_SPECIAL else "other"


def _queries(attention: "SoftmaxAttention") -> Iterator[tuple[str, slice]]:
    """Yield each segment that has queries, with the slice of its queries, which are contiguous."""
    layout, count = attention.layout, attention.queries
    patches, words, unplaced = 0, 0, "other"
    if layout.queries is not None:
        patches = layout.queries.height * layout.queries.width
        classes = min(layout.queries.prefix, attention.class_tokens)
        words = layout.words
        unplaced = _unplaced(attention)
    elif layout.asking == "classes":
        classes = count
    elif layout.asking == "words":
        classes, words = 0, count
    elif layout.asking == "tokens" and count <= layout.prefix:
        # All queries are tokens before the grid.
        classes = min(count, attention.class_tokens)
        unplaced = _unplaced(attention)
    else:
        classes = 0 if attention.class_query is None else 1
    lengths = {
        "class": classes,
        unplaced: count - classes - words - patches,
        "text": words,
        "patch": patches,
    }
    start = 0
    for segment, length in lengths.items():
        if length:
            yield segment, slice(start, start + length)
        start += length
