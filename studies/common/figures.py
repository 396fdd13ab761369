"""Look of the studies' figures: one style, letters of panels, colours in order and of the types of
heads, ticks at whole epochs, numbers in the cells of a picture.
"""

from collections.abc import Callable, Iterable
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from tcnn_probe.plot import OKABE_ITO

__all__ = [
    "BY_GATE",
    "COLORS",
    "PAIR",
    "STYLE",
    "add_letters",
    "number_cells",
    "ordered_colors",
    "whole_ticks",
]

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
"""Options of ``matplotlib.rc_context``."""

# Names and colours of the types of heads that ``tcnn_probe.head_types`` gives.
PAIR = ("convolutional", "content")
COLORS = {
    "convolutional": OKABE_ITO["blue"],
    "mixed": OKABE_ITO["green"],
    "averaging": OKABE_ITO["purple"],
    "positional": OKABE_ITO["sky blue"],
    # Of salient heads, too.
    "content": OKABE_ITO["vermillion"],
}

BY_GATE = {"convolutional": "convolutional", "mixed": "mixed", "content": "low-gate"}
"""Words for the types of ``by="gate"``. Type "content" then means a gate of at most 1/3: such a
head attends little by position, which does not tell whether it follows the content of the image.
"""

RGBA = tuple[float, float, float, float]


def add_letters(panels: Iterable[Axes], first: str = "A") -> None:
    """Letter the panels, so that a study's docstring can refer to them."""
    for number, panel in enumerate(panels):
        letter = chr(ord(first) + number)
        panel.set_title(letter, loc="left", fontweight="bold")


def ordered_colors(count: int) -> list[RGBA]:
    """Return colours from dark to light, for layers, rates or starts in their order."""
    # viridis without its lightest colour, which is hard to see on white
    viridis = mpl.colormaps["viridis"].resampled(count + 1)
    return [viridis(number) for number in range(count)]


def whole_ticks(panel: Axes) -> None:
    """Put the ticks of the x axis at whole numbers, because it counts epochs or blocks."""
    panel.xaxis.get_major_locator().set_params(integer=True)


def number_cells(
    panel: Axes,
    values: xr.DataArray,
    is_dark: Callable[[float], bool],
    digits: int = 2,
    **text: Any,
) -> None:
    """Write the number of each cell into a picture of a table, white where the cell is dark."""
    for (row, column), number in np.ndenumerate(values.values):
        color = "w" if is_dark(number) else "k"
        words = f"{number:.{digits}f}"
        panel.text(column, row, words, ha="center", va="center", color=color, **text)
