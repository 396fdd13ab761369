"""The numbers of a page: every variable of every run in one block of float64, and a table that says where."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnn_probe.reporting.recordings import TYPE, Axes, Run

__all__ = ["label", "unit", "variables_of"]

_OF = {1: "model", 2: "layer", 3: "head"}
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def variables_of(axes: Axes, runs: Sequence[Run]) -> tuple[list[dict[str, Any]], bytes]:
    """Describe the variables, types first; and give their values, (marks, layers, heads) of one run after another.

    The values are all first bytes of the numbers, all second ones, ..., which Bokeh compresses better. ``starts`` says
    where each run's begin, None where a run has none.
    """
    table: list[dict[str, Any]] = []
    blocks: list[NDArray[np.float64]] = []
    for name, attrs in (axes.numbers | axes.scalars).items():
        values = [axes.values(run, name) for run in runs]
        there = [one.ravel() for one in values if one is not None]
        known = np.concatenate(there)
        known = known[np.isfinite(known)]
        with np.errstate(invalid="ignore"):  # infinities
            apart = np.abs(there[0] - there[1]) if len(there) == 2 else np.zeros(1)
        starts = []
        for one in values:
            starts.append(None if one is None else sum(map(len, blocks)))
            blocks += [] if one is None else [one.ravel()]
        of = _OF[next(one.ndim for one in values if one is not None)]
        table.append(
            {
                "name": name,
                "label": label(name),
                "unit": unit(attrs),
                "meaning": attrs.get("description", ""),
                "of": of,
                "types": name == TYPE,
                "curve": of != "layer" and name != TYPE,
                "starts": starts,
                "limits": [float(known.min()), float(known.max())],
                "widest": float(apart[np.isfinite(apart)].max(initial=0)),
            }
        )
    if not blocks:
        raise ValueError(f"no variable of {runs[0].name} has a value: there is nothing to show")
    shuffled = np.concatenate(blocks).astype("<f8").view(np.uint8).reshape(-1, 8).T
    table.sort(key=lambda one: (not one["types"], ("head", "layer", "model").index(one["of"])))
    return table, shuffled.tobytes()


def label(name: str) -> str:
    """A variable's name in words."""
    return "type" if name == TYPE else name.replace("_", " ")


def unit(attrs: dict[str, Any]) -> str:
    """With a space before it; "" if it is 1."""
    found = str(attrs.get("units", "1"))
    base = found.rstrip("-0123456789")
    return f" {base}{found[len(base) :].translate(_SUPERSCRIPT)}" if base else ""
