"""Curves of heads while a model trains (T-CNN paper, Fig. 4)."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from tcnn_probe.plot.style import (
    axes_or_current,
    axis_label,
    check_array,
    check_not_empty,
    label_values,
    legend_below,
    legend_beside,
    letters_across,
    names_that_fit,
    sequential_colors,
    whole_number_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["evolution"]


def evolution(
    values: xr.DataArray,
    ax: "Axes | None" = None,
    *,
    colors: Sequence[Any] | None = None,
    ls: str = "-",
    legend: bool | Literal["below"] = True,
) -> "Axes":
    """Draw the heads of each layer and their mean over the marks
    of a training (T-CNN paper, Fig. 4).

    ::

        ds = xr.open_zarr("run.zarr")
        tcnn_probe.plot.evolution(ds.gate)
        seeds = tcnn_probe.open(["seed0.zarr", "seed1.zarr"])
        tcnn_probe.plot.evolution(seeds["heads"].gate)  # with bands

    Heads are thin lines, means thick ones, with a colour for each layer. Of several runs, lines are
    means over heads and runs, and bands reach from the smallest to the largest mean over heads of a
    run; single heads are not drawn, since heads of the same number need not correspond in different
    runs. Heads, layers and runs without values (all NaN) are left out, from the legend too. A
    recording of a single mark is drawn as points. Widths of lines follow matplotlib's
    ``lines.linewidth``, and sizes of text its ``font.size``.

    Args:
        values: Recorded variable, with the dimension of the marks ("epoch" unless you named
            another) and, if any, layer, head and run.
        ax: Axes to draw on; None for the current axes.
        colors: Colour of each layer, as matplotlib takes them; None for viridis, from the first
            layer to the last.
        ls: Line style.
        legend: Draw a legend of the layers, beside the axes (True), or "below", at the foot of the
            figure, which suits a narrow one. Long names are shortened to the parts that differ.

    Returns:
        The axes, labelled with the variable's name and unit; with a title, if they had none.

    Raises:
        TypeError: The values are no DataArray, or no numbers.
        ValueError: The dimension of the marks is missing or not the only further one, there are too
            few colours, or all values are NaN.
    """
    values = check_array(values, "values")
    if legend not in (True, False, "below"):
        raise ValueError(f"expected legend=True, False or 'below', got {legend!r}")
    if values.dtype.kind not in "biuf":
        raise TypeError(
            f"expected values that are numbers, got {values.dtype}; types of heads are drawn as "
            "the share of one, (types == 'content').mean('head')"
        )
    marks = [str(dim) for dim in values.dims if dim not in ("layer", "head", "run")]
    if len(marks) != 1:
        raise ValueError(
            "expected values with one dimension beside layer, head and run, that of the marks, got "
            f"{values.dims}"
        )
    by_layer = values.expand_dims("layer") if "layer" not in values.dims else values
    layers = by_layer.sizes["layer"]
    colors = sequential_colors(layers) if colors is None else list(colors)
    if len(colors) < layers:
        raise ValueError(f"expected a colour for each of the {layers} layers, got {len(colors)}")
    check_not_empty(values, values.name)
    axes, along = axes_or_current(ax), values[marks[0]]
    # Longer names would make the legend, with 14 lines in a column, as wide as half of the axes.
    letters = letters_across(axes) / 2 / (1 + (layers - 1) // 14) - 7
    names = names_that_fit(by_layer.layer.values, letters)
    for number in range(layers):
        layer = by_layer.isel(layer=number)
        if not layer.notnull().any():
            continue
        mean_line = _draw_layer(
            axes, along.values, layer, marks[0], {"color": colors[number], "ls": ls}
        )
        if legend and "layer" in values.dims:
            mean_line.set_label(names[number])
    _label(axes, along, values)
    if legend and "layer" in values.dims:
        (legend_below if legend == "below" else legend_beside)(axes)
    return axes


def _label(axes: "Axes", along: xr.DataArray, values: xr.DataArray) -> None:
    """Label the axes, add a title if there is none,
    and choose ticks: whole numbers for marks, no offset for values.
    """
    from matplotlib.ticker import ScalarFormatter

    axes.set_xlabel(axis_label(along))
    label_values(axes, values)
    if not axes.get_title():
        lines = " by head (thin), and mean (thick)" if "head" in values.dims else ""
        if "run" in values.dims:
            averaged = "heads and runs" if "head" in values.dims else "runs"
            # Where a run has ended, lines are means of the others, and may jump.
            by_mark = values.notnull().any({*values.dims} - {"run", along.name}).sum("run")
            fewest, most = int(by_mark.min()), int(by_mark.max())
            runs = f"{fewest} to {most}" if fewest < most else most
            lines = f": mean over {averaged} (line), smallest to largest of {runs} runs (band)"
        title = axis_label(values).split(" (")[0] + lines
        # A title that is wider than its axes would run into that of the axes beside it.
        axes.set_title(fill(title, max(20, letters_across(axes))), fontsize="small")
    whole_number_ticks(axes, along)
    formatter = axes.yaxis.get_major_formatter()
    if isinstance(formatter, ScalarFormatter):
        # Gates near 1 would read as 0.00 to 0.02, with "+9.8e-1" above.
        formatter.set_useOffset(False)


def _draw_layer(
    axes: "Axes", x: Any, values: xr.DataArray, marks: str, style: dict[str, Any]
) -> Any:
    """Draw the lines of a layer's heads, or the band of its runs,
    and the line of the mean; return the latter.
    """
    from matplotlib import rcParams

    width = rcParams["lines.linewidth"]
    if len(x) == 1:
        style["marker"] = "o"
    if "run" in values.dims:
        by_run = values.mean("head") if "head" in values.dims else values
        low, high = by_run.min("run").values, by_run.max("run").values
        # The edge shows the band of a single mark, which has no area.
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, lw=1)
        # The mean of the runs' means: a run with fewer heads counts no less.
        values = by_run.mean("run")
    elif "head" in values.dims:
        heads = values.transpose(marks, "head").values
        axes.plot(
            x,
            heads[:, ~np.isnan(heads).all(0)],
            lw=0.4 * width,
            alpha=0.5,
            ms=3,
            **style,
        )
        values = values.mean("head")
    return axes.plot(x, values.values, lw=width * 5 / 3, **style)[0]
