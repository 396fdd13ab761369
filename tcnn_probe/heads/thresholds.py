"""Types of heads by thresholds, on plain arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import cast

import numpy as np

__all__ = ["CONCENTRATED", "GATED", "TYPES", "Thresholds", "content_types", "gate_types"]

TYPES = ("convolutional", "averaging", "content", "mixed")
"""Types of heads by what their attention does."""
GATED = ("convolutional", "content", "mixed")
"""Types of heads by their gate."""

CONCENTRATED = 0.75
"""By the gate: entropy of the positional part, as a share of that of uniform attention: in effect 27 of 81 pixels."""
_MOST = {"information": 1.0, "entropy": np.inf, "gate": 1.0}


@dataclass(frozen=True)
class Thresholds:
    """Limits between the types of heads. A head exactly at a threshold is not "mixed".

    Args:
        information: content information as a share of its bound, log min(images, keys): up to the first a head is
            static, from the second on it is "content".
        entropy: share of the entropy of uniform attention, up to which a static head can be "convolutional", and from
            which it is "averaging": 0.95 is, in effect, N^0.95 keys, 151 of 197.
        distance: share of the distance of uniform attention that a convolutional head has at most.
        equivariance: of a convolutional head, at least: half of the variance of its static pattern.
        gate: share of positional attention, up to which a head is "content" by its gate, and from which it can be
            "convolutional" by its gate. By default, one of the two parts has at least twice the weight of the other.

    Raises:
        TypeError, ValueError: no numbers, or not in this order.
    """

    information: Sequence[float] = (0.02, 0.1)
    entropy: Sequence[float] = (0.85, 0.95)
    distance: float = 0.8
    equivariance: float = 0.5
    gate: Sequence[float] = (1 / 3, 2 / 3)

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            given = getattr(self, name)
            if name not in _MOST:
                if not isinstance(cast("object", given), Real):
                    raise TypeError(f"expected a number as the threshold for {name}, got {given!r}")
                if not 0 <= given < np.inf:
                    raise ValueError(f"expected a finite threshold of at least 0 for {name}, got {given!r}")
                continue
            try:
                low, high = (float(one) for one in given)
            except (TypeError, ValueError) as error:
                raise TypeError(f"expected two thresholds for {name}, got {given!r}") from error
            if not 0 <= low < high <= _MOST[name] or high == np.inf:
                within = "0 and 1" if _MOST[name] == 1 else "0 and infinity"
                raise ValueError(f"expected two thresholds for {name}, ascending and between {within}, got {given!r}")
            object.__setattr__(self, name, (low, high))


def content_types(
    information: np.ndarray,
    evenness: np.ndarray,
    reach: np.ndarray,
    equivariance: np.ndarray,
    thresholds: Thresholds,
) -> np.ndarray:
    """Types of heads by what their attention does; arrays have the same shape.

    ``content``: the image decides where the head looks. ``averaging``: it does not, and attention is nearly even.
    ``convolutional``: it does not, and attention is neither even nor far, and depends on the offset from query to key.
    ``mixed``: all others.

    Args:
        information: content information, as a share of log min(images, keys).
        evenness: entropy of the attention, as a share of that of uniform attention.
        reach: distance of the attention, as a share of that of uniform attention.
        equivariance: translation equivariance of the mean attention.
        thresholds: between the types.

    Returns:
        strings of :data:`TYPES`, dtype object; "" where something on which the type depends is not finite.
    """
    static, dynamic = information <= thresholds.information[0], information >= thresholds.information[1]
    uneven = static & (evenness <= thresholds.entropy[0])
    types = np.full(np.shape(information), "mixed", dtype=object)
    types[dynamic] = "content"
    types[static & (evenness >= thresholds.entropy[1])] = "averaging"
    types[uneven & (reach <= thresholds.distance) & (equivariance >= thresholds.equivariance)] = "convolutional"
    known = np.isfinite(information) & (dynamic | ~static | np.isfinite(evenness))
    types[~(known & (~uneven | (np.isfinite(reach) & np.isfinite(equivariance))))] = ""
    return types


def gate_types(gate: np.ndarray, spread: np.ndarray, reach: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Types of heads by their gate (T-CNN, Eq. 7); arrays have the same shape.

    ``content``: the gate is at or below the first threshold, which does not show that attention depends on the image.
    ``convolutional``: it is at or above the second, the positional part is concentrated, as that of a kernel tap is,
    and the head looks no farther than uniform attention does. That leaves out a corner that all queries look into.
    ``mixed``: all others.

    Args:
        gate: sigma(lambda).
        spread: entropy of the positional attention, as a share of that of uniform attention.
        reach: distance of the whole attention, as a share of that of uniform attention.
        thresholds: between the types.

    Returns:
        strings of :data:`GATED`, dtype object; "" where any of the three is not finite.
    """
    types = np.full(np.shape(gate), "mixed", dtype=object)
    near = (spread <= CONCENTRATED) & (reach <= 1)
    types[(gate >= thresholds.gate[1]) & near] = "convolutional"
    types[gate <= thresholds.gate[0]] = "content"
    types[~(np.isfinite(gate) & np.isfinite(spread) & np.isfinite(reach))] = ""
    return types
