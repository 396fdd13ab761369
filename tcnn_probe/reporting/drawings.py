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
    the last mark, of several seeds the first that recorded them. Nothing is drawn of what a run
    lacks.
    """
    drawings = []
    # A user's own style, such as a dark background, is not the page's.
    with matplotlib.style.context(["default", _STYLE]):
        for run in runs:
            for recording, meaning, figure in _figures(run):
                names = [run.name] * (len(runs) > 1)
                names += [recording.name] * (recording is not run)
                drawings.append({"of": ", ".join(names), "meaning": meaning, "svg": _svg(figure)})
    return drawings


def _figures(run: Run) -> Iterator[tuple[Run, str, Figure]]:
    """Yield figures of a run, with the run or seed
    that they show and a description for screen readers.
    """
    numbers, last = run.numbers, {run.along: -1}
    if {"selectivity", *PARTS} <= {*numbers.data_vars} and bool(
        numbers.selectivity.isel(last).notnull().any()
    ):
        figure = Figure((11, 4), layout="constrained")
        anatomy(numbers.isel(last), figure.subplots())
        yield run, f"bars: parts of each head at the last {run.along}", figure
        if len(run.marks) > 1:
            figure = Figure((11, 3.5), layout="constrained")
            anatomy(numbers, figure.subplots())
            yield run, f"bands: means over all heads by {run.along}", figure
    for recording in run.recordings:
        kernels = recording.kernels
        if kernels is None or not bool(kernels.isel(last).notnull().any()):
            continue
        figure = Figure(layout="constrained")
        axes = offset_kernels(kernels.isel(last), figure.subplots(), positional=recording.numbers)
        # Inches: half for each kernel, and room for the names of heads and layers.
        columns, rows = abs(axes.viewLim.width), abs(axes.viewLim.height)
        figure.set_size_inches(columns / 2 + 1.6, rows / 2 + 1)
        yield recording, f"kernel of each head at the last {run.along}", figure
        return


def _svg(figure: Figure) -> str:
    """Return a figure as an element of a page, with the colour of the page's text."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, dpi=_DPI, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(_INK, "var(--ink)")
