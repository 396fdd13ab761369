"""Costs of heads to first order against exact ones."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from tcnn_probe.evaluation.intervals import mean_interval, scipy_stats
from tcnn_probe.plot.style import (
    OKABE_ITO,
    axes_or_current,
    check_array,
    legend_beside,
    select_dims,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["head_costs"]


def head_costs(estimate: xr.DataArray, exact: xr.DataArray, ax: "Axes | None" = None) -> "Axes":
    """Draw the cost of each head to first order against its exact cost,
    one colour for each mode of ablation.

    ::

        estimate = tcnn_probe.head_importance(model, images, reference=training_images)
        exact = tcnn_probe.head_costs(model, images, reference=training_images)
        tcnn_probe.plot.head_costs(estimate, exact)

    Points are means over images, and lines through them 95 % intervals. On the dashed line, both
    are equal. The legend has the rank correlation over heads. Axes are logarithmic if no mean is
    negative; costs of zero are then left out.

    Args:
        estimate: Result of :func:`tcnn_probe.head_importance`.
        exact: Result of :func:`tcnn_probe.head_costs` for the same heads and images.
        ax: Axes to draw on; None for the current axes.

    Returns:
        The axes.

    Raises:
        TypeError, ValueError: The costs are not as above, or have no heads in common.
        ModuleNotFoundError: SciPy is not installed.
    """
    dims = ("mode", "layer", "head", "image")
    estimate = select_dims(check_array(estimate, "estimate"), "estimate", dims)
    exact = select_dims(check_array(exact, "exact"), "exact", dims)
    estimate, exact = xr.align(estimate, exact, join="inner")
    axes = axes_or_current(ax)
    means = [array.mean("image") for array in (estimate, exact)]
    is_log = all(bool((array.fillna(0) >= 0).all()) for array in means)
    drawn = (means[0] + means[1]).notnull()
    if is_log:
        drawn &= (means[0] > 0) & (means[1] > 0)
    if not drawn.any():
        raise ValueError("expected costs of the same modes, layers and heads, got none")
    bounds = [mean_interval(array) for array in (estimate, exact)]
    for number, mode in enumerate(exact["mode"].values):
        shown = drawn.sel(mode=mode).values
        if not shown.any():
            continue
        first, second = (array.sel(mode=mode).values[shown] for array in means)
        errors = []
        for mean, bound in zip((first, second), bounds, strict=True):
            of_mode = bound.sel(mode=mode)
            low, high = (of_mode.sel(bound=x).values[shown] for x in ("low", "high"))
            # An interval that holds zero has no lower end on a logarithmic axis; matplotlib clips
            # it.
            errors.append(np.clip([mean - low, high - mean], 0, None))
        correlation = scipy_stats().spearmanr(first, second).statistic
        axes.errorbar(
            second, first, errors[0], errors[1], fmt="o", ms=3, elinewidth=0.5, alpha=0.8,
            color=list(OKABE_ITO.values())[number % len(OKABE_ITO)],
            label=f"{mode} ({correlation:.2f})",
        )  # fmt: skip
    if is_log:
        axes.set(xscale="log", yscale="log")
    both = np.concatenate([array.values[drawn.values] for array in means])
    axes.plot([both.min(), both.max()], [both.min(), both.max()], "--", color="0.4", lw=1)
    what = exact.attrs.get("long_name", "cost")
    axes.set(xlabel=f"{what}, exact", ylabel=f"{what}, to first order")
    legend_beside(axes)
    return axes
