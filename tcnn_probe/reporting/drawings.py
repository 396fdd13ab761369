"""Drawings of the page by matplotlib: the parts of each head's attention,
and the kernels of its convolution.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

from tcnn_probe.heads.types import PARTS
from tcnn_probe.plot.anatomy import anatomy
from tcnn_probe.plot.offset_kernels import offset_kernels
from tcnn_probe.reporting.recordings import Run

__all__ = ["draw_heads"]

# No drawing has this colour; the page's own, which is light on a dark page, takes its place.
_INK = "#010203"
_STYLE: dict[str, Any] = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "image.composite_image": True,  # one image of all kernels is a tenth of the bytes of many
    "svg.fonttype": "none",  # letters, in the page's fonts, instead of their outlines
    "svg.hashsalt": "tcnn_probe",  # names of clips by what they are, the same in each page
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
# A kernel is half an inch wide and has about 15 offsets: two pixels of a fine screen for each.
_DPI = 150


def draw_heads(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Draw what the heads of each run depend on:
    ``of`` which run, ``meaning`` in words, and ``svg``.

    The parts are bars of the last mark and, of several marks, bands over them. Kernels are those of
    the last mark. Nothing is drawn of what a run lacks.
    """
    drawings = []
    # A user's own style, such as a dark background, is not the page's.
    with matplotlib.style.context(["default", _STYLE]):
        for run in runs:
            for meaning, figure in _figures(run):
                of = run.name if len(runs) > 1 else ""
                drawings.append({"of": of, "meaning": meaning, "svg": _svg(figure)})
    return drawings


def _figures(run: Run) -> Iterator[tuple[str, Figure]]:
    """Yield figures of a run, each with a description for screen readers."""
    numbers, last = run.numbers, {run.along: -1}
    if {"selectivity", *PARTS} <= {*numbers.data_vars} and bool(
        numbers.selectivity.isel(last).notnull().any()
    ):
        figure = Figure((11, 4), layout="constrained")
        anatomy(numbers.isel(last), figure.subplots())
        yield f"bars: parts of each head at the last {run.along}", figure
        if len(run.marks) > 1:
            figure = Figure((11, 3.5), layout="constrained")
            anatomy(numbers, figure.subplots())
            yield f"bands: means over all heads by {run.along}", figure
    if run.kernels is not None and bool(run.kernels.isel(last).notnull().any()):
        figure = Figure(layout="constrained")
        axes = offset_kernels(run.kernels.isel(last), figure.subplots(), positional=numbers)
        # Inches: half for each kernel, and room for the names of heads and layers.
        columns, rows = abs(axes.viewLim.width), abs(axes.viewLim.height)
        figure.set_size_inches(columns / 2 + 1.6, rows / 2 + 1)
        yield f"kernel of each head at the last {run.along}", figure


def _svg(figure: Figure) -> str:
    """Return a figure as an element of a page, with the colour of the page's text."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, dpi=_DPI, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(_INK, "var(--ink)")
