"""The colours of all plots, for the colour-blind as well."""

__all__ = ["BLUE", "MAPS", "OKABE_ITO", "RED", "in_order"]

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

RED, BLUE = OKABE_ITO["vermillion"], OKABE_ITO["blue"]

MAPS = "cividis"
"""For maps; its lightness grows evenly."""


def in_order(count: int) -> list[tuple[float, float, float, float]]:
    """So many colours for things in order, such as layers: viridis without its lightest."""
    import matplotlib as mpl

    colors = mpl.colormaps["viridis"].resampled(count + 1)
    return [colors(place) for place in range(count)]
