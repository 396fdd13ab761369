"""Figure of the costs of single heads and of the curves, for ``pretrained_heads.py``."""

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.figures import STYLE, add_letters, ordered_colors
from tcnn_probe.evaluation import mean_interval
from tcnn_probe.plot import OKABE_ITO

__all__ = ["draw"]

COLORS = {
    "shares": OKABE_ITO["vermillion"],
    "deviation": OKABE_ITO["blue"],
    "random": "0.6",
    "same layers": OKABE_ITO["green"],
}
LABELS = {
    "shares": "by the share that the rung loses",
    "deviation": "by standard deviation over images",
    "random": "random",
    "same layers": "random, same layers",
}


@mpl.rc_context(STYLE)
def draw(heads: xr.Dataset, costs: xr.Dataset, curves: xr.Dataset) -> Figure:
    """Draw costs of single heads above, and curves of each rung below."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplot_mosaic("AABB;CDEF")
    cost = costs.exact.mean("image")
    content = heads.key_content + heads.query_key_content
    panels = {
        "A": (heads.key_content / content, "salient", "static"),
        "B": (content / heads.selectivity, "static", "zero"),
    }
    colors = ordered_colors(heads.sizes["layer"])
    for letter, (share, upper, lower) in panels.items():
        ratio = cost.sel(mode=upper) / cost.sel(mode=lower)
        for layer, color in zip(heads.layer.values, colors, strict=True):
            x, y = share.sel(layer=layer), ratio.sel(layer=layer)
            axes[letter].plot(x, y, "o", color=color, ms=4)
        axes[letter].set_ylabel(f"cost({upper}) / cost({lower})")
    axes["A"].set(xlabel="key content / content", title="single heads, dark: first blocks")
    axes["B"].set(xlabel="content / selectivity", title="single heads")
    top = float(curves.change.mean("image").max())
    for letter, mode in zip("CDEF", ("uniform", "convolutional", "static", "salient"), strict=True):
        draw_curve(axes[letter], curves.change.sel(mode=mode))
        axes[letter].set(title=mode, xlabel="share of heads replaced", ylim=(0, 1.05 * top))
    zero = curves.change.sel(mode="zero", order="shares", seed=0).mean("image")
    axes["E"].plot(zero.fraction, zero, ":", color="0.2", label="the same heads zero")
    axes["C"].set_ylabel("relative change of the last patch features")
    handles, labels = axes["E"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    add_letters(axes[letter] for letter in "ABCDEF")
    return figure


def draw_curve(panel: Axes, change: xr.DataArray) -> None:
    """Draw the change against the share of heads, with intervals over images."""
    for order, color in COLORS.items():
        by_image = change.sel(order=order).mean("seed")
        # All heads are replaced in one order only.
        last = change.sel(order="shares").isel(fraction=-1, seed=0)
        by_image[{"fraction": -1}] = last
        low, high = mean_interval(by_image).transpose("bound", ...).values
        panel.fill_between(by_image.fraction, low, high, color=color, alpha=0.2, lw=0)
        mean = np.asarray(by_image.mean("image"))
        panel.plot(by_image.fraction, mean, "-o", ms=3, color=color, label=LABELS[order])
