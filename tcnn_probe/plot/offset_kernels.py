"""The convolution inside each head's attention, as small images on one page."""

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.plot.style import (
    axes_without_data,
    check_array,
    check_not_empty,
    select_dims,
    short_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["offset_kernels"]

_GAP = 0.12  # between kernels, as a share of their width
_TICK = 0.06
_CAPTION = "from 0 (dark) to the largest of each (light)\nticks: the offset 0, the query itself"


def offset_kernels(
    kernels: xr.DataArray,
    ax: "Axes | None" = None,
    *,
    positional: xr.Dataset | None = None,
) -> "Axes":
    """Draw the offset kernel of each head, a row for each layer and a column for each head.

    ::

        probes = [*tcnn_probe.DEFAULT, "offset-kernel"]  # record(model, probes=probes)
        ds = tcnn_probe.open("run.zarr")["offset-kernel"].dataset.isel(epoch=-1)
        tcnn_probe.plot.offset_kernels(ds.offset_kernel)

    The kernel exp(theta) is the convolution nearest to the head's mean attention over images: its
    weight for each offset from query to key, up to normalization at the border. Each image has a
    scale of its own, from 0 to its largest value. Offsets that no query has are grey. Ticks above
    and at the left mark the offset 0, the query itself.

    Args:
        kernels: Kernels of one mark with the dims (layer, head, offset_y, offset_x), or without
            layer.
        ax: Axes to draw on; None for the current axes if nothing is drawn on them, else for a new
            figure.
        positional: Recording of the same mark with ``locality_strength``, ``center_y`` and
            ``center_x``, of GPSA and ConViT. Below the kernels of such a layer stand the filters
            that its positional attention has learned, exp(-alpha ||delta - Delta||^2) (T-CNN Eq.
            4).

    Returns:
        The axes, with an image for each head.

    Raises:
        TypeError: The kernels are no DataArray.
        ValueError: A dimension is missing or too many, or all values are NaN.
    """
    kernels = select_dims(
        check_array(kernels, "kernels"),
        "kernels",
        ("head", "offset_y", "offset_x"),
        ("layer",),
    )
    if "layer" not in kernels.dims:
        kernels = kernels.expand_dims("layer")
    kernels = kernels.transpose("layer", "head", "offset_y", "offset_x")
    kernels = kernels.dropna("layer", how="all").load()
    check_not_empty(kernels, "the kernels")
    rows: list[tuple[str, NDArray[Any]]] = []
    for number, name in enumerate(short_names(kernels.layer.values)):
        layer = kernels.isel(layer=number)
        rows.append((name, layer.values))
        learned = None if positional is None else _learned(layer, positional)
        if learned is not None:
            rows.append((f"{name} learned", learned))
    heads = kernels.sizes["head"]
    # Inches: kernels of a third of an inch are legible, and 16 of them are as wide as a page.
    side = min(0.6, max(0.34, 9 / heads))
    # The caption needs four inches.
    axes = axes_without_data(ax, max(4.4, side * heads + 1.4), side * len(rows) + 0.9)
    # The place of the offset 0.
    query = [int(np.flatnonzero(kernels[dim].values == 0)[0]) for dim in ("offset_y", "offset_x")]
    for row, (_, layer_kernels) in enumerate(rows):
        for head, kernel in enumerate(layer_kernels):
            _draw_kernel(axes, kernel, query, row, head)
    axes.set_xlim(-0.5 - _GAP, heads - 0.5 + _GAP)
    axes.set_ylim(len(rows) - 0.5 + _GAP, -0.5 - _GAP)
    axes.set_aspect("equal")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize="small")
    axes.set_xticks(range(heads), kernels["head"].values, fontsize="small")
    axes.tick_params(length=0)
    axes.grid(False)  # styles with a grid would draw its lines through the offsets 0
    axes.spines[:].set_visible(False)
    axes.set(xlabel=f"head\n{_CAPTION}", ylabel="layer")
    axes.xaxis.label.set_fontsize("small")
    if not axes.get_title():
        axes.set_title("the convolution inside each head", fontsize="small")
    return axes


def _draw_kernel(
    axes: "Axes", kernel: NDArray[Any], query: list[int], row: int, column: int
) -> None:
    """Draw a kernel in the unit square around its row and column,
    without offsets that are NaN for all queries.
    """
    import matplotlib as mpl

    finite = np.isfinite(kernel)
    if not finite.any():
        return
    rows, columns = finite.any(1).nonzero()[0], finite.any(0).nonzero()[0]
    kernel = kernel[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    # The longer side fills the square.
    half = np.array(kernel.shape) / max(kernel.shape) * (1 - _GAP) / 2
    axes.imshow(
        kernel,
        extent=(column - half[1], column + half[1], row + half[0], row - half[0]),
        vmin=0,
        vmax=max(float(np.nanmax(kernel)), 1e-30),
        # Offsets without a query are grey, as neither a white page nor a dark one is.
        cmap=mpl.colormaps["cividis"].with_extremes(bad="0.6"),
        interpolation="nearest",
    )
    # Ticks in the gaps above and at the left, since a mark in the image would cover the head's own
    # patch.
    place = np.array([row, column]) - half
    y, x = place + 2 * half / kernel.shape * (query - np.array([rows[0], columns[0]]) + 0.5)
    axes.plot([x, x], [place[0] - _TICK, place[0]], color="0.5", lw=0.8)
    axes.plot([place[1] - _TICK, place[1]], [y, y], color="0.5", lw=0.8)


def _learned(layer: xr.DataArray, positional: xr.Dataset) -> NDArray[Any] | None:
    """Return the filters of a layer's positional attention on the offsets of its kernels;
    None if it has none.
    """
    names = ["locality_strength", "center_y", "center_x"]
    if not set(names) <= set(positional.data_vars):
        return None
    if layer.layer.item() not in positional.layer.values.tolist():
        return None
    # Plain labels: the kernels' own mark is another coordinate.
    learned = positional[names].sel(layer=layer.layer.item())
    further = [dim for dim in learned.dims if dim != "head"]
    learned = learned.isel(dict.fromkeys(further, -1)).reindex(head=layer["head"].values)
    if not learned.locality_strength.notnull().any():
        return None
    squared = (layer.offset_y - learned.center_y) ** 2
    squared = squared + (layer.offset_x - learned.center_x) ** 2
    logits = -learned.locality_strength * squared
    filters = np.exp(logits - logits.max(["offset_y", "offset_x"]))
    return filters.transpose("head", "offset_y", "offset_x").where(layer.notnull()).values
