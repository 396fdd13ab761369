"""Types by the rules, for single numbers, against slow rewrites of them."""

import itertools
import math

import numpy as np
import pytest

from tcnn_probe.heads import GATED, TYPES, gate_types, part_types

NAN = math.nan
INF = math.inf


def by_parts(
    offset: float,
    position: float,
    key: float,
    matching: float,
    selectivity: float,
    limit: float,
    prefix: float = 0.0,
) -> str:
    """Return the type as the table of the documents describes it."""
    if not (math.isfinite(selectivity) and math.isfinite(limit)):
        return ""
    if selectivity < limit:
        return "averaging"
    content = key + matching
    if not math.isfinite(content):
        return ""
    of_content = "content" if matching >= key else "salient"
    if not (math.isfinite(offset) and math.isfinite(position)):
        # Without a grid, content that is at least half decides.
        return of_content if content >= selectivity / 2 else ""
    prefix = 0.0 if math.isnan(prefix) else prefix
    rest = selectivity - prefix
    if prefix >= rest:
        return "positional"
    parts = [
        (offset - prefix, "convolutional"),
        (position, "positional"),
        (content, of_content),
    ]
    largest, label = max(parts, key=lambda part: part[0])
    # Of equal parts, which types of content, then offset, precede is a convention.
    for value, name in (parts[2], parts[0], parts[1]):
        if value == largest:
            label = name
            break
    return label if largest >= rest / 2 else "mixed"


def test_types_by_parts_at_and_beside_every_limit() -> None:
    # Eighths are exact in binary, so that sums and halves are.
    values = [-0.125, 0.0, 0.25, 0.5, 0.625, 1.0, NAN]
    rows = [
        (*parts, total, limit, prefix)
        for prefix in (0.0, 0.25, 0.5, NAN)
        for parts in itertools.product(values, repeat=4)
        for limit in (0.125, 0.75, NAN)
        for total in (sum(parts), 1.0, limit, np.nextafter(limit, 0), INF)
    ]
    types = part_types(*np.array(rows).T)
    assert types.dtype == object
    assert types.tolist() == [by_parts(*row) for row in rows]
    # Every type occurs, so that no branch is untested.
    assert set(types) == {*TYPES, ""}
    # Content of exactly half decides, and a selectivity of exactly the least is not averaging.
    parts = [np.array([part]) for part in (0.375, 0.125, 0.25, 0.25)]
    assert part_types(*parts, np.ones(1), np.ones(1)).tolist() == ["content"]


def around(*limits: float) -> list[float]:
    """Return the floats just below and above each limit,
    and the limit: only they reveal a wrong comparison.
    """
    return [np.nextafter(limit, towards) for limit in limits for towards in (0, limit, 2)]


def by_gate(gate: float, spread: float, reach: float, limits: tuple[float, float]) -> str:
    if not all(math.isfinite(number) for number in (gate, spread, reach)):
        return ""
    # NaN was excluded above, so "not greater" means "at most".
    if not gate > limits[0]:
        return "content"
    if gate < limits[1] or spread > 0.75 or reach > 1:
        return "mixed"
    return "convolutional"


@pytest.mark.parametrize("limits", [(1 / 3, 2 / 3), (0.25, 0.5)])
def test_types_by_the_gate_at_and_beside_every_limit(
    limits: tuple[float, float],
) -> None:
    values = list(
        itertools.product(
            [*around(*limits), 0.0, 1.0, NAN, INF],
            # The limits for the spread, and of 1 for the reach, are constants and not options.
            [*around(0.75), 0.0, 1.0, NAN],
            [*around(0.75, 1.0), 0.0, 1.5, NAN, INF],
        )
    )
    types = gate_types(*np.array(values).T, limits)
    assert types.tolist() == [by_gate(*value, limits) for value in values]
    assert set(types) == {*GATED, ""}
