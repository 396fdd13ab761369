"""A variable of heads against the depth
of their layers (Dosovitskiy et al. 2021, arXiv 2010.11929, Fig. 7).
"""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from tcnn_probe.plot.style import (
    OKABE_ITO,
    axes_without_data,
    check_array,
    check_not_empty,
    label_layers,
    label_values,
    legend_above,
    select_dims,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["depth"]


def depth(
    values: xr.DataArray,
    ax: "Axes | None" = None,
    *,
    uniform: xr.DataArray | None = None,
) -> "Axes":
    """Draw each head as a point, by layer, as Fig. 7
    of the vision transformer's paper does with attention distances.

    ::

        ds = xr.open_zarr("run.zarr").isel(epoch=-1)
        tcnn_probe.plot.depth(ds.attention_distance)
        tcnn_probe.plot.depth(ds.entropy, uniform=ds.uniform_entropy)

    A line joins the means over heads of the layers. Layers without values (all NaN) are left out.

    Args:
        values: Recorded variable of one mark, with the dims (layer, head).
        ax: Axes to draw on; None for the current axes if nothing is drawn on them, else for a new
            figure.
        uniform: Value of uniform attention in each layer, drawn as a dashed line, such as
            ``ds.uniform_entropy`` for entropies. None for that of ``attention_distance``, which has
            the coordinate ``uniform_distance``.

    Returns:
        The axes, labelled with the variable's name and unit.

    Raises:
        TypeError: The values are no DataArray.
        ValueError: There is no dimension "layer" or "head", there are several marks, or all values
            are NaN.
    """
    values = select_dims(check_array(values, "values"), "values", ("layer", "head"))
    values = values.transpose("layer", "head").dropna("layer", how="all")
    if uniform is None and values.name == "attention_distance":
        uniform = values.coords.get("uniform_distance")
    check_not_empty(values, values.name)
    layers = values.sizes["layer"]
    axes = axes_without_data(ax, min(12, max(6.4, 2 + layers / 3)), 4)
    x = np.arange(layers)
    points = axes.scatter(
        np.broadcast_to(x[:, None], values.shape),
        values,
        s=14,
        color=OKABE_ITO["blue"],
        lw=0,
        # Points are drawn over the lines.
        zorder=3,
        label="head",
    )
    axes.plot(x, values.mean("head"), color=OKABE_ITO["orange"], label="mean of heads")
    if uniform is not None:
        level = select_dims(check_array(uniform, "uniform"), "uniform", ("layer",))
        level = level.sel(layer=values.layer) if "layer" in values.coords else level
        axes.plot(x, level, ls="--", color="0.5", label="uniform attention")
    label_layers(axes, x.tolist(), values.layer.values)
    label_values(axes, values)
    # The axis begins at 0. Limits that are set would no longer follow other axes that share them.
    axes.update_datalim([(0, 0)])
    points.sticky_edges.y.append(0)
    axes.autoscale_view()
    legend_above(axes)
    return axes
