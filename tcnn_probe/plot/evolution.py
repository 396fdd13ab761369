"""How heads change while a model trains (T-CNN paper, Fig. 4)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from tcnn_probe.plot.style import as_array, axes_or_current, axis_label, in_order, legend_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["evolution"]


def evolution(
    values: xr.DataArray,
    ax: "Axes | None" = None,
    *,
    colors: Sequence[Any] | None = None,
    ls: str = "-",
    legend: bool = True,
) -> "Axes":
    """Draw one thin line a head and a thick one for their mean, a colour a layer (T-CNN paper, Fig. 4).

    ::

        ds = xr.open_zarr("run.zarr")
        tcnn_probe.plot.evolution(ds.gate)

    Heads and layers that have no values (all NaN) are left out, from the legend too. A recording of one mark is drawn
    as points.

    Args:
        values: a recorded variable: dims layer and head, either or none of them, and that of the marks, whatever it is
            called ("epoch" unless you named another).
        ax: where to draw; None: on the current axes.
        colors: one a layer, as matplotlib takes them; None: viridis, from the first layer to the last.
        ls: line style.
        legend: name the layers, beside the axes.

    Returns:
        the axes, labelled with the variable's name and unit; with a title, if they had none.

    Raises:
        TypeError: no DataArray, or none of numbers.
        ValueError: no dimension of marks, or several; too few colours; values that are all NaN.
    """
    values = as_array(values, "values")
    if values.dtype.kind not in "biuf":
        raise TypeError(
            f"expected values that are numbers, got {values.dtype}; types of heads are drawn as the share of one, "
            "(types == 'content').mean('head')"
        )
    marks = [str(dim) for dim in values.dims if dim not in ("layer", "head")]
    if len(marks) != 1:
        raise ValueError(
            f"expected values with one dimension beside layer and head, that of the marks, got {values.dims}"
        )
    by_layer = values.expand_dims("layer") if "layer" not in values.dims else values
    layers = by_layer.sizes["layer"]
    colors = in_order(layers) if colors is None else list(colors)
    if len(colors) < layers:
        raise ValueError(f"expected a colour for each of the {layers} layers, got {len(colors)}")
    shown = [place for place in range(layers) if bool(by_layer[{"layer": place}].notnull().any())]
    if not shown:
        raise ValueError(f"nothing to draw: {values.name or 'the values'} are all NaN")
    axes, along = axes_or_current(ax), values[marks[0]]
    for place in shown:
        thick = _layer(axes, along.values, by_layer.isel(layer=place), marks[0], {"color": colors[place], "ls": ls})
        if legend and "layer" in values.dims:
            thick.set_label(str(values.layer.values[place]))
    _label(axes, along, values)
    if legend and "layer" in values.dims:
        legend_beside(axes)
    return axes


def _label(axes: "Axes", along: xr.DataArray, values: xr.DataArray) -> None:
    """Names of the axes, a title if there is none, whole numbers for whole marks, and no "+1" beside the axis."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    axes.set(xlabel=axis_label(along), ylabel=axis_label(values))
    if not axes.get_title():
        lines = " by head (thin), and mean (thick)" if "head" in values.dims else ""
        axes.set_title(axis_label(values).split(" (")[0] + lines, fontsize="small")
    if along.dtype.kind in "iu" and isinstance(locator := axes.xaxis.get_major_locator(), MaxNLocator):
        locator.set_params(integer=True, min_n_ticks=1)
    if isinstance(formatter := axes.yaxis.get_major_formatter(), ScalarFormatter):
        formatter.set_useOffset(False)


def _layer(axes: "Axes", x: Any, values: xr.DataArray, marks: str, style: dict[str, Any]) -> Any:
    """Draw its heads' lines and their mean's; gives the latter."""
    style |= {"marker": "o"} if len(x) == 1 else {}
    if "head" in values.dims:
        heads = values.transpose(marks, "head").values
        axes.plot(x, heads[:, ~np.isnan(heads).all(0)], lw=0.6, alpha=0.5, ms=3, **style)
        values = values.mean("head")
    return axes.plot(x, values.values, lw=2.5, **style)[0]
