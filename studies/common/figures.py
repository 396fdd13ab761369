"""Look of the studies' figures: one style, colours in order, ticks at whole epochs."""

import matplotlib as mpl
from matplotlib.axes import Axes

__all__ = ["STYLE", "ordered_colors", "whole_ticks"]

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
"""Options of ``matplotlib.rc_context``."""

RGBA = tuple[float, float, float, float]


def ordered_colors(count: int) -> list[RGBA]:
    """Return colours from dark to light, for layers, rates or starts in their order."""
    # viridis without its lightest colour, which is hard to see on white
    viridis = mpl.colormaps["viridis"].resampled(count + 1)
    return [viridis(number) for number in range(count)]


def whole_ticks(panel: Axes) -> None:
    """Put the ticks of the x axis at whole numbers: there is no half an epoch or block."""
    panel.xaxis.get_major_locator().set_params(integer=True)
