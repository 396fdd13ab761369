"""Numbers of a page: every variable of every run in a block of float64, and a table of their places."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnn_probe.reporting.recordings import TYPE, Axes, Run

__all__ = ["label", "pack_variables", "unit"]

_LEVELS = {1: "model", 2: "layer", 3: "head"}  # by the number of dimensions
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def pack_variables(
    axes: Axes, runs: Sequence[Run]
) -> tuple[list[dict[str, Any]], bytes]:
    """Describe the variables, types first; and pack their values, (marks, layers, heads), run after run.

    All first bytes of the numbers come first, then all second bytes, ..., which Bokeh compresses better. ``starts``
    holds the place where the values of each run begin, None where a run has none.
    """
    table: list[dict[str, Any]] = []
    blocks: list[NDArray[np.float64]] = []
    length = 0
    for name, attrs in (axes.numbers | axes.scalars).items():
        values = [axes.values(run, name) for run in runs]
        arrays = [array for array in values if array is not None]
        level = _LEVELS[arrays[0].ndim]
        numbers = np.concatenate(arrays, None)
        finite = numbers[np.isfinite(numbers)]
        with np.errstate(invalid="ignore"):  # inf - inf
            differences = (
                np.abs(arrays[0] - arrays[1]) if len(arrays) == 2 else np.zeros(1)
            )
        starts: list[int | None] = []
        for array in values:
            starts.append(None if array is None else length)
            length += 0 if array is None else array.size
        blocks.append(numbers)
        table.append(
            {
                "name": name,
                "label": label(name),
                "unit": unit(attrs),
                "meaning": attrs.get("description", ""),
                "of": level,
                "types": name == TYPE,
                "curve": level != "layer" and name != TYPE,
                "starts": starts,
                "limits": [float(finite.min()), float(finite.max())],
                "widest": float(differences[np.isfinite(differences)].max(initial=0)),
            }
        )
    if not blocks:
        raise ValueError(
            f"no variable of {runs[0].name} has a value: there is nothing to show"
        )
    shuffled = np.concatenate(blocks).astype("<f8").view(np.uint8).reshape(-1, 8).T
    table.sort(
        key=lambda row: (not row["types"], ("head", "layer", "model").index(row["of"]))
    )
    return table, shuffled.tobytes()


def label(name: str) -> str:
    """Return a variable's name in words."""
    return "type" if name == TYPE else name.replace("_", " ")


def unit(attrs: dict[str, Any]) -> str:
    """Return a variable's unit with a space before it; "" if it is 1."""
    units = str(attrs.get("units", "1"))
    base = units.rstrip("-0123456789")
    return f" {base}{units[len(base) :].translate(_SUPERSCRIPT)}" if base else ""
