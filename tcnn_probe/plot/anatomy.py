"""Parts of the information in the attention of heads,
as stacked bars by layer or as bands over a training.
"""

from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from tcnn_probe.heads.types import PARTS, PREFIX
from tcnn_probe.plot.style import (
    OKABE_ITO,
    axes_without_data,
    axis_label,
    check_not_empty,
    label_layers,
    legend_above,
    legend_below,
    letters_across,
    whole_number_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["anatomy"]

# Blue parts are the same for all images, warm ones depend on the image.
_STYLES = {
    "convolution": ("offset: a convolution", "blue"),
    PREFIX: ("class and register tokens, always alike", "green"),
    "position_information": ("position in the image", "sky blue"),
    "static": ("offset or position (no grid)", "sky blue"),
    "key_content_information": ("key content: salient keys", "orange"),
    "query_key_content_information": ("query-key content: matching", "vermillion"),
}


def anatomy(
    ds: xr.Dataset, ax: "Axes | None" = None, *, legend: bool | Literal["below"] = True
) -> "Axes":
    """Draw how much of each head's attention is convolution,
    position, key content and query-key content, in nat.

    ::

        ds = xr.open_zarr("run.zarr")
        tcnn_probe.plot.anatomy(ds.isel(epoch=-1))  # bars: the heads of each layer
        tcnn_probe.plot.anatomy(ds.sel(layer="blocks.3.attn"))  # bands: means over heads, by epoch

    Of a single mark, each head is a bar, whose height is the selectivity of its attention, log keys
    minus entropy: 0 if it is even. Prefix information, a part of offset information, is drawn
    apart. Heads of a layer stand in the order of the rest of the latter, the largest first. Of
    several marks, bands are means over all heads that are selected. Parts that are slightly
    negative are drawn as 0. Where no grid is known, offset and position are drawn together,
    hatched. Heads and layers without values are left out.

    Args:
        ds: A recording: ``recorder.dataset``, ``xarray.open_zarr(path)``, or a selection.
        ax: Axes to draw on; None for the current axes if nothing is drawn on them, else for a new
            figure.
        legend: Draw a legend of the parts, above the axes (True), or "below", at the foot of the
            figure, which suits a narrow one.

    Returns:
        The axes; with a title, if they had none.

    Raises:
        TypeError: ``ds`` is no dataset.
        ValueError: The recording lacks the parts or has a further dimension, all values are NaN, or
            ``legend`` is another word.
    """
    if legend not in (True, False, "below"):
        raise ValueError(f"expected legend=True, False or 'below', got {legend!r}")
    parts = _parts(ds)
    marks = [dim for dim in parts.dims if dim not in ("part", "layer", "head")]
    along = [dim for dim in marks if parts.sizes[dim] > 1]
    parts = parts.squeeze([dim for dim in marks if dim not in along])
    if len(along) > 1:
        raise ValueError(
            f"expected marks, layers and heads, got also {along[1:]}: choose one of each with "
            ".isel()"
        )
    axes = _draw_bands(parts, str(along[0]), ax) if along else _draw_bars(parts, ax)
    axes.set_ylabel("selectivity (nat)")
    if not axes.get_title(loc="left"):
        lines = wrap(_title(ds), letters_across(axes))
        axes.set_title("\n".join(lines), loc="left", fontsize="small")
    if legend:
        (legend_below if legend == "below" else legend_above)(axes)
    return axes


def _parts(ds: xr.Dataset) -> xr.DataArray:
    """Return the parts, at least 0, with the dims ("part", ..., "layer", "head"),
    without layers that are all NaN.
    """
    if not isinstance(ds, xr.Dataset):
        hint = "; of a tree, tree['heads'].dataset" * isinstance(ds, xr.DataTree)
        raise TypeError(f"expected an xarray.Dataset, a recording{hint}; got {type(ds).__name__}")
    missing = [name for name in ("selectivity", *PARTS) if name not in ds]
    if missing:
        raise ValueError(
            f"the recording has no {', '.join(missing)}: record it anew with this version"
        )
    for dim in ("head", "layer"):
        if dim not in ds.dims:
            ds = ds.expand_dims(dim)
    content = ds.key_content_information + ds.query_key_content_information
    # Where a grid is known, the rest is split into offset and position.
    static = (ds.selectivity - content).where(ds.offset_information.isnull())
    # Recordings of earlier versions do not have it.
    prefix = ds.get(PREFIX, ds.offset_information * np.nan)
    drawn = {
        "convolution": ds.offset_information - prefix.fillna(0),
        PREFIX: prefix.where(prefix > 0),
        "static": static,
    }
    arrays = [drawn[name] if name in drawn else ds[name] for name in _STYLES]
    parts = xr.concat(
        [array.reset_coords(drop=True) for array in arrays],
        xr.Variable("part", list(_STYLES)),
    )
    parts = parts.transpose("part", ..., "layer", "head")
    parts = parts.where(ds.selectivity.notnull()).clip(0).load()
    parts = parts.transpose("part", ..., "layer", "head")
    parts = parts.dropna("layer", how="all").dropna("head", how="all")
    check_not_empty(parts, "the parts")
    return parts


def _draw_bars(parts: xr.DataArray, ax: "Axes | None") -> "Axes":
    """Draw a bar for each head, with a space between layers."""
    offset = parts.sel(part="convolution").values
    centers, places, columns = [], [], []
    start = 0.0
    for layer, heads in enumerate(parts.transpose("layer", "head", "part").values):
        exists = np.isfinite(heads).any(-1)
        order = np.argsort(-offset[layer], kind="stable")  # NaN comes last
        columns.append(heads[order[exists[order]]])
        count = int(exists.sum())
        places.append(start + np.arange(count))
        centers.append(start + (count - 1) / 2)
        # A space of at least one bar, so that layers of many heads are apart as well.
        start += count + max(1, 0.15 * count)
    # Inches: a bar of 384 still has two pixels.
    axes = axes_without_data(ax, min(12, max(6.4, 3 + start / 16)), 4)
    x, heights = np.concatenate(places), np.concatenate(columns).T
    _stack(
        heights,
        lambda height, bottom, style: axes.bar(x, height, width=1, bottom=bottom, lw=0, **style),
    )
    label_layers(axes, centers, parts.layer.values)
    axes.set_xlabel("layer (its heads by nat of convolution)")
    axes.set_xlim(x[0] - 1.5, x[-1] + 1.5)
    return axes


def _draw_bands(parts: xr.DataArray, along: str, ax: "Axes | None") -> "Axes":
    """Draw the mean over heads and layers of each part, over the marks."""
    axes, marks = axes_without_data(ax, 6.4, 4), parts[along]
    means = parts.mean(["layer", "head"]).transpose("part", along).values

    def draw(height: np.ndarray, bottom: np.ndarray, style: Any) -> None:
        band = axes.fill_between(marks.values, bottom, bottom + height, lw=0, **style)
        # As of bars, there is no margin below. Limits that are set would no longer follow other
        # axes that share them.
        band.sticky_edges.y.append(0)

    _stack(means, draw)
    axes.autoscale_view(scalex=False)
    whole_number_ticks(axes, marks)
    axes.set(xlabel=axis_label(marks), xlim=(marks.values[0], marks.values[-1]))
    return axes


def _stack(heights: np.ndarray, draw: Any) -> None:
    """Draw parts (part, n) on top of each other; NaN is nothing."""
    bottom = np.zeros(heights.shape[1])
    for (name, (label, color)), height in zip(_STYLES.items(), heights, strict=True):
        if not np.isfinite(height).any():
            continue
        style = {"color": OKABE_ITO[color], "label": label}
        if name == "static":
            style |= {"hatch": "////", "edgecolor": OKABE_ITO["blue"]}
        height = np.nan_to_num(height)
        draw(height, bottom.copy(), style)
        bottom += height


def _title(ds: xr.Dataset) -> str:
    """Say what is drawn, at which mark, and from how many images."""
    details = [
        f"{name} {label.item()}"
        for name, label in ds.coords.items()
        # What is measured has a unit, such as the distance of uniform attention.
        if label.size == 1 and name not in ("layer", "head") and "units" not in label.attrs
    ]
    counts = ds.images.values if "images" in ds else np.array([np.nan])
    if np.isfinite(counts).any():
        smallest, largest = int(np.nanmin(counts)), int(np.nanmax(counts))
        span = f"{smallest} to {largest}" if smallest < largest else smallest
        details.append(f"from {span} images")
    title = "what the attention of each head depends on"
    return title + (f" ({', '.join(details)})" if details else "")
