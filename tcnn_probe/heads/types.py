"""Types of heads by the largest part of their attention's information, on plain arrays."""

import numpy as np

__all__ = ["AVERAGING", "PARTS", "TYPES", "part_types"]

TYPES = ("convolutional", "positional", "content", "salient", "averaging", "mixed")
"""Types of heads by their attention."""
PARTS = (
    "offset_information",
    "position_information",
    "key_content_information",
    "query_key_content_information",
)
"""Variables that add up to the selectivity of a head."""

AVERAGING = 0.05
"""Selectivity below which a head averages, as a share of log keys: it attends to at least N^0.95 of N keys."""


def part_types(
    offset: np.ndarray,
    position: np.ndarray,
    key_content: np.ndarray,
    query_key_content: np.ndarray,
    selectivity: np.ndarray,
    log_keys: np.ndarray,
) -> np.ndarray:
    """Classify heads by the parts of their selectivity, in nat; arrays have the same shape.

    An ``averaging`` head has a selectivity below 0.05 log keys. Else the largest of offset, position and content (the
    sum of key content and query-key content) decides, if it is at least half of the selectivity: the head is
    ``convolutional``, ``positional``, or, by the larger part of content, ``salient`` (key content) or ``content``.
    Heads with no such part are ``mixed``. Parts may be slightly negative, so that two may reach half.

    Args:
        offset, position: Information on the offset from query to key, and on the query's position; NaN without a grid.
        key_content, query_key_content: Information on which keys stand out in the image, and on which keys match a
            query.
        selectivity: Sum of the four parts, log keys minus entropy.
        log_keys: Entropy of uniform attention.

    Returns:
        Strings from :data:`TYPES`, dtype object; "" where a number on which the type depends is not finite.
    """
    content = key_content + query_key_content
    by_content = np.where(query_key_content >= key_content, "content", "salient")
    largest = np.fmax(np.fmax(offset, position), content)
    types = np.full(np.shape(selectivity), "mixed", dtype=object)
    types[position == largest] = "positional"
    types[offset == largest] = "convolutional"
    is_content = content == largest
    types[is_content] = by_content[is_content]
    types[largest < selectivity / 2] = "mixed"
    known = np.isfinite(offset) & np.isfinite(position) & np.isfinite(content)
    # Without a grid, content that is half of the selectivity still decides; offset and position share the rest.
    known |= content >= selectivity / 2
    types[~(known & np.isfinite(selectivity) & np.isfinite(log_keys))] = ""
    types[selectivity < AVERAGING * log_keys] = "averaging"
    return types
