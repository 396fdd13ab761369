"""Shared parts of plots: colours (for the colour-blind as well),
checks of arguments, images and maps on axes.
"""

import math
import operator
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import xarray as xr
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from typing_extensions import TypeVar

    # A plot returns the figure that it is given; one of its own is a Figure, which has savefig.
    AnyFigure = TypeVar("AnyFigure", bound=Figure | SubFigure, default=Figure)

__all__ = [
    "OKABE_ITO", "RED", "axes_or_current", "axes_without_data", "axis_label", "check_array",
    "check_not_empty", "check_pixel", "draw_box", "draw_image", "draw_map", "empty_figure",
    "finish_grid", "image_array", "label_layers", "label_values", "legend_above", "legend_below",
    "legend_beside", "letters_across", "names_that_fit", "select_dims", "sequential_colors",
    "short_names", "whole_number_ticks", "wrap_name",
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
"""Colours of Okabe and Ito (2008), for things that have no order:
models, methods, types of heads.
"""

# Figures full of panels, in none of which a curve would have its place.
_GRIDS: "WeakSet[Figure]" = WeakSet()

RED = OKABE_ITO["vermillion"]

_BELOW = "legend below"


def sequential_colors(count: int) -> list[tuple[float, float, float, float]]:
    """Return colours for things in order, such as layers:
    viridis without its lightest, too pale for lines.
    """
    import matplotlib as mpl

    colors = mpl.colormaps["viridis"].resampled(count + 1)
    return [colors(number) for number in range(count)]


def axes_or_current(ax: "Axes | None") -> "Axes":
    """Return ``ax``, or pyplot's current axes;
    in a new figure if there is none, or only a grid of panels.
    """
    import matplotlib.pyplot as plt

    if ax is None and (not plt.get_fignums() or plt.gcf() in _GRIDS):
        _new_figure()
    return plt.gca() if ax is None else ax


def axes_without_data(ax: "Axes | None", width: float, height: float) -> "Axes":
    """Return ``ax``, or pyplot's current axes if nothing is drawn on them,
    else those of a new figure, in inches.

    Bars and images would cover what else is drawn on the same axes.
    """
    import matplotlib.pyplot as plt

    if ax is not None:
        return ax
    if not plt.get_fignums() or plt.gcf() in _GRIDS or (plt.gcf().axes and plt.gca().has_data()):
        _new_figure(figsize=(width, height))
    return plt.gca()


def empty_figure(width: float, height: float) -> "Figure":
    """Return pyplot's current figure if nothing is drawn on it,
    else a new one of this size, in inches.
    """
    import matplotlib.pyplot as plt

    if not plt.get_fignums() or plt.gcf().axes or plt.gcf().subfigs:
        return _new_figure(figsize=(width, height))
    figure = plt.gcf()
    _lay_out(figure)
    return figure


def _lay_out(figure: "Figure | None") -> None:
    """Give a figure a layout engine, which makes room for legends, unless it has one."""
    if figure is not None and figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")


def _new_figure(**options: Any) -> "Figure":
    """Return a new figure of pyplot's with constrained layout, which a notebook shows once."""
    import matplotlib.pyplot as plt

    figure = plt.figure(layout="constrained", **options)
    # The name under which IPython asks an object to show itself. A notebook shows its last value,
    # and at the end of a cell the open figures: of a figure that is returned it made two pictures.
    figure._ipython_display_ = partial(_show, figure)  # type: ignore[attr-defined]
    return figure


def _show(figure: "Figure") -> None:
    """Show a figure in a notebook, and close it so
    that the end of the cell does not show it again.
    """
    import matplotlib.pyplot as plt

    # From now on it is shown as any figure is.
    del figure._ipython_display_  # type: ignore[attr-defined]
    sys.modules["IPython"].display.display(figure)
    if "inline" in plt.get_backend():
        plt.close(figure)


def finish_grid(figure: "Figure | SubFigure", current: "Axes") -> None:
    """Leave a panel current for pyplot's titles;
    what is drawn next without axes gets a figure of its own.
    """
    figure.sca(current)
    root = current.get_figure(root=True)
    if root is not None:
        _GRIDS.add(root)


def legend_beside(axes: "Axes") -> None:
    """Draw the legend at the right of the axes,
    where it covers nothing; a layout engine makes room for it.
    """
    _lay_out(axes.get_figure(root=True))
    # 14 lines fit beside axes of usual height.
    columns = 1 + (len(axes.get_legend_handles_labels()[0]) - 1) // 14
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize="small",
        ncols=columns,
    )


