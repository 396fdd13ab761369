"""Types of heads by thresholds, on plain arrays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import cast

import numpy as np

__all__ = ["GATED", "PLAIN", "Thresholds", "gated_types", "plain_types"]

GATED = ("convolutional", "content", "mixed")
"""Types of heads with a gate between positional and content attention."""
PLAIN = ("local", "global", "mixed")
"""Types of heads of plain softmax attention."""


@dataclass(frozen=True)
class Thresholds:
    """Where one type ends and the next begins. A head exactly at a threshold is not "mixed".

    Args:
        gate: share of positional attention, up to which a head is "content" and from which it can be convolutional. By
            default, one of the two parts has at least twice the weight of the other. "content" is the name of a type:
            a low gate alone does not show that attention depends on the image.
        distance: share of the distance of uniform attention, up to which plain attention is local and from which it is
            global.
        entropy: share of the entropy of uniform attention, log N, that the positional part of a convolutional head has
            at most: 0.75 is, in effect, N^0.75 pixels, 27 of 81.

    Raises:
        TypeError, ValueError: no numbers, or not in this order.
    """

    gate: Sequence[float] = (1 / 3, 2 / 3)
    distance: Sequence[float] = (0.5, 0.75)
    entropy: float = 0.75

    def __post_init__(self) -> None:
        """Refuse thresholds that do not ascend."""
        for name, most in (("gate", 1.0), ("distance", math.inf)):
            given = getattr(self, name)
            try:
                low, high = (float(one) for one in given)
            except (TypeError, ValueError) as error:
                raise TypeError(f"expected two thresholds for {name}, got {given!r}") from error
            if not 0 <= low < high <= most or math.isinf(high):
                within = "0 and 1" if most == 1 else "0 and infinity"
                raise ValueError(f"expected two thresholds for {name}, ascending and between {within}, got {given!r}")
            object.__setattr__(self, name, (low, high))
        if not isinstance(cast("object", self.entropy), Real):
            raise TypeError(f"expected a number as the threshold for entropy, got {self.entropy!r}")
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"expected a threshold for entropy between 0 and 1, got {self.entropy!r}")


def gated_types(gate: np.ndarray, spread: np.ndarray, reach: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Types of heads with gated positional attention (T-CNN, Eq. 7).

    ``content``: the gate is at or below the first threshold. ``convolutional``: it is at or above the second, the
    positional part is concentrated, as that of a kernel tap is, and the head looks no farther than uniform attention
    does. That leaves out a corner that all queries look into (and the outermost taps of a kernel half as large again as
    the image). ``mixed``: all others.

    Args:
        gate: sigma(lambda), any shape.
        spread: entropy of the positional attention, as a share of that of uniform attention, same shape.
        reach: distance of the whole attention, as a share of that of uniform attention, same shape.
        thresholds: between the types.

    Returns:
        strings of :data:`GATED`, dtype object, same shape; "" where any of the three is not finite.
    """
    types = np.full(np.shape(gate), "mixed", dtype=object)
    near = (spread <= thresholds.entropy) & (reach <= 1)
    types[(gate >= thresholds.gate[1]) & near] = "convolutional"
    types[gate <= thresholds.gate[0]] = "content"
    types[~(np.isfinite(gate) & np.isfinite(spread) & np.isfinite(reach))] = ""
    return types


def plain_types(reach: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Types of heads of softmax attention: ``local``, ``global`` or, between the two, ``mixed``.

    Args:
        reach: distance of the attention, as a share of that of uniform attention, any shape.
        thresholds: between the types.

    Returns:
        strings of :data:`PLAIN`, dtype object, same shape; "" where it is not finite.
    """
    types = np.full(np.shape(reach), "mixed", dtype=object)
    types[reach <= thresholds.distance[0]] = "local"
    types[reach >= thresholds.distance[1]] = "global"
    types[~np.isfinite(reach)] = ""
    return types
