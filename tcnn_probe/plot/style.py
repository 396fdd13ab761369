"""What plots share: colours (for the colour-blind as well), checks of what they are given, images and maps on axes."""

import operator
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "OKABE_ITO", "RED", "as_array", "as_images", "as_pixel", "axes_or_current", "axis_label", "draw_box",
    "draw_image", "draw_map", "empty_figure", "in_order", "legend_beside", "select_others", "wrapped",
]  # fmt: skip

OKABE_ITO = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermillion": "#D55E00",
    "sky blue": "#56B4E9",
    "purple": "#CC79A7",
    "yellow": "#F0E442",
    "black": "#000000",
}
"""Of Okabe and Ito (2008), for things that have no order: models, methods, kinds of heads."""

RED = OKABE_ITO["vermillion"]


def in_order(count: int) -> list[tuple[float, float, float, float]]:
    """So many colours for things in order, such as layers: viridis without its lightest."""
    import matplotlib as mpl

    colors = mpl.colormaps["viridis"].resampled(count + 1)
    return [colors(place) for place in range(count)]


def axes_or_current(ax: "Axes | None") -> "Axes":
    """``ax``, or pyplot's current axes; new ones in a figure with constrained layout if there is no figure."""
    import matplotlib.pyplot as plt

    if ax is None and not plt.get_fignums():
        plt.figure(layout="constrained")
    return plt.gca() if ax is None else ax


def empty_figure(width: float, height: float) -> "Figure":
    """Pyplot's current figure if nothing is drawn on it, else a new one of this size, in inches."""
    import matplotlib.pyplot as plt

    if plt.get_fignums() and not (figure := plt.gcf()).axes and not figure.subfigs:
        if figure.get_layout_engine() is None:
            figure.set_layout_engine("constrained")
        return figure
    return plt.figure(figsize=(width, height), layout="constrained")


def legend_beside(axes: "Axes") -> None:
    """Draw the legend at the right of the axes, where it covers nothing; a layout engine makes room for it."""
    figure = axes.get_figure(root=True)
    if figure is not None and figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")
    columns = 1 + (len(axes.get_legend_handles_labels()[0]) - 1) // 14
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small", ncols=columns)


def as_array(values: Any, what: str) -> xr.DataArray:
    """Raise TypeError unless it is a DataArray."""
    if not isinstance(values, xr.DataArray):
        hints: dict[type, str] = {
            xr.Dataset: ", for example dataset['gate']",
            xr.DataTree: ", for example tree['heads/gate']",
        }
        hint = hints.get(type(values), "")
        raise TypeError(f"expected {what} as an xarray.DataArray{hint}; got {type(values).__name__}")
    return values


def select_others(values: xr.DataArray, what: str, needed: Collection[str], optional: Collection[str] = ()) -> Any:
    """``values`` with just these dimensions, others of length 1 dropped; ValueError if one lacks or is too many."""
    if missing := [dim for dim in needed if dim not in values.dims]:
        raise ValueError(f"expected {what} with the dimensions {tuple(needed)}, got {values.dims}: no {missing[0]!r}")
    others = [dim for dim in values.dims if dim not in (*needed, *optional)]
    if several := [dim for dim in others if values.sizes[dim] != 1]:
        chosen = ", ".join(f"{dim}=..." for dim in several)
        raise ValueError(f"{what} have further dimensions {tuple(several)}: choose one of each, with .sel({chosen})")
    return values.squeeze(others, drop=True)


def as_images(images: Any) -> NDArray[Any]:
    """Images (B, C, H, W) of 1 or 3 channels, a tensor or an array, as floats; ValueError for another shape."""
    found = np.asarray(images.detach().cpu().float() if hasattr(images, "detach") else images, dtype=float)
    if found.ndim != 4 or found.shape[1] not in (1, 3) or 0 in found.shape:
        hint = "; of pictures, give what the model was given: tcnn_probe.images.as_images(pictures, model)"
        raise ValueError(f"expected images of shape (B, 1 or 3, H, W), got {found.shape}{hint}")
    return found


def as_pixel(query: Any, height: int, width: int) -> tuple[int, int]:
    """A query (y, x) as integers; ValueError unless it is inside so many pixels."""
    try:
        y, x = (operator.index(at) for at in query)
    except (TypeError, ValueError):
        raise ValueError(f"expected a query (y, x), two integers, got {query!r}") from None
    if not (0 <= y < height and 0 <= x < width):
        raise ValueError(f"expected a query (y, x) inside {height} x {width} pixels, got {query!r}")
    return y, x


def axis_label(values: xr.DataArray) -> str:
    """The array's long name, or name, with its unit, unless that is 1."""
    name = str(values.attrs.get("long_name", values.name or "")).replace("_", " ")
    units = re.sub(r"(?<=[a-z])(-?\d+)", r"$^{\1}$", str(values.attrs.get("units", "1")))
    return name if units in ("1", "") else f"{name} ({units})"


def wrapped(name: Any) -> str:
    """A module's name in lines of about 15 letters, broken at its dots."""
    lines = [""]
    for part in re.split(r"(?<=\.)", str(name)):
        if lines[-1] and len(lines[-1]) + len(part) > 15:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def draw_image(axes: "Axes", image: NDArray[Any]) -> None:
    """Draw an image (C, H, W) of 1 or 3 channels, from its least value (black) to its largest, without ticks."""
    low, high = np.nanmin(image), np.nanmax(image)
    pixels = (image - low) / max(high - low, 1e-12)
    height, width = image.shape[1:]
    shown = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    axes.imshow(shown, cmap="gray", vmin=0, vmax=1, extent=(0, width, height, 0))
    axes.set(xticks=[], yticks=[])


def draw_map(axes: "Axes", values: NDArray[Any], height: float, width: float, **options: Any) -> None:
    """Draw a map (h, w), of any resolution, over height x width pixels or an ``extent``; its lightness grows evenly."""
    axes.imshow(values, **{"extent": (0, width, height, 0), "interpolation": "nearest", "cmap": "cividis"} | options)
    axes.set(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))


def draw_box(axes: "Axes", y: float, x: float, height: float, width: float) -> None:
    """Draw a red box with a white edge, y and x its upper left corner."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    edge = [withStroke(linewidth=2.5, foreground="w")]
    axes.add_patch(
        Rectangle((x, y), width, height, fill=False, edgecolor=RED, lw=1.5, clip_on=False, path_effects=edge)
    )
