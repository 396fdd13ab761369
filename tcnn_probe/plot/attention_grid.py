"""Attention maps of heads and layers in a grid (T-CNN paper, Fig. 5)."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.plot.style import (
    RED,
    check_array,
    check_pixel,
    draw_box,
    draw_image,
    draw_map,
    empty_figure,
    finish_grid,
    image_array,
    select_dims,
    wrap_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tcnn_probe.plot.style import AnyFigure

__all__ = ["attention_grid"]

_PANEL = 1.15  # inches; less where panels would make the figure wider than
_WIDTH = 10  # inches: a page
_CAPTION = "each map from 0 (dark) to its largest value (light)"
_GATE_CAPTION = r"; above it: gate $\sigma(\lambda)$, the share of positional attention"


def attention_grid(
    maps: xr.DataArray,
    *,
    image: Any = None,
    overlay: bool = False,
    query: tuple[int, int] | None = None,
    gate: xr.DataArray | None = None,
    col_wrap: int = 13,
    title: str | None = None,
    figure: "AnyFigure | None" = None,
) -> "AnyFigure":
    """Draw attention maps, a row for each layer and a column for each head,
    with σ(λ) above (T-CNN paper, Fig. 5).

    ::

        maps = tcnn_probe.open("run.zarr")["maps/9x8x8"].dataset.sel(epoch=5, image=0)
        gate = xr.open_zarr("run.zarr").gate.sel(epoch=5)
        figure = tcnn_probe.plot.attention_grid(maps.center_attention, query=(4, 4), gate=gate)
        figure.savefig("maps.png")

    Each map has a scale of its own, from 0 to its largest value. NaNs that pad layers of a smaller
    grid, or stand for heads that a layer lacks, are left out.

    Args:
        maps: Attention with the dims (layer, head, y, x), or without layer; further dims of length
            1 only.
        image: Image to draw at the left, shape (C, H, W), 1 or 3 channels of any range.
        overlay: Whether to draw each map over the image, in grey: the more attention, the more
            opaque its colour.
        query: Pixel (y, x) whose attention this is, to be boxed. With an image it is a pixel of
            that, and in the maps the box is the cell of row ``y * h // H``; else it is a pixel of
            the maps of each layer. Where maps have the coordinates ``query_y`` and ``query_x`` of
            each layer, boxes in maps are there: a layer with a stride has queries at some of its
            pixels only.
        gate: Gate σ(λ) of each head, dims (layer, head), or without layer.
        col_wrap: Number of heads beside each other; further heads of a layer are in rows below.
        title: Title of the figure; None for a title with the query.
        figure: Figure to draw on, for example one of ``figure.subfigures(3)``; None for pyplot's
            current figure if it is empty, else a new one of fitting size.

    Returns:
        The figure.

    Raises:
        TypeError: Maps or gates are no DataArray.
        KeyError: The gates lack a layer or head of the maps.
        ValueError: A dimension is missing or too many, the query is outside or no pair of integers,
            or the image has another shape.
    """
    maps = select_dims(check_array(maps, "maps"), "maps", ("head", "y", "x"), ("layer",))
    maps = maps.expand_dims("layer") if "layer" not in maps.dims else maps
    maps = maps.transpose("layer", "head", "y", "x")
    grids = [_without_padding(layer) for layer in maps.values]
    gates = np.full(maps.shape[:2], np.nan) if gate is None else _align_gates(gate, maps)
    picture = None if image is None else image_array(image[None])[0]
    if overlay and picture is None:
        raise ValueError("overlay=True needs the image: attention_grid(maps, image=...)")
    background = picture if overlay else None
    sizes = [grid.shape[1:] for grid in grids] if picture is None else [picture.shape[1:]]
    if query is not None:
        query = check_pixel(query, min(size[0] for size in sizes), min(size[1] for size in sizes))
    heads = maps.shape[1]
    rows_per_layer = math.ceil(heads / col_wrap)
    rows, columns = len(grids) * rows_per_layer, math.ceil(heads / rows_per_layer)
    image_panels = 0 if picture is None else 1 + min(rows, 2)  # width of the image
    canvas: Any = figure
    if canvas is None:
        side = min(_PANEL, _WIDTH / (columns + image_panels))
        # Wide maps leave a part of square panels empty; names of layers take half of a panel.
        aspect = np.clip(max(height / width for height, width in sizes), 0.5, 1)
        # Inches: 0.25 for the gates above panels, 0.8 for the title and the caption.
        height = (side * aspect + 0.25) * max(rows, image_panels / 1.5) + 0.8
        canvas = empty_figure(max(3, side * (columns + image_panels) + 1), height)
    gridspec = canvas.add_gridspec(rows, image_panels + columns)
    lowest: dict[int, Axes] = {}  # the lowest panel of each head, for its label
    for number, grid in enumerate(grids):
        cell = query and _cell(
            query, grid.shape[1:] if picture is None else sizes[0], grid.shape[1:]
        )
        if {"query_y", "query_x"} <= set(maps.coords):
            # One cell for all layers where they share a grid, as in attention_maps.
            places = (maps[name].values for name in ("query_y", "query_x"))
            row, column = (np.broadcast_to(place, len(grids))[number] for place in places)
            cell = int(row), int(column)
        panels = []
        for head in range(heads):
            row, column = divmod(head, columns)
            panels.append(
                canvas.add_subplot(gridspec[number * rows_per_layer + row, image_panels + column])
            )
        _draw_heads(panels, grid, gates[number], cell, background)
        lowest |= {head: panel for head, panel in enumerate(panels) if panel.images}
        if "layer" in maps.coords:
            panels[0].set_ylabel(
                wrap_name(maps.layer.values[number]),
                fontsize="small",
                rotation=0,
                ha="right",
                va="center",
            )
    for head, panel in lowest.items():
        panel.set_xlabel(f"head {maps['head'].values[head]}", fontsize="small")
    if picture is not None:
        _draw_picture(
            canvas.add_subplot(gridspec[:image_panels, :image_panels]),
            picture,
            query,
            grids[0].shape[1:],
        )
    caption = _CAPTION + ("" if gate is None else _GATE_CAPTION)
    canvas.supxlabel(caption, fontsize="small", wrap=True)
    subject = "by head" if query is None else f"from pixel (y, x) = ({query[0]}, {query[1]})"
    canvas.suptitle(f"attention {subject}" if title is None else title, fontsize="medium")
    finish_grid(canvas, next(iter(lowest.values())))
    return canvas


def _draw_heads(
    panels: "list[Axes]",
    maps: NDArray[Any],
    gates: NDArray[Any],
    cell: tuple[int, int] | None,
    picture: NDArray[Any] | None,
) -> None:
    """Draw the heads of a layer, over a picture if there is one, the query's cell in a box."""
    height, width = maps.shape[1:]
    for head, panel in enumerate(panels):
        if np.isnan(maps[head]).all():
            panel.set(xticks=[], yticks=[], frame_on=False)
            continue
        if picture is None:
            draw_map(panel, maps[head], height, width, vmin=0)
        else:
            draw_image(panel, picture.mean(0, keepdims=True))
            panel.images[0].set_extent((0, width, height, 0))  # in cells, as boxes are
            values = maps[head].astype(float)  # matplotlib blends no float16
            share = values / max(np.nanmax(values), 1e-30)
            opacity = 0.35 + 0.6 * np.nan_to_num(share)
            draw_map(panel, maps[head], height, width, vmin=0, alpha=opacity)
        if cell is not None:
            draw_box(panel, *cell, 1, 1)
        if np.isfinite(gates[head]):
            panel.set_title(f"{gates[head]:.2f}", color=RED, fontsize="small", pad=3)


