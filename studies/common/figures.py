"""Look of the studies' figures: one style,
letters of panels, colours in order, ticks at whole epochs.
"""

from collections.abc import Iterable

import matplotlib as mpl
from matplotlib.axes import Axes

__all__ = ["STYLE", "add_letters", "ordered_colors", "whole_ticks"]

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
"""Options of ``matplotlib.rc_context``."""

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
