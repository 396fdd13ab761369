"""Figures of the page, in Bokeh: grids of heads, and curves."""

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    Line,
    LinearColorMapper,
    Range1d,
    Rect,
    Scatter,
    TapTool,
)
from bokeh.palettes import PuOr11, Viridis256, interp_palette
from bokeh.plotting import figure
from bokeh.transform import transform

from tcnn_probe.plot.style import OKABE_ITO, short_names
from tcnn_probe.reporting.recordings import Axes

__all__ = [
    "ABSENT", "BORDER", "DIFFERENCES", "MISSING", "NUMBERS", "OTHER_TYPE", "RUNS",
    "SAME_TYPE", "TYPES",
    "axis_title", "curve", "grid", "grid_width",
]  # fmt: skip

NUMBERS = list(Viridis256)
DIFFERENCES = list(interp_palette(PuOr11[::-1], 255))
TYPES = [
    OKABE_ITO[name] for name in ("blue", "sky blue", "vermillion", "orange", "yellow", "green")
]
"""Colours of types of heads: blue where attention is the same for all images,
red where it depends on the image.
"""

SAME_TYPE, OTHER_TYPE = "#cfe3d4", OKABE_ITO["purple"]
"""Colours of a head with the same type in both runs, and with different types."""

MISSING, ABSENT = "#a0a0a0", "#ececec"
"""Colours of a head without a value, and of no head."""

RUNS = [
    ("#1a1a1a", "#ececec"),
    (OKABE_ITO["blue"], OKABE_ITO["sky blue"]),
    (OKABE_ITO["green"], OKABE_ITO["green"]),
    # Okabe and Ito's purple has a contrast of less than 3 with white.
    ("#a3478a", OKABE_ITO["purple"]),
]
"""Colours of the runs, on a light page and on a dark one."""

BORDER = 8
"""Pixels between the end of an axis and that of its figure."""

_CELL = 24  # pixels
_FONT = "12px"
_LETTERS = 14  # letters in a line beside the vertical axis
_DOTS = 40  # marks; with more of them, dots would merge into a thick line


def grid(
    axes: Axes, name: str, counts: Mapping[str, int]
) -> tuple[figure, ColumnDataSource, LinearColorMapper, ColumnDataSource]:
    """Draw a grid of layers x heads, the first layer at the top,
    with ``counts`` heads in each layer.

    Return the figure; the source of its cells, in which the page fills in "value" and "text"; their
    colours; and the source of the box around the selected cell.
    """
    rows, columns = len(axes.layers), len(axes.heads)
    cells, box = _cells(axes, counts), ColumnDataSource({"row": [], "column": []})
    mapper = LinearColorMapper(palette=NUMBERS, nan_color=MISSING)
    plot = _figure(name, (-0.5, columns - 0.5), (rows - 0.5, -0.5), _CELL * rows + 48)
    plot.background_fill_color = ABSENT
    rects = plot.rect(
        "column",
        "row",
        1,
        1,
        source=cells,
        fill_color=transform("value", mapper),
        line_color="white",
        name="cells",
    )
    # A light line and a dark one: one of them is seen on any colour of a cell.
    for part, color, width in (("halo", "white", 6), ("box", "black", 3)):
        outline = Rect(x="column", y="row", width=1, height=1, fill_alpha=0)
        outline.update(line_color=color, line_width=width)
        plot.add_glyph(box, outline, name=part)
    tips = [("layer", "@layer"), ("head", "@head"), ("", "@text")]
    plot.add_tools(TapTool(), HoverTool(renderers=[rects], tooltips=tips))
    plot.ygrid.visible = False
    plot.xaxis.axis_label = "head"
    plot.yaxis.axis_label = "layer"
    plot.xaxis.ticker = FixedTicker(ticks=list(range(0, columns, math.ceil(columns / 16))))
    plot.xaxis.major_label_overrides = {column: str(head) for column, head in enumerate(axes.heads)}
    plot.yaxis.ticker = FixedTicker(ticks=list(range(rows)))
    plot.yaxis.major_label_overrides = dict(enumerate(_short_names(list(axes.layers))))
    return plot, cells, mapper, box