def _draw_picture(
    axes: "Axes",
    image: NDArray[Any],
    query: tuple[int, int] | None,
    grid: tuple[int, ...],
) -> None:
    """Draw the image, and in it the query's cell in the first layer's grid."""
    draw_image(axes, image)
    axes.set_xlabel("image", fontsize="small")
    if query is not None:
        height, width = image.shape[1] / grid[0], image.shape[2] / grid[1]
        row, column = _cell(query, image.shape[1:], grid)
        draw_box(axes, row * height, column * width, height, width)


def _cell(query: tuple[int, int], size: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int]:
    """Return the cell of a pixel, in a grid over an image of this size."""
    return query[0] * grid[0] // size[0], query[1] * grid[1] // size[1]


def _without_padding(maps: NDArray[Any]) -> NDArray[Any]:
    """Cut off rows and columns at the end of (head, y, x) that are NaN in every head."""
    _, rows, columns = np.nonzero(~np.isnan(maps))
    if not rows.size:
        raise ValueError("a layer's maps are all NaN: leave it out, with .sel(layer=[...])")
    return maps[:, : rows.max() + 1, : columns.max() + 1]


def _align_gates(gate: xr.DataArray, maps: xr.DataArray) -> NDArray[Any]:
    """Select the gates of the maps' layers and heads, (layer, head)."""
    gate = select_dims(check_array(gate, "gates"), "gates", ("head",), ("layer",))
    gate = gate.expand_dims("layer") if "layer" not in gate.dims else gate
    labels = {dim: maps[dim] for dim in ("layer", "head") if dim in gate.coords}
    gate = gate.sel({dim: label for dim, label in labels.items() if dim in maps.coords})
    # Gates without labels of more heads than the maps are not those of the maps.
    gate, _ = xr.align(gate, maps, join="exact")
    return gate.transpose("layer", "head").values
