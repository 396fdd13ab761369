"""Attention maps of one forward, over the image."""

import fnmatch
import json
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from tcnn_probe.plot.style import (
    check_pixel,
    draw_box,
    draw_image,
    draw_map,
    empty_figure,
    finish_grid,
    wrap_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tcnn_probe.plot.style import AnyFigure

__all__ = ["attention_maps", "check_maps", "first_cell"]

_PANEL = 0.95  # inches; less where panels would make the figure wider than
_WIDTH = 10  # inches: a page


def attention_maps(
    maps: xr.DataTree,
    *,
    image: int = 0,
    query: Any = None,
    layers: str | Collection[str] | None = None,
    heads: int | Collection[int] | None = None,
    col_wrap: int = 12,
    scale: Literal["own", "common"] = "own",
    show_image: bool = True,
    figure: "AnyFigure | None" = None,
) -> "AnyFigure":
    """Draw attention over the image: a row for each layer,
    a column for each head, the query in a red box.

    ::

        maps = tcnn_probe.attention_maps(vit, photograph, queries=[(112, 112)])
        tcnn_probe.plot.attention_maps(maps)
        tcnn_probe.plot.attention_maps(maps, query="class")  # of the class token
        tcnn_probe.plot.attention_maps(maps, query=3)  # of an object query, of DETR's

    The more attention a place receives, the more opaque its colour.

    Args:
        maps: Result of :func:`tcnn_probe.attention_maps`.
        image: Number of the image.
        query: Pixel (y, x) of the image, one of the queries of the maps; "class", for the class
            token; or the number of a query that lies on no grid (``attention_by_query``). None for
            the first of these pixels, the middle of the image if all pixels are queries, or else
            the class token.
        layers: Names or globs of the layers to draw; None for all that have such maps.
        heads: Numbers of the heads to draw; None for all.
        col_wrap: Number of heads beside each other; further heads of a layer are in rows below.
        scale: "own" for a scale of each map, from 0 to its largest value; "common" to compare maps,
            from 0 to the largest value of all.
        show_image: Draw the image, at the left and in grey below each map; False for the maps
            alone, which suit a narrow figure.
        figure: Figure to draw on; None for pyplot's current figure if it is empty, else a new one
            of fitting size.

    Returns:
        The figure.

    Raises:
        TypeError: ``maps`` are no such tree.
        IndexError: The maps have no such image.
        ValueError: The maps have no such query, layer or head, or are of videos; or an option is
            out of range.
    """
    check_maps(maps)
    if scale not in ("own", "common") or col_wrap < 1:
        raise ValueError(
            f"expected scale 'own' or 'common' and col_wrap from 1, got {scale!r} and {col_wrap!r}"
        )
    picture = maps.dataset["input"].values[image]
    size = picture.shape[1], picture.shape[2]
    query = _check_query(maps, query, size)
    rows = _rows(maps.isel(image=image), query, layers, heads)
    columns = max(_columns(row.sizes["head"], col_wrap) for row in rows)
    panel_rows = sum(math.ceil(row.sizes["head"] / columns) for row in rows)
    image_panels = min(3, panel_rows) if show_image else 0  # width of the image
    canvas: Any = figure
    if canvas is None:
        side = min(_PANEL, _WIDTH / (columns + image_panels))
        # Inches: 0.12 for the names of heads, 0.8 for the title and the caption.
        height = (side * size[0] / size[1] + 0.12) * panel_rows + 0.8
        canvas = empty_figure(side * (columns + image_panels) + 1.2, height)
    gridspec = canvas.add_gridspec(panel_rows, image_panels + columns)
    panels: list[Axes] = []
    if show_image:
        panels.append(canvas.add_subplot(gridspec[:image_panels, :image_panels]))
        draw_image(panels[0], picture)
        _draw_query(panels[0], rows[0])
        panels[0].set_xlabel("image", fontsize="small")
    largest = max(float(row.max()) for row in rows) if scale == "common" else None
    titles: dict[int, int] = {}  # the head of the nearest panel above, by column
    top = 0
    for row in rows:
        for number, head in enumerate(row["head"].values.tolist()):
            below, column = divmod(number, columns)
            place = gridspec[top + below, image_panels + column]
            panel = canvas.add_subplot(place)
            panels.append(panel)
            if show_image:
                # In grey, so that all colour is attention.
                draw_image(panel, picture.mean(0, keepdims=True))
            _draw_map(panel, row[number], size, largest, opaque=not show_image)
            _draw_query(panel, row)
            if titles.get(column) != head:
                panel.set_title(f"head {head}", fontsize="x-small", pad=2)
            titles[column] = head
            if number == 0:
                name = wrap_name(row.layer.item())
                panel.set_ylabel(name, fontsize="x-small", rotation=0, ha="right", va="center")
        top += math.ceil(row.sizes["head"] / columns)
    subject = f"from pixel (y, x) = {query}"
    if not isinstance(query, tuple):
        subject = "of the class token" if query == "class" else f"of query {query}"
    canvas.suptitle(f"attention {subject}", fontsize="medium", wrap=True)
    limits = "each map from 0 to its own largest value"
    if largest is not None:
        limits = f"all maps from 0 to {largest:.2g}"
    shown = "opacity and colour" if show_image else "colour"
    canvas.supxlabel(f"{shown}: {limits}", fontsize="small", wrap=True)
    finish_grid(canvas, panels[0])
    return canvas


def check_maps(maps: object) -> None:
    """Raise TypeError if these are no maps of attention,
    ValueError if they have no axis of images, or frames.
    """
    expected = "expected the xarray.DataTree of tcnn_probe.attention_maps"
    if not isinstance(maps, xr.DataTree):
        raise TypeError(f"{expected}, got {type(maps).__name__}")
    if "input" not in maps:
        raise TypeError(f"{expected} as a whole, with its input; got a part of it, or another tree")
    if "image" not in maps.dataset["input"].dims:
        raise ValueError(
            "expected maps with the dimension image: choose an image as maps.isel(image=[0])"
        )
    dims = {dim for node in maps.subtree for dim in node.dims}
    frames = sorted({"input_frame", "query_frame", "frame"} & dims)
    if frames:
        choice = ", ".join(f"{dim}=0" for dim in frames)
        raise ValueError(
            f"expected maps of images, got videos: choose frames, as maps.isel({choice})"
        )


def _columns(heads: int, col_wrap: int) -> int:
    """Return the number of panels beside each other, with rows of about the same length."""
    return math.ceil(heads / math.ceil(heads / col_wrap))


def _check_query(
    maps: xr.DataTree, query: Any, size: tuple[int, int]
) -> str | int | tuple[int, int]:
    """Return the query as a pixel, "class" or a number;
    raise ValueError if there are no maps from it.
    """
    datasets = [node.dataset for node in maps.children.values()]
    arrays = [ds["attention"] for ds in datasets if "attention" in ds]
    counts = [ds.sizes["query"] for ds in datasets if "attention_by_query" in ds]
    if isinstance(query, (int, np.integer)) and counts:
        if not 0 <= query < max(counts):
            raise ValueError(
                f"expected one of {max(counts)} queries that lie on no grid, from 0, got {query!r}"
            )
        return int(query)
    pixels = _query_pixels(arrays[0]) if arrays else []
    if query is None:
        default = (size[0] // 2, size[1] // 2) if arrays else "class"
        query = pixels[0] if pixels else default
    if isinstance(query, str):
        if query != "class":
            raise ValueError(f"expected query=(y, x) or 'class', got {query!r}")
        return query
    if not arrays:
        raise ValueError(
            "these maps are of queries that lie on no grid: query='class', or a number"
        )
    pixel = check_pixel(query, *size)
    if pixels and pixel not in pixels:
        raise ValueError(f"the maps are from the pixels {pixels}, not from {pixel}")
    return pixel


def _rows(
    maps: xr.DataTree, query: str | int | tuple[int, int], layers: Any, heads: Any
) -> list[xr.DataArray]:
    """Return maps (head, y, x) of the layers, in the model's order."""
    by_layer: dict[str, xr.DataArray] = {}
    for node in maps.children.values():
        values = _maps_from(node.dataset, query)
        if values is None:
            continue
        for layer in values.layer.values.tolist():
            if values.sel(layer=layer).notnull().any():
                by_layer[layer] = values.sel(layer=layer)
    globs = [layers] if isinstance(layers, (str, int)) else list(layers or [])
    names = [layer for layer in json.loads(maps.attrs["layers"]) if layer in by_layer]
    for glob in globs:
        if not isinstance(glob, str) or not fnmatch.filter(names, glob):
            raise ValueError(f"no such maps of the layer {glob!r}; there are of {sorted(by_layer)}")
    if not by_layer:
        raise ValueError("there is no class token in these maps")
    if globs:
        names = [name for name in names if any(fnmatch.fnmatch(name, glob) for glob in globs)]
    rows = [by_layer[name] for name in names]
    if heads is not None:
        numbers = [heads] if isinstance(heads, int) else heads
        rows = [row.sel(head=row["head"].isin(numbers)) for row in rows]
    if not all(row.sizes["head"] for row in rows):
        raise ValueError(f"expected heads of the layers, got {heads!r}")
    return rows


def _maps_from(ds: xr.Dataset, query: str | int | tuple[int, int]) -> xr.DataArray | None:
    """Select the maps of a query, (layer, head, y, x); None without such maps in a node."""
    if isinstance(query, str):
        return ds.get("class_attention")
    if isinstance(query, int):
        if "attention_by_query" not in ds or query >= ds.sizes["query"]:
            return None
        return ds["attention_by_query"].isel(query=query)
    return _select_query(ds["attention"], query) if "attention" in ds else None


def _query_pixels(attention: xr.DataArray) -> list[tuple[int, int]]:
    """Return the pixels of the queries; none if the maps have a grid of queries."""
    if "query" not in attention.dims:
        return []
    return list(
        zip(
            attention.from_y.values.tolist(),
            attention.from_x.values.tolist(),
            strict=True,
        )
    )


def _select_query(attention: xr.DataArray, query: tuple[int, int]) -> xr.DataArray:
    """Select the attention of a pixel, (layer, head, y, x),
    with the pixel's cell among the keys as coordinates.
    """
    if "query" in attention.dims:
        return attention.isel(query=_query_pixels(attention).index(query))
    keys, cells = {}, {}
    for dim, pixel in zip("yx", query, strict=True):
        key = int(np.abs(attention[f"pixel_{dim}"].values - pixel).argmin())
        keys[f"query_{dim}"] = key
        # Keys of pooling attention have a coarser or finer grid than queries, over the same image.
        cells[f"query_{dim}"] = key * attention.sizes[f"query_{dim}"] // attention.sizes[dim]
    return attention.isel(cells, drop=True).assign_coords(keys)


def _draw_map(
    axes: "Axes",
    maps: xr.DataArray,
    size: tuple[int, int],
    largest: float | None,
    *,
    opaque: bool,
) -> None:
    """Draw a map (y, x) over an image of this size, more opaque with more attention or wholly,
    cells at the centres of their fields.
    """
    largest = float(np.nanmax(maps.values)) if largest is None else largest
    # A map of zeros, as outside of a query's window, must not be divided by zero.
    share = maps.values / max(largest, 1e-30)
    (top, height), (left, width) = first_cell(maps, "y"), first_cell(maps, "x")
    extent = left, left + width * share.shape[1], top + height * share.shape[0], top
    draw_map(
        axes,
        share,
        *size,
        extent=extent,
        vmin=0,
        vmax=1,
        # Never fully opaque, so that the image shows through; never fully transparent, so that the
        # map's extent shows.
        alpha=None if opaque else 0.35 + 0.6 * share,
    )


def _draw_query(axes: "Axes", maps: xr.DataArray) -> None:
    """Draw a box around the cell of the query, if there is one."""
    if "query_y" in maps.coords:
        (top, height), (left, width) = first_cell(maps, "y"), first_cell(maps, "x")
        draw_box(
            axes,
            top + maps.query_y.item() * height,
            left + maps.query_x.item() * width,
            height,
            width,
        )


def first_cell(maps: xr.DataArray | xr.Dataset, dim: str) -> tuple[float, float]:
    """Return the edge of the first cell along a side of the image,
    and its length; pixel n is from n to n + 1.
    """
    centres = maps[f"pixel_{dim}"].values
    spacing = (
        float(centres[1] - centres[0])
        if len(centres) > 1
        # A single cell, centred at (length - 1) / 2, is as long as the image.
        else 2 * float(centres[0]) + 1
    )
    return float(centres[0]) + 0.5 - spacing / 2, spacing
