"""Numbers of a page: every variable of every run
in a block of float32, and a table of their places.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnn_probe.heads.types import PARTS, PREFIX
from tcnn_probe.reporting.recordings import TYPE, Axes, Run

__all__ = ["label", "pack_variables", "unit"]

_LEVELS = {1: "model", 2: "layer", 3: "head"}  # by the number of dimensions
# Variables of heads in the order in which the page shows them, before all others.
_LEADING = (
    TYPE, "uncertain_type", "selectivity", *PARTS, PREFIX, "attention_distance", "object_attention",
    "class_object_attention", "cost_zero", "cost_static", "cost_convolutional",
    "cost_salient", "cost_uniform",
    "sink_images", "sink_value_norm", "output_norm",
)  # fmt: skip
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def pack_variables(axes: Axes, runs: Sequence[Run]) -> tuple[list[dict[str, Any]], bytes]:
    """Describe the variables, types first; and pack their values,
    (marks, layers, heads), run after run.

    All first bytes of the numbers come first, then all second bytes, ..., which Bokeh compresses
    better. ``starts`` holds the place where the values of each run begin, None where a run has
    none.
    """
    table: list[dict[str, Any]] = []
    blocks: list[NDArray[np.float64]] = []
    length = 0
    for name, attrs in (axes.numbers | axes.scalars).items():
        arrays = [axes.values(run, name) for run in runs]
        starts: list[int | None] = []
        for array in arrays:
            starts.append(None if array is None else length)
            length += 0 if array is None else array.size
        packed = [array for array in arrays if array is not None]
        level = _LEVELS[packed[0].ndim]
        numbers = np.concatenate(packed, None)
        finite = numbers[np.isfinite(numbers)]
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
                "widest": _largest_difference(arrays),
            }
        )
    if not blocks:
        raise ValueError(f"no variable of {runs[0].name} has a value: there is nothing to show")
    shuffled = np.concatenate(blocks).astype("<f4").view(np.uint8).reshape(-1, 4).T
    table.sort(key=_place_on_page)
    return table, shuffled.tobytes()


def _place_on_page(row: dict[str, Any]) -> tuple[int, int]:
    """Return the sort key of a variable: types first,
    then numbers of heads, what they are made of before the rest.
    """
    leads = row["name"] in _LEADING
    place = _LEADING.index(row["name"]) if leads else len(_LEADING)
    return ("head", "layer", "model").index(row["of"]), place


def _largest_difference(values: Sequence[NDArray[np.float64] | None]) -> float:
    """Return the largest difference between two runs;
    0 if there are not two, or one lacks the variable.
    """
    if len(values) != 2 or values[0] is None or values[1] is None:
        return 0.0
    with np.errstate(invalid="ignore"):  # inf - inf
        differences = np.abs(values[0] - values[1])
    return float(differences[np.isfinite(differences)].max(initial=0))


def label(name: str) -> str:
    """Return a variable's name in words."""
    return "type" if name == TYPE else name.replace("_", " ")


def unit(attrs: dict[str, Any]) -> str:
    """Return a variable's unit with a space before it; "" if it is 1."""
    units = str(attrs.get("units", "1"))
    base = units.rstrip("-0123456789")
    return f" {base}{units[len(base) :].translate(_SUPERSCRIPT)}" if base else ""
