"""Types by thresholds, number by number."""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

from tcnn_probe.heads import GATED, PLAIN, Thresholds, gated_types, plain_types

NAN, INF = math.nan, math.inf
DEFAULT = Thresholds()


def of_gated(gate: float, spread: float, reach: float, t: Thresholds) -> str:
    if any(math.isnan(one) or math.isinf(one) for one in (gate, spread, reach)):
        return ""
    if not gate > t.gate[0]:
        return "content"
    if gate < t.gate[1] or spread > t.entropy or reach > 1:
        return "mixed"
    return "convolutional"


@pytest.mark.parametrize("thresholds", [DEFAULT, Thresholds((0.25, 0.5), (0.125, 0.25), 0.5)], ids=["default", "given"])
def test_gated_heads_of_every_kind(thresholds: Thresholds) -> None:
    """Below, at and above every threshold, and what is no number."""

    def around(*thresholds: float) -> list[float]:
        return [value for one in thresholds for value in (np.nextafter(one, 0), one, np.nextafter(one, 2))]

    values = list(
        itertools.product(
            [*around(*thresholds.gate), 0.0, 1.0, NAN, INF],
            [*around(thresholds.entropy), 0.0, 1.0, NAN],
            [*around(0.75, 1.0), 0.0, 1.5, NAN, INF],
        )
    )
    types = gated_types(*np.array(values).T, thresholds)
    assert types.dtype == object
    assert types.tolist() == [of_gated(*value, thresholds) for value in values]
    assert set(types) == {*GATED, ""}


@pytest.mark.parametrize(
    ("gate", "spread", "reach", "expected"),
    [
        (1 / 3, 0.5, 0.5, "content"),  # ties
        (2 / 3, 0.75, 1.0, "convolutional"),
        (0.5, 0.1, 0.1, "mixed"),
        (0.73, 0.49, 0.44, "convolutional"),  # a T-CNN as the papers start it, on 7 x 7
        (1.0, 1.0, 1.0, "mixed"),  # positional attention without any locality: an average of all
        (1.0, 0.1, 1.3, "mixed"),  # every query looks into the same corner
        (0.0, 0.1, 0.1, "content"),
    ],
)
def test_gated_heads(gate: float, spread: float, reach: float, expected: str) -> None:
    assert gated_types(*np.array([[gate], [spread], [reach]]), DEFAULT).tolist() == [expected]


def test_plain_heads() -> None:
    values = [0.0, 0.25, 0.5, np.nextafter(0.5, 1), 0.7, np.nextafter(0.75, 0), 0.75, 1.0, 1.3, NAN, INF, -INF]
    expected = ["local"] * 3 + ["mixed"] * 3 + ["global"] * 3 + [""] * 3
    assert plain_types(np.array(values), DEFAULT).tolist() == expected
    assert set(expected) == {*PLAIN, ""}
    assert plain_types(np.array([[0.25], [0.3]]), Thresholds(distance=(0.25, 0.26))).tolist() == [["local"], ["global"]]


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"gate": 0.5}, TypeError, "expected two thresholds for gate, got 0.5"),
        ({"gate": (0.1, 0.2, 0.3)}, TypeError, "expected two thresholds for gate, got (0.1, 0.2, 0.3)"),
        ({"distance": ("low", 0.3)}, TypeError, "expected two thresholds for distance, got ('low', 0.3)"),
        ({"gate": (0.5, 0.5)}, ValueError, "for gate, ascending and between 0 and 1, got (0.5, 0.5)"),
        ({"gate": (0.5, 1.5)}, ValueError, "for gate, ascending and between 0 and 1, got (0.5, 1.5)"),
        ({"gate": (NAN, 0.5)}, ValueError, "for gate, ascending and between 0 and 1, got (nan, 0.5)"),
        ({"distance": (0.5, 0.25)}, ValueError, "for distance, ascending and between 0 and infinity, got (0.5, 0.25)"),
        ({"distance": (0.5, INF)}, ValueError, "for distance, ascending and between 0 and infinity"),
        ({"entropy": 1.5}, ValueError, "expected a threshold for entropy between 0 and 1, got 1.5"),
        ({"entropy": NAN}, ValueError, "expected a threshold for entropy between 0 and 1, got nan"),
        ({"entropy": "0.5"}, TypeError, "expected a number as the threshold for entropy, got '0.5'"),
    ],
)
def test_what_is_no_threshold(given: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=re.escape(told)):
        Thresholds(**given)
