"""Attention of one forward over the image that it belongs to."""

import fnmatch
import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.plot.style import as_pixel, draw_box, draw_image, draw_map, empty_figure, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["attention_maps"]

_PANEL = 0.95  # inches


def attention_maps(
    maps: xr.DataTree,
    *,
    image: int = 0,
    query: Any = None,
    layers: str | Collection[str] | None = None,
    heads: int | Collection[int] | None = None,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure | SubFigure":
    """Draw where heads look, over the image: a row a layer, a column a head, the query in a red box.

    ::

        maps = tcnn_probe.attention_maps(vit, photograph, queries=[(112, 112)])
        tcnn_probe.plot.attention_maps(maps)
        tcnn_probe.plot.attention_maps(maps, query="class")  # of the class token

    The more a place is looked at, the more of its colour covers the image. Each map has a scale of its own, from 0 to
    its largest value.

    Args:
        maps: what :func:`tcnn_probe.attention_maps` gives.
        image: which of the images.
        query: (y, x) in pixels of the image, one of those that the maps are of; or "class", for the class token. None:
            the first of these, the middle of the image if the maps are from everywhere, or else the class token.
        layers: names or globs of the layers to draw; None for all that have such maps.
        heads: of each layer; None for all.
        figure: where to draw; None: pyplot's current figure if it is empty, else a new one of fitting size.

    Returns:
        the figure.

    Raises:
        TypeError: ``maps`` are no such tree.
        ValueError: the maps have no such image, query, layer or head.
    """
    if not isinstance(maps, xr.DataTree) or "input" not in maps:
        raise TypeError(f"expected what tcnn_probe.attention_maps gives, an xarray.DataTree, got {type(maps).__name__}")
    if not 0 <= image < maps.sizes["image"]:
        raise ValueError(f"expected one of {maps.sizes['image']} images, from 0, got {image!r}")
    picture = maps.dataset["input"].values[image]
    size = picture.shape[1], picture.shape[2]
    query = _checked_query(maps, query, size)
    rows = _rows(maps.isel(image=image), query, layers, heads)
    beside = min(3, len(rows))  # the image's width, in panels
    columns = max(row.sizes["head"] for row in rows)
    if figure is None:
        inches = _PANEL * (columns + beside) + 1.2, (_PANEL * size[0] / size[1] + 0.05) * len(rows) + 0.8
        figure = empty_figure(*inches)
    places = figure.add_gridspec(len(rows), beside + columns)
    panel = figure.add_subplot(places[:beside, :beside])
    draw_image(panel, picture)
    _box(panel, rows[0])
    panel.set_xlabel("image", fontsize=8)
    named: set[int] = set()  # columns
    for number, row in enumerate(rows):
        for column, head in enumerate(row["head"].values):
            panel = figure.add_subplot(places[number, beside + column])
            _draw(panel, picture, row[column])
            _box(panel, row)
            if column not in named:
                panel.set_title(f"head {head}", fontsize=7, pad=2)
            if column == 0:
                panel.set_ylabel(wrapped(row.layer.item()), fontsize=7, rotation=0, ha="right", va="center")
        named |= {*range(row.sizes["head"])}
    whose = "of the class token" if isinstance(query, str) else f"from pixel (y, x) = {query}"
    figure.suptitle(f"attention {whose}", fontsize=10)
    return figure


def _checked_query(maps: xr.DataTree, query: Any, size: tuple[int, int]) -> str | tuple[int, int]:
    """A pixel, or "class"."""
    of_queries = [node for node in maps.children.values() if "attention" in node.dataset]
    pixels = _pixels(of_queries[0].dataset["attention"]) if of_queries else []
    if query is None:
        query = pixels[0] if pixels else (size[0] // 2, size[1] // 2) if of_queries else "class"
    if isinstance(query, str):
        if query != "class":
            raise ValueError(f"expected query=(y, x) or 'class', got {query!r}")
        return query
    if not of_queries:
        raise ValueError("these maps are of class tokens alone: query='class'")
    pixel = as_pixel(query, *size)
    if pixels and pixel not in pixels:
        raise ValueError(f"the maps are from the pixels {pixels}, not from {pixel}")
    return pixel


def _rows(maps: xr.DataTree, query: str | tuple[int, int], layers: Any, heads: Any) -> list[xr.DataArray]:
    """Maps (head, y, x) of each layer, in the model's order."""
    found: dict[str, xr.DataArray] = {}
    for node in maps.children.values():
        name = "class_attention" if isinstance(query, str) else "attention"
        if name in node.dataset:
            values = node.dataset[name] if isinstance(query, str) else _from(node.dataset[name], query)
            found |= {layer: values.sel(layer=layer) for layer in values.layer.values.tolist()}
    found = {layer: values for layer, values in found.items() if values.notnull().any()}
    wanted = [layers] if isinstance(layers, str) else list(layers or [])
    if lacking := [glob for glob in wanted if not fnmatch.filter(found, glob)]:
        raise ValueError(f"there are no such maps of the layer {lacking[0]!r}; there are of {sorted(found)}")
    if not found:
        raise ValueError("there is no class token in these maps")
    chosen = found if not wanted else {layer for glob in wanted for layer in fnmatch.filter(found, glob)}
    order = [layer for layer in json.loads(maps.attrs["layers"]) if layer in chosen]
    kept = [heads] if isinstance(heads, int) else heads
    rows = [found[layer] if kept is None else found[layer].sel(head=found[layer]["head"].isin(kept)) for layer in order]
    if not all(row.sizes["head"] for row in rows):
        raise ValueError(f"expected heads of the layers, got {heads!r}")
    return rows


def _pixels(attention: xr.DataArray) -> list[tuple[int, int]]:
    """From which the maps are, if they are not from everywhere."""
    if "query" not in attention.dims:
        return []
    return list(zip(attention.from_y.values.tolist(), attention.from_x.values.tolist(), strict=True))


def _from(attention: xr.DataArray, query: tuple[int, int]) -> xr.DataArray:
    """Attention from one pixel, (layer, head, y, x), with the cell of the keys that has it as coordinates."""
    if "query" in attention.dims:
        return attention.isel(query=_pixels(attention).index(query))
    centres = [attention[f"pixel_{dim}"].values for dim in "yx"]
    keys = [int(np.abs(along - at).argmin()) for along, at in zip(centres, query, strict=True)]
    cell = [key * attention.sizes[f"query_{dim}"] // attention.sizes[dim] for dim, key in zip("yx", keys, strict=True)]
    values = attention.isel(query_y=cell[0], query_x=cell[1], drop=True)
    return values.assign_coords(query_y=keys[0], query_x=keys[1])


def _draw(axes: "Axes", picture: NDArray[Any], maps: xr.DataArray) -> None:
    """Draw a map (y, x) over the image, the more attention the more opaque, cells at the centres of their fields."""
    draw_image(axes, picture.mean(0, keepdims=True))
    share = maps.values / max(float(np.nanmax(maps.values)), 1e-30)
    (top, high), (left, wide) = _edges(maps, "y"), _edges(maps, "x")
    extent = left, left + wide * share.shape[1], top + high * share.shape[0], top
    draw_map(axes, share, *picture.shape[1:], extent=extent, vmin=0, vmax=1, alpha=0.35 + 0.6 * share)


def _box(axes: "Axes", maps: xr.DataArray) -> None:
    """Draw the cell of the query, if there is one."""
    if "query_y" in maps.coords:
        (top, high), (left, wide) = _edges(maps, "y"), _edges(maps, "x")
        draw_box(axes, top + maps.query_y.item() * high, left + maps.query_x.item() * wide, high, wide)


def _edges(maps: xr.DataArray, dim: str) -> tuple[float, float]:
    """Where the first cell begins along a side of the image, and how long a cell is; pixel n is from n to n + 1."""
    centres = maps[f"pixel_{dim}"].values
    spacing = float(centres[1] - centres[0]) if len(centres) > 1 else 2 * float(centres[0]) + 1
    return float(centres[0]) + 0.5 - spacing / 2, spacing
