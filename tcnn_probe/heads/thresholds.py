"""Types of heads by thresholds, on plain arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

__all__ = [
    "CONCENTRATED",
    "GATED",
    "TYPES",
    "Thresholds",
    "content_types",
    "gate_types",
]

TYPES = ("convolutional", "averaging", "content", "mixed")
"""Types of heads by their attention."""
GATED = ("convolutional", "content", "mixed")
"""Types of heads by their gate."""

CONCENTRATED = 0.75
"""Largest entropy of a convolutional head's positional part, as a share of that of uniform attention.

On a grid of 81 pixels this is the entropy of uniform attention to 27 pixels.
"""
_UPPER_BOUNDS = {"information": 1.0, "entropy": np.inf, "gate": 1.0}


@dataclass(frozen=True)
class Thresholds:
    """Limits between the types of heads. A head exactly at a threshold is not "mixed".

    Args:
        information: Content information as a share of log keys, for any number of images: up to the first threshold a
            head is static, from the second on it is "content".
        entropy: Share of the entropy of uniform attention, up to which a static head can be "convolutional", and from
            which on it is "averaging": a share of 0.95 corresponds to N^0.95 keys, 151 of 197.
        distance: Largest distance of a convolutional head, as a share of that of uniform attention.
        equivariance: Smallest equivariance of a convolutional head: half of the variance of its static pattern.
        gate: Share of positional attention, up to which a head is "content" by its gate, and from which on it can be
            "convolutional" by its gate. By default, one part then has at least twice the weight of the other.

    Raises:
        TypeError, ValueError: Thresholds are not numbers, or do not ascend.
    """

    # These values are our conventions. Between the two thresholds of a pair a head is mixed, so that small differences
    # do not turn one type into the other.
    information: Sequence[float] = (0.02, 0.1)
    entropy: Sequence[float] = (0.85, 0.95)
    distance: float = 0.8
    equivariance: float = 0.5
    gate: Sequence[float] = (1 / 3, 2 / 3)

    def __post_init__(self) -> None:
        for name in ("distance", "equivariance"):
            limit = getattr(self, name)
            if not isinstance(limit, Real):
                raise TypeError(
                    f"expected a number as the threshold for {name}, got {limit!r}"
                )
            if not 0 <= float(limit) < np.inf:
                raise ValueError(
                    f"expected a finite threshold of at least 0 for {name}, got {limit!r}"
                )
        for name, bound in _UPPER_BOUNDS.items():
            limits = getattr(self, name)
            try:
                low, high = map(float, limits)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"expected two thresholds for {name}, got {limits!r}"
                ) from error
            if not 0 <= low < high <= bound or high == np.inf:
                span = "0 and 1" if bound == 1 else "0 and infinity"
                raise ValueError(
                    f"expected two thresholds for {name}, ascending and between {span}, got {limits!r}"
                )
            # Lists and arrays of the user become tuples of floats. The class is frozen, so setattr() would raise.
            object.__setattr__(self, name, (low, high))


def content_types(
    information: np.ndarray,
    evenness: np.ndarray,
    reach: np.ndarray,
    equivariance: np.ndarray,
    thresholds: Thresholds,
) -> np.ndarray:
    """Classify heads by their attention; arrays have the same shape.

    The attention of a ``content`` head depends on the image. That of an ``averaging`` head does not, and is nearly
    even. That of a ``convolutional`` head does not, is neither even nor far, and depends on the offset from query to
    key. All other heads are ``mixed``.

    Args:
        information: Content information, as a share of log keys.
        evenness: Entropy of the attention, as a share of that of uniform attention.
        reach: Distance of the attention, as a share of that of uniform attention.
        equivariance: Translation equivariance of the mean attention.
        thresholds: Thresholds between the types.

    Returns:
        Strings from :data:`TYPES`, dtype object; "" where a number on which the type depends is not finite.
    """
    static, dynamic = (
        information <= thresholds.information[0],
        information >= thresholds.information[1],
    )
    uneven = static & (evenness <= thresholds.entropy[0])
    types = np.full(np.shape(information), "mixed", dtype=object)
    types[dynamic] = "content"
    types[static & (evenness >= thresholds.entropy[1])] = "averaging"
    types[
        uneven
        & (reach <= thresholds.distance)
        & (equivariance >= thresholds.equivariance)
    ] = "convolutional"
    # Evenness matters for static heads only, and reach and equivariance for uneven static heads only.
    defined = np.isfinite(information) & (dynamic | ~static | np.isfinite(evenness))
    types[~(defined & (~uneven | (np.isfinite(reach) & np.isfinite(equivariance))))] = (
        ""
    )
    return types


def gate_types(
    gate: np.ndarray, spread: np.ndarray, reach: np.ndarray, thresholds: Thresholds
) -> np.ndarray:
    """Classify heads by their gate (T-CNN, Eq. 7); arrays have the same shape.

    The gate of a ``content`` head is at or below the first threshold, which does not show that attention depends on the
    image. The gate of a ``convolutional`` head is at or above the second threshold; its positional part is
    concentrated, like that of a kernel tap, and its attention is no farther than uniform attention, which excludes
    heads whose queries all attend to one corner. All other heads are ``mixed``.

    Args:
        gate: Gate sigma(lambda).
        spread: Entropy of the positional attention, as a share of that of uniform attention.
        reach: Distance of the whole attention, as a share of that of uniform attention.
        thresholds: Thresholds between the types.

    Returns:
        Strings from :data:`GATED`, dtype object; "" where gate, spread or reach is not finite.
    """
    types = np.full(np.shape(gate), "mixed", dtype=object)
    near = (spread <= CONCENTRATED) & (reach <= 1)
    types[(gate >= thresholds.gate[1]) & near] = "convolutional"
    types[gate <= thresholds.gate[0]] = "content"
    types[~(np.isfinite(gate) & np.isfinite(spread) & np.isfinite(reach))] = ""
    return types
