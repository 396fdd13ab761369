"""Where the heads of each layer look, from one query pixel (T-CNN paper, Fig. 5)."""

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.plot.style import (
    RED,
    as_array,
    as_images,
    as_pixel,
    draw_box,
    draw_image,
    draw_map,
    empty_figure,
    select_others,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["attention_grid"]

_PANEL = 1.15  # inches, or less where there are many
_WIDTH = 10
_CAPTION = "each map from 0 (dark) to its largest value (light)"
_GATE_CAPTION = r"; above it: gate $\sigma(\lambda)$, the share of positional attention"


def attention_grid(
    maps: xr.DataArray,
    *,
    image: Any = None,
    query: tuple[int, int] | None = None,
    gate: xr.DataArray | None = None,
    col_wrap: int = 13,
    title: str | None = None,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure | SubFigure":
    """Draw attention maps, a row a layer and a column a head, with σ(λ) above each (T-CNN paper, Fig. 5).

    ::

        maps = tcnn_probe.open("run.zarr")["maps/9x8x8"].dataset.sel(epoch=5, image=0)
        gate = xr.open_zarr("run.zarr").gate.sel(epoch=5)
        tcnn_probe.plot.attention_grid(maps.center_attention, query=(4, 4), gate=gate).savefig("maps.png")

    Each map has a scale of its own, from 0 to its largest value. A layer of a smaller grid, filled up with NaN, is
    drawn without these; so are heads that a layer lacks.

    Args:
        maps: dims (layer, head, y, x), or without layer; others of length 1 only.
        image: drawn at the left, shape (C, H, W), 1 or 3 channels of any range.
        query: (y, x) of the pixel whose attention this is; boxed. With an image a pixel of that, and in the maps the
            box is the cell that has it, pixel y of H lying in row ``y * h // H``; else a pixel of the maps of
            each layer. Where maps have the coordinates ``query_y`` and ``query_x`` of each layer, boxes in maps are
            there: a layer with a stride has queries at some of its pixels only.
        gate: σ(λ) of each head, dims (layer, head), or without layer.
        col_wrap: how many heads are beside each other; further ones of a layer are in rows below.
        title: of the figure; None for one that names the query.
        figure: where to draw, for example one of ``figure.subfigures(3)``; None: pyplot's current figure if it is
            empty, else a new one of fitting size.

    Returns:
        the figure.

    Raises:
        TypeError: maps or gates that are no DataArray; a figure that is none.
        ValueError: dimensions that are missing or too many; a query outside or not of two integers; gates that lack
            a layer or head of the maps; an image of another shape.
    """
    from matplotlib.figure import FigureBase

    if figure is not None and not isinstance(figure, FigureBase):
        raise TypeError(f"expected figure to be matplotlib's Figure or SubFigure, got {type(figure).__name__}")
    maps = select_others(as_array(maps, "maps"), "maps", ("head", "y", "x"), ("layer",))
    maps = maps.expand_dims("layer") if "layer" not in maps.dims else maps
    maps = maps.transpose("layer", "head", "y", "x")
    grids = [_without_padding(layer) for layer in maps.values]
    gates = np.full(maps.shape[:2], np.nan) if gate is None else _gates_of(gate, maps)
    picture = None if image is None else as_images(image[None])[0]
    sizes = [grid.shape[1:] for grid in grids] if picture is None else [picture.shape[1:]]
    query = None if query is None else as_pixel(query, *(min(lengths) for lengths in zip(*sizes, strict=True)))
    heads, lines = maps.shape[1], -(-maps.shape[1] // col_wrap)
    rows, columns = len(grids) * lines, -(-heads // lines)
    beside = 0 if picture is None else 1 + min(rows, 2)  # the image's width, in panels
    if figure is None:
        side = min(_PANEL, _WIDTH / (columns + beside))
        figure = empty_figure(max(3, side * (columns + beside) + 1), (side + 0.25) * max(rows, beside / 1.5) + 0.8)
    places = figure.add_gridspec(rows, beside + columns)
    lowest: dict[int, Axes] = {}  # the panel of each head that has none below it
    for row, layer in enumerate(grids):
        cell = query and _cell(query, layer.shape[1:] if picture is None else sizes[0], layer.shape[1:])
        if {"query_y", "query_x"} <= set(maps.coords):
            cell = int(maps.query_y[row]), int(maps.query_x[row])
        where = [(row * lines + head // columns, beside + head % columns) for head in range(heads)]
        panels = [figure.add_subplot(places[place]) for place in where]
        _heads(panels, layer, gates[row], cell)
        lowest |= {head: panel for head, panel in enumerate(panels) if panel.images}
        if "layer" in maps.coords:
            panels[0].set_ylabel(wrapped(maps.layer.values[row]), fontsize=8, rotation=0, ha="right", va="center")
    for head, panel in lowest.items():
        panel.set_xlabel(f"head {maps['head'].values[head]}", fontsize=8)
    if picture is not None:
        _picture(figure.add_subplot(places[:beside, :beside]), picture, query, grids[0].shape[1:])
    figure.supxlabel(_CAPTION + ("" if gate is None else _GATE_CAPTION), fontsize=8, wrap=True)
    whose = "by head" if query is None else f"from pixel (y, x) = ({query[0]}, {query[1]})"
    figure.suptitle(f"attention {whose}" if title is None else title, fontsize=10)
    return figure


def _heads(panels: "list[Axes]", maps: NDArray[Any], gates: NDArray[Any], cell: tuple[int, int] | None) -> None:
    """Draw the heads of a layer."""
    height, width = maps.shape[1:]
    for head, panel in enumerate(panels):
        if np.isnan(maps[head]).all():
            panel.set(xticks=[], yticks=[], frame_on=False)
            continue
        draw_map(panel, maps[head], height, width, vmin=0)
        if cell is not None:
            draw_box(panel, *cell, 1, 1)
        if np.isfinite(gates[head]):
            panel.set_title(f"{gates[head]:.2f}", color=RED, fontsize=8, pad=3)


def _picture(axes: "Axes", image: NDArray[Any], query: tuple[int, int] | None, grid: tuple[int, ...]) -> None:
    """Draw the image, and in it the first layer's cell that has the query."""
    draw_image(axes, image)
    axes.set_xlabel("image", fontsize=8)
    if query is not None:
        across = image.shape[1] / grid[0], image.shape[2] / grid[1]
        row, column = _cell(query, image.shape[1:], grid)
        draw_box(axes, row * across[0], column * across[1], *across)


def _cell(query: tuple[int, int], size: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int]:
    """The cell that has the pixel, in a grid over an image of this size."""
    return query[0] * grid[0] // size[0], query[1] * grid[1] // size[1]


def _without_padding(maps: NDArray[Any]) -> NDArray[Any]:
    """(head, y, x) without rows and columns at the end that are NaN in every head."""
    there = ~np.isnan(maps).all(0)
    if not there.any():
        raise ValueError("a layer's maps are all NaN: leave it out, with .sel(layer=[...])")
    return maps[:, : np.flatnonzero(there.any(1))[-1] + 1, : np.flatnonzero(there.any(0))[-1] + 1]


def _gates_of(gate: xr.DataArray, maps: xr.DataArray) -> NDArray[Any]:
    """Gates of the layers and heads of the maps, (layer, head)."""
    gate = select_others(as_array(gate, "gates"), "gates", ("head",), ("layer",))
    gate = gate.expand_dims("layer") if "layer" not in gate.dims else gate
    for dim in ("layer", "head"):
        if dim in gate.coords and dim in maps.coords:
            there = gate[dim].values.tolist()
            if lacking := [label for label in maps[dim].values.tolist() if label not in there]:
                raise ValueError(f"the gates lack {dim} {lacking[0]!r} of the maps; they have {there}")
            gate = gate.sel({dim: maps[dim]})
        elif gate.sizes[dim] != maps.sizes[dim]:
            raise ValueError(f"expected gates of {maps.sizes[dim]} {dim}s, as the maps have, got {gate.sizes[dim]}")
    return gate.transpose("layer", "head").values