def _cells(axes: Axes, counts: Mapping[str, int]) -> ColumnDataSource:
    cells = [
        (row, column, layer, head, math.nan, "")
        for row, layer in enumerate(axes.layers)
        for column, head in enumerate(axes.heads)
        if head < counts.get(layer, 0)
    ]
    names = ("row", "column", "layer", "head", "value", "text")
    return ColumnDataSource(
        {name: [cell[place] for cell in cells] for place, name in enumerate(names)}
    )


def grid_width(axes: Axes) -> int:
    """Return a width for a grid, in pixels:
    30 for each head, 9 for each letter of the layers' names.
    """
    return max(
        280,
        30 * len(axes.heads) + 9 * max(map(len, _short_names(list(axes.layers)))) + 30,
    )


def curve(axes: Axes, variable: dict[str, Any], sources: Sequence[ColumnDataSource]) -> figure:
    """Draw a variable over the marks, a colour for each run.

    A dashed line is the mean over the layer's heads. The page finds the parts of a run by their
    name, "run 0", and gives them the colours of a light page or a dark one.
    """
    first, last = axes.marks[0], axes.marks[-1]
    edge = 0.02 * (last - first) or 0.5
    low, high = variable["limits"]
    room = max(0.06 * (high - low), 0.01 * max(abs(low), abs(high))) or 0.5
    name, along = variable["name"], axes.along
    plot = _figure(f"curve {name}", (first - edge, last + edge), (low - room, high + room), 150)
    lines = []
    for run, source in enumerate(sources):
        color, part = RUNS[run][0], f"run {run}"
        # Glyphs are added as they are: figure.line and figure.scatter add copies of each for
        # selected and for muted points, which curves do not have.
        if variable["of"] == "head":
            source.add([], f"{name} mean")
            mean = Line(x=along, y=f"{name} mean", line_color=color)
            mean.update(line_dash=[3, 3], line_alpha=0.7)
            plot.add_glyph(source, mean, name=part)
        source.add([], name)
        glyph = Line(x=along, y=name, line_color=color, line_width=2)
        lines.append(plot.add_glyph(source, glyph, name=part))
        if len(axes.marks) <= _DOTS:
            dots = Scatter(x=along, y=name, size=5, line_color=color, fill_color=color)
            plot.add_glyph(source, dots, name=part)
    tips = [(along, f"@{{{along}}}"), (variable["label"], f"@{{{name}}}{{0.0000}}")]
    plot.add_tools(HoverTool(renderers=lines, mode="vline", tooltips=tips))
    if len(axes.marks) < 9:
        plot.xaxis.ticker = FixedTicker(ticks=axes.marks)
    else:
        integers = all(isinstance(mark, int) for mark in axes.marks)
        plot.xaxis.ticker = BasicTicker(min_interval=1 if integers else 0)
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=4)
    plot.xaxis.axis_label = along
    plot.yaxis.axis_label = "\n".join(wrap(axis_title(variable), _LETTERS))
    return plot


def axis_title(variable: dict[str, Any]) -> str:
    """Return a variable's name with its unit in brackets, if it has one."""
    unit = variable["unit"].strip()
    return variable["label"] + (f" ({unit})" if unit else "")


def _figure(name: str, x: tuple[float, float], y: tuple[float, float], height: int) -> figure:
    """Make an empty figure, as wide as its place on the page."""
    plot = figure(
        name=name,
        x_range=Range1d(*x),
        y_range=Range1d(*y),
        height=height,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        min_border_right=BORDER,
        background_fill_color=None,
        outline_line_color=None,
    )
    plot.xgrid.visible = False
    plot.axis.major_label_text_font_size = plot.axis.axis_label_text_font_size = _FONT
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = "#888888"
    plot.axis.minor_tick_line_color = None
    return plot


def _short_names(layers: Sequence[str]) -> list[str]:
    """Shorten names if they are long."""
    if max(map(len, layers)) <= 26:
        return list(layers)
    return [name if len(name) <= 24 else f"…{name[-23:]}" for name in short_names(layers)]
