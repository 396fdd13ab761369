"""Types of heads by the largest part of their attention's information,
or by their gate, on plain arrays.
"""

from collections.abc import Sequence

import numpy as np

__all__ = [
    "AVERAGING",
    "GATED",
    "PARTS",
    "PREFIX",
    "TYPES",
    "gate_types",
    "part_types",
]

TYPES = ("convolutional", "positional", "content", "salient", "averaging", "mixed")
"""Types of heads by their attention."""
GATED = ("convolutional", "content", "mixed")
"""Types of heads by their gate."""
PARTS = (
    "offset_information",
    "position_information",
    "key_content_information",
    "query_key_content_information",
)
"""Variables that add up to the selectivity of a head."""
PREFIX = "prefix_information"
"""Part of offset information that is no convolution:
attention that class and register tokens receive alike always.
"""

AVERAGING = 0.05
"""Selectivity below which a head averages,
as a share of log keys: it attends to at least N^0.95 of N keys.
"""

CONCENTRATED = 0.75
"""Largest entropy of a convolutional head's positional part,
as a share of that of uniform attention.

On a grid of 81 pixels this is the entropy of uniform attention to 27 pixels.
"""


def part_types(
    offset: np.ndarray,
    position: np.ndarray,
    key_content: np.ndarray,
    query_key_content: np.ndarray,
    selectivity: np.ndarray,
    least_selectivity: np.ndarray,
    prefix: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Classify heads by the parts of their selectivity, in nat; arrays have the same shape.

    A head with less than the least selectivity is ``averaging``. Else what class and register
    tokens receive in every image from every place alike is set aside: if this is at least half of
    the selectivity, the head is ``positional``, as it attends to a fixed place. Else the largest of
    offset, position and content (the sum of key content and query-key content) decides, if it is at
    least half of the rest: the head is ``convolutional``, ``positional``, or, by the larger part of
    content, ``salient`` (key content) or ``content``. Heads with no such part are ``mixed``. Parts
    may be slightly negative, so that two may reach half.

    Args:
        offset, position: Information on the offset from query to key, and on the query's position;
            NaN without a grid. Offset information includes that of the prefix.
        key_content, query_key_content: Information on which keys stand out in the image, and on
            which keys match a query.
        selectivity: Sum of the four parts, log keys minus entropy.
        least_selectivity: Selectivity below which a head averages.
        prefix: Information on class and register tokens, a part of offset information; NaN counts
            as 0.

    Returns:
        Strings from :data:`TYPES`, dtype object; "" where a number on which the type depends is not
        finite.
    """
    content = key_content + query_key_content
    by_content = np.where(query_key_content >= key_content, "content", "salient")
    on_grid = np.isfinite(offset) & np.isfinite(position)
    prefix = np.where(on_grid, np.nan_to_num(prefix), 0)
    rest = selectivity - prefix
    # Without a grid, content that is half of the selectivity decides: offset and position share the
    # rest.
    static = np.where(on_grid, [offset - prefix, position], -np.inf)
    largest = np.maximum(static.max(0), content)
    types = np.full(np.shape(selectivity), "mixed", dtype=object)
    types[static[1] == largest] = "positional"
    types[static[0] == largest] = "convolutional"
    is_content = content == largest
    types[is_content] = by_content[is_content]
    decided = largest >= rest / 2
    types[~decided] = "mixed"
    types[on_grid & (prefix >= rest)] = "positional"
    known = np.isfinite(content) & (on_grid | decided)
    known &= np.isfinite(selectivity) & np.isfinite(least_selectivity)
    types[~known] = ""
    types[selectivity < least_selectivity] = "averaging"
    return types


def gate_types(
    gate: np.ndarray,
    spread: np.ndarray,
    reach: np.ndarray,
    limits: Sequence[float] = (1 / 3, 2 / 3),
) -> np.ndarray:
    """Classify heads by their gate (T-CNN, Eq. 7); arrays have the same shape.

    The gate of a ``content`` head is at or below the first limit, which does not show that
    attention depends on the image. The gate of a ``convolutional`` head is at or above the second
    limit; its positional part is concentrated, like that of a kernel tap, and its attention is no
    farther than uniform attention, which excludes heads whose queries all attend to one corner. All
    other heads are ``mixed``.

    Args:
        gate: Gate sigma(lambda).
        spread: Entropy of the positional attention, as a share of that of uniform attention.
        reach: Distance of the whole attention, as a share of that of uniform attention.
        limits: Gates up to which a head is "content", and from which on it can be "convolutional".
            By default, one part then has at least twice the weight of the other.

    Returns:
        Strings from :data:`GATED`, dtype object; "" where gate, spread or reach is not finite.
    """
    types = np.full(np.shape(gate), "mixed", dtype=object)
    near = (spread <= CONCENTRATED) & (reach <= 1)
    types[(gate >= limits[1]) & near] = "convolutional"
    types[gate <= limits[0]] = "content"
    types[~(np.isfinite(gate) & np.isfinite(spread) & np.isfinite(reach))] = ""
    return types