def legend_below(axes: "Axes") -> None:
    """Draw the legend at the foot of the figure,
    in as many columns as fit; a layout engine makes room for it.
    """
    figure, root = axes.figure, axes.get_figure(root=True)
    _lay_out(root)
    handles: dict[str, Any] = {}
    for legend in list(figure.legends):
        # A second legend would be drawn over that of other axes.
        if legend.get_gid() == _BELOW:
            names = [text.get_text() for text in legend.get_texts()]
            handles |= dict(zip(names, legend.legend_handles, strict=True))
            legend.remove()
    own, names = axes.get_legend_handles_labels()
    handles |= dict(zip(names, own, strict=True))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        frameon=False,
        fontsize="small",
        ncols=_columns(list(handles), _letters(figure.bbox.width, root)),
    ).set_gid(_BELOW)


def _columns(names: Sequence[str], letters: int) -> int:
    """Return the number of a legend's columns that fit into a number of letters."""
    # Each patch of colour takes the space of seven letters.
    return min(max(letters // (max(map(len, names)) + 7), 1), len(names))


def letters_across(axes: "Axes") -> int:
    """Return the number of small letters that fit beside each other above axes,
    before a layout makes room.
    """
    return _letters(axes.get_window_extent().width, axes.figure)


def label_values(axes: "Axes", values: xr.DataArray) -> None:
    """Label the vertical axis, in several lines if one would be longer than the axis."""
    # Letters of labels are a fifth larger than small ones.
    letters = _letters(axes.get_window_extent().height, axes.figure) / 1.2
    axes.set_ylabel(fill(axis_label(values), max(20, int(letters))))


def _letters(width: float, figure: Any) -> int:
    """Return the number of small letters that fit into a width in pixels of the figure."""
    from matplotlib.font_manager import FontProperties

    letter = 0.55 * FontProperties(size="small").get_size_in_points()
    return int(72 * width / figure.dpi / letter)


def legend_above(axes: "Axes") -> None:
    """Draw the legend between the axes and a title at their left, where it covers nothing."""
    _lay_out(axes.get_figure(root=True))
    names = axes.get_legend_handles_labels()[1]
    columns = _columns(names, letters_across(axes))
    # A power of ten above the axis, as of a network without training, stands beside the legend.
    axes.yaxis.get_offset_text().set_horizontalalignment("right")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        fontsize="small",
        borderaxespad=0.2,
    )
    # Points: a line of small text takes 15.
    axes.set_title(
        axes.get_title(loc="left"),
        loc="left",
        fontsize="small",
        pad=6 + 15 * math.ceil(len(names) / columns),
    )


def whole_number_ticks(axes: "Axes", along: xr.DataArray) -> None:
    """Put ticks of the x axis at whole numbers, if the marks are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    locator = axes.xaxis.get_major_locator()
    if along.dtype.kind in "iu" and isinstance(locator, MaxNLocator):
        locator.set_params(integer=True, min_n_ticks=1)


def label_layers(axes: "Axes", places: Sequence[float], layers: Sequence[str]) -> None:
    """Label the horizontal axis with short names of layers, upright if they are many or long."""
    names = short_names(layers)
    crowded = sum(len(name) + 2 for name in names) > letters_across(axes)
    axes.set_xticks(places, names, fontsize="small", rotation=90 if crowded else 0)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("layer")


def names_that_fit(layers: Sequence[Any], letters: float) -> list[str]:
    """Return names of layers, without the parts that all share if one has too many letters."""
    names = [str(layer) for layer in layers]
    if max(map(len, names)) <= letters:
        return names
    return [f"layer {name}" for name in short_names(names)]


def check_array(values: Any, name: str) -> xr.DataArray:
    """Raise TypeError unless the values are a DataArray."""
    if not isinstance(values, xr.DataArray):
        hints: dict[type, str] = {
            xr.Dataset: ", for example dataset['gate']",
            xr.DataTree: ", for example tree['heads/gate']",
        }
        hint = hints.get(type(values), "")
        raise TypeError(
            f"expected {name} as an xarray.DataArray{hint}; got {type(values).__name__}"
        )
    return values


def check_not_empty(values: xr.DataArray, name: Any) -> None:
    """Raise ValueError if all values are NaN."""
    if not values.notnull().any():
        raise ValueError(f"nothing to draw: {name or 'the values'} are all NaN")


def select_dims(
    values: xr.DataArray,
    name: str,
    required: Collection[str],
    optional: Collection[str] = (),
) -> Any:
    """Drop further dimensions of length 1; raise ValueError if one is longer,
    or a required one missing.
    """
    for dim in required:
        if dim not in values.dims:
            got = f"got {values.dims}: no {dim!r}"
            raise ValueError(f"expected {name} with the dimensions {tuple(required)}, {got}")
    further = [dim for dim in values.dims if dim not in (*required, *optional)]
    long = tuple(dim for dim in further if values.sizes[dim] != 1)
    if long:
        selection = ", ".join(f"{dim}=..." for dim in long)
        raise ValueError(
            f"{name} have further dimensions {long}: choose one of each, with .sel({selection})"
        )
    return values.squeeze(further, drop=True)


def image_array(images: Any, preparation: Mapping[str, Any] | None = None) -> NDArray[Any]:
    """Return images (B, C, H, W) of 1 or 3 channels as floats; ValueError for other shapes.

    Args:
        images: Images as the model took them: a tensor or an array, or what else ``as_images``
            takes.
        preparation: Options of the transform through which pictures go; None if it is unknown.
    """
    if getattr(images, "ndim", 0) != 4 or images.dtype == np.uint8:
        images = _parsed(images, preparation)
    if hasattr(images, "detach"):
        images = images.detach().cpu().float()  # NumPy has no bfloat16
    array = np.asarray(images, dtype=float)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or 0 in array.shape:
        raise ValueError(f"expected images of shape (B, 1 or 3, H, W), got {array.shape}")
    return array


def _parsed(images: Any, preparation: Mapping[str, Any] | None) -> Any:
    """Return images of other forms as (B, C, H, W)."""
    # Imported here: arrays are drawn where torch is not installed.
    from tcnn_probe.images import as_batch, as_pictures, prepare_pixels

    pictures = as_pictures(images)
    if pictures is None:
        return as_batch(images, "(B, C, H, W), or pictures")
    if preparation is None:
        raise ValueError(
            "how these pictures were cut for the model is unknown: give the tensor that the model "
            "was given, tcnn_probe.images.as_images(pictures, model)"
        )
    return prepare_pixels(pictures, preparation)


def check_pixel(query: Any, height: int, width: int) -> tuple[int, int]:
    """Return a query (y, x) as integers; raise ValueError unless it lies inside height x width
    pixels.
    """
    try:
        y, x = map(operator.index, query)
    except (TypeError, ValueError):
        raise ValueError(f"expected a query (y, x), two integers, got {query!r}") from None
    if not (0 <= y < height and 0 <= x < width):
        raise ValueError(f"expected a query (y, x) inside {height} x {width} pixels, got {query!r}")
    return y, x


def axis_label(values: xr.DataArray) -> str:
    """Return the array's long name with its unit, unless that is 1, or its name."""
    if "long_name" not in values.attrs:
        # Of entropy / uniform_entropy xarray keeps the unit that both have, but not the names.
        return "" if values.name is None else str(values.name).replace("_", " ")
    name = str(values.attrs["long_name"]).replace("_", " ")
    units = re.sub(r"(?<=[a-z])(-?\d+)", r"$^{\1}$", str(values.attrs.get("units", "1")))
    return name if units in ("1", "") else f"{name} ({units})"


def wrap_name(name: Any) -> str:
    """Break a module's name at its dots into lines of about 15 letters."""
    lines = [""]
    for part in re.split(r"(?<=\.)", str(name)):
        if lines[-1] and len(lines[-1]) + len(part) > 15:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def short_names(layers: Sequence[str]) -> list[str]:
    """Drop the parts that all names begin or end with:
    "blocks.0.attn" and "blocks.1.attn" become "0" and "1".
    """
    parts = [str(layer).split(".") for layer in layers]
    for end in (0, -1):
        while (
            len(parts) > 1 and min(map(len, parts)) > 1 and len({part[end] for part in parts}) == 1
        ):
            parts = [part[1:] if end == 0 else part[:-1] for part in parts]
    return [".".join(part) for part in parts]


def draw_image(axes: "Axes", image: NDArray[Any]) -> None:
    """Draw an image (C, H, W) of 1 or 3 channels,
    from its smallest value (black) to its largest, without ticks.
    """
    low, high = np.nanmin(image), np.nanmax(image)
    # An image of a single value is black.
    pixels = (image - low) / max(high - low, 1e-12)
    height, width = image.shape[1:]
    pixels = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, extent=(0, width, height, 0))
    axes.set(xticks=[], yticks=[])


def draw_map(
    axes: "Axes", values: NDArray[Any], height: float, width: float, **options: Any
) -> None:
    """Draw a map (h, w), of any resolution, over height x width pixels or an ``extent``."""
    # cividis: its lightness grows evenly, and the colour-blind see the same differences.
    axes.imshow(
        values,
        **{
            "extent": (0, width, height, 0),
            "interpolation": "nearest",
            "cmap": "cividis",
        }
        | options,
    )
    axes.set(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))


def draw_box(axes: "Axes", y: float, x: float, height: float, width: float) -> None:
    """Draw a red box, with a white edge against red images; y and x are its upper left corner."""
    from matplotlib import rcParams
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    line = rcParams["lines.linewidth"]
    edge = [withStroke(linewidth=line + 1, foreground="w")]
    axes.add_patch(
        Rectangle(
            (x, y),
            width,
            height,
            fill=False,
            edgecolor=RED,
            lw=line,
            clip_on=False,
            path_effects=edge,
        )
    )
