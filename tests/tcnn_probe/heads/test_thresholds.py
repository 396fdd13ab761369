"""Types by thresholds, for single numbers."""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

from tcnn_probe.heads import GATED, TYPES, Thresholds, content_types, gate_types

NAN = math.nan
INF = math.inf
OWN = Thresholds()
# These numbers are exact in binary, and none is a default.
SET = Thresholds((0.125, 0.25), (0.5, 0.75), 0.25, 0.375, gate=(0.25, 0.5))


def around(*thresholds: float) -> list[float]:
    return [
        np.nextafter(threshold, towards)
        for threshold in thresholds
        # These are the floats just below and just above a threshold, and the threshold itself. Only they reveal a
        # comparison that is wrongly strict.
        for towards in (0, threshold, 2)
    ]


def by_content(
    information: float,
    evenness: float,
    reach: float,
    equivariance: float,
    t: Thresholds,
) -> str:
    if not math.isfinite(information):
        return ""
    if information > t.information[0]:
        return "mixed" if information < t.information[1] else "content"
    if not math.isfinite(evenness):
        return ""
    if evenness > t.entropy[0]:
        return "mixed" if evenness < t.entropy[1] else "averaging"
    if not (math.isfinite(reach) and math.isfinite(equivariance)):
        return ""
    return (
        "convolutional"
        if reach <= t.distance and equivariance >= t.equivariance
        else "mixed"
    )


def by_gate(gate: float, spread: float, reach: float, t: Thresholds) -> str:
    if not all(math.isfinite(number) for number in (gate, spread, reach)):
        return ""
    # NaN was excluded above, so "not greater" means "at most".
    if not gate > t.gate[0]:
        return "content"
    if gate < t.gate[1] or spread > 0.75 or reach > 1:
        return "mixed"
    return "convolutional"


@pytest.mark.parametrize("thresholds", [OWN, SET], ids=["own", "set"])
def test_types_at_and_beside_every_threshold(thresholds: Thresholds) -> None:
    values = list(
        itertools.product(
            # All combinations are needed, because types depend on the order in which numbers are tested.
            [*around(*thresholds.information), -1e-9, 1.0, NAN, INF],
            [*around(*thresholds.entropy), 0.0, 1.2, NAN],
            [*around(thresholds.distance), 0.0, NAN, INF],
            [*around(thresholds.equivariance), -0.1, 1.0, NAN],
        )
    )
    types = content_types(*np.array(values).T, thresholds)
    assert types.dtype == object
    assert types.tolist() == [by_content(*value, thresholds) for value in values]
    # Every type occurs, so that no branch is untested.
    assert set(types) == {*TYPES, ""}


@pytest.mark.parametrize("thresholds", [OWN, SET], ids=["own", "set"])
def test_types_by_the_gate_at_and_beside_every_threshold(
    thresholds: Thresholds,
) -> None:
    values = list(
        itertools.product(
            [*around(*thresholds.gate), 0.0, 1.0, NAN, INF],
            # The limits for the spread, and of 1 for the reach, are constants and not options.
            [*around(0.75), 0.0, 1.0, NAN],
            [*around(0.75, 1.0), 0.0, 1.5, NAN, INF],
        )
    )
    types = gate_types(*np.array(values).T, thresholds)
    assert types.tolist() == [by_gate(*value, thresholds) for value in values]
    assert set(types) == {*GATED, ""}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gate": 0.5}, TypeError, "expected two thresholds for gate, got 0.5"),
        (
            {"information": ("low", 0.3)},
            TypeError,
            "expected two thresholds for information, got ('low', 0.3)",
        ),
        (
            {"gate": (0.5, 1.5)},
            ValueError,
            "for gate, ascending and between 0 and 1, got (0.5, 1.5)",
        ),
        (
            {"gate": (NAN, 0.5)},
            ValueError,
            "for gate, ascending and between 0 and 1, got (nan, 0.5)",
        ),
        (
            {"entropy": (0.5, 0.25)},
            ValueError,
            "for entropy, ascending and between 0 and infinity, got (0.5, 0.25)",
        ),
        (
            {"entropy": (0.5, INF)},
            ValueError,
            "for entropy, ascending and between 0 and infinity",
        ),
        (
            {"distance": NAN},
            ValueError,
            "expected a finite threshold of at least 0 for distance, got nan",
        ),
        (
            {"equivariance": "0.5"},
            TypeError,
            "expected a number as the threshold for equivariance, got '0.5'",
        ),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Thresholds(**arguments)
