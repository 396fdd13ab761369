"""Figure of what removed heads cost: bars by type and condition,
and a point for each single head.
"""

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.head_types import COLORS, PAIR
from common.removal_costs import DRAWN, WITHIN, costs, head_costs
from tcnn_probe import evaluation

__all__ = ["draw"]

BARS = {
    "convolutional": 1.0,
    "random for convolutional": 0.35,
    "content": 1.0,
    "random for content": 0.35,
}
"""Sets of heads in the order of their bars, with their opacity: random heads are paler."""


def draw(tree: xr.DataTree) -> Figure:
    """Draw the costs of types by condition,
    a row for each mode; and the cost of each head by its gate.
    """
    right = tree["types"].right.load()
    modes = [str(mode) for mode in right.mode.values]
    figure = Figure(figsize=(11, 1.6 + 3 * len(modes)), layout="constrained")
    # Heads are removed one by one in the first mode alone, so their panel spans all rows.
    axes = figure.subplot_mosaic([[mode, mode, "heads"] for mode in modes])
    for mode in modes:
        panel = axes[mode]
        for place, name in enumerate(BARS):
            _draw_bars(panel, costs(right.sel(mode=mode), name), place, name)
        panel.set_xticks(range(right.sizes["condition"]), right.condition.values)
        panel.axhline(0, color="0.3", lw=0.8)
        panel.set_ylabel("accuracy lost (share of images)")
    figure.legend(
        *axes[modes[0]].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    _draw_heads(axes["heads"], tree["heads"].dataset.load())
    # Six letters are enough for five modes and the heads; zip is not strict, since there may be
    # fewer modes.
    for letter, (name, panel) in zip("ABCDEF", axes.items(), strict=False):
        title = f"{name}; lines: 95 % intervals"
        if name == "heads":
            title = f"{modes[0]}, one head"
        panel.set_title(f"{letter}  {title}", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_bars(panel: Axes, cost: xr.DataArray, place: int, name: str) -> None:
    """Draw a set of heads as a bar for each condition."""
    means = cost.mean(["training", *DRAWN]).values
    bounds = evaluation.mean_interval(cost.mean("training"), DRAWN).values
    # The four bars are a fifth of the distance of ticks apart, and centred on the condition's tick.
    x = np.arange(len(means)) + 0.2 * (place - 1.5)
    kind = name.removeprefix("random for ")
    label = f"{kind} heads" if name in PAIR else f"as many as {kind}, at random"
    color = mpl.colors.to_rgba(COLORS[kind], BARS[name])
    panel.bar(x, means, 0.19, color=color, label=label)
    panel.errorbar(x, means, np.abs(bounds.T - means), fmt="none", ecolor="0.2", elinewidth=0.9)


def _draw_heads(panel: Axes, heads: xr.Dataset) -> None:
    """Draw the cost of each head, mean over the conditions, by its gate."""
    # Otherwise contrast would count twice, by itself and in its group.
    cost = head_costs(heads).drop_sel(condition=WITHIN, errors="ignore")
    cost = cost.mean(["draw", "condition", "image"]).transpose(*heads.gate.dims)
    for kind, color in COLORS.items():
        of_kind = (heads.head_type == kind).values
        panel.scatter(
            heads.gate.values[of_kind],
            cost.values[of_kind],
            s=14,
            color=color,
            label=f"{kind} ({of_kind.sum()})",
        )
    panel.axhline(0, color="0.3", lw=0.8)
    panel.set(xlabel=r"gate $\sigma(\lambda)$", ylabel="accuracy lost, mean of conditions")
    panel.legend(frameon=False, fontsize=8)
