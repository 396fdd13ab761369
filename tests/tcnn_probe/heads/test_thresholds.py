"""Types by thresholds, number by number."""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

from tcnn_probe.heads import GATED, PLAIN, Thresholds, gated_types, plain_types

NAN, INF = math.nan, math.inf


def by_hand(gate: float, spread: float, reach: float, t: Thresholds) -> str:
    if not all(math.isfinite(one) for one in (gate, spread, reach)):
        return ""
    if not gate > t.gate[0]:
        return "content"
    if gate < t.gate[1] or spread > t.entropy or reach > 1:
        return "mixed"
    return "convolutional"


@pytest.mark.parametrize("thresholds", [Thresholds(), Thresholds((0.25, 0.5), (0.125, 0.25), 0.5)], ids=["own", "set"])
def test_types_at_and_beside_every_threshold(thresholds: Thresholds) -> None:
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
    assert types.tolist() == [by_hand(*value, thresholds) for value in values]
    assert set(types) == {*GATED, ""}
    low, high = thresholds.distance
    reach = [[0.0, low, np.nextafter(low, 1), np.nextafter(high, 0)], [high, 1.3, NAN, -INF]]
    expected = [["local", "local", "mixed", "mixed"], ["global", "global", "", ""]]
    assert plain_types(np.array(reach), thresholds).tolist() == expected
    assert set(PLAIN) == {"local", "global", "mixed"}


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"gate": 0.5}, TypeError, "expected two thresholds for gate, got 0.5"),
        ({"distance": ("low", 0.3)}, TypeError, "expected two thresholds for distance, got ('low', 0.3)"),
        ({"gate": (0.5, 1.5)}, ValueError, "for gate, ascending and between 0 and 1, got (0.5, 1.5)"),
        ({"gate": (NAN, 0.5)}, ValueError, "for gate, ascending and between 0 and 1, got (nan, 0.5)"),
        ({"distance": (0.5, 0.25)}, ValueError, "for distance, ascending and between 0 and infinity, got (0.5, 0.25)"),
        ({"distance": (0.5, INF)}, ValueError, "for distance, ascending and between 0 and infinity"),
        ({"entropy": NAN}, ValueError, "expected a threshold for entropy between 0 and 1, got nan"),
        ({"entropy": "0.5"}, TypeError, "expected a number as the threshold for entropy, got '0.5'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=re.escape(told)):
        Thresholds(**given)
