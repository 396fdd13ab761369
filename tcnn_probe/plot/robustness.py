"""Accuracy under corruptions and attacks, by model (T-CNN paper, Figs. 1 and 3)."""

from typing import TYPE_CHECKING, Literal

import numpy as np
import xarray as xr

from tcnn_probe.perturbations.summary import improvement, share_right
from tcnn_probe.plot.fitting import legend_above, mark_above, name_ticks
from tcnn_probe.plot.style import OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["robustness"]


def robustness(
    ds: xr.Dataset,
    ax: "Axes | None" = None,
    *,
    baseline: str | None = None,
    by: Literal["group", "corruption", "severity", "attack"] = "group",
    confidence: float = 0.95,
) -> "Axes":
    """Draw bars of accuracy by model (T-CNN paper, Fig. 1) or, beside a baseline, of its relative improvement (Fig. 3).

    ::

        ds = xr.open_zarr("robustness.zarr")
        tcnn_probe.plot.robustness(ds, baseline="CNN", by="severity")

    Accuracies are means over images and over all that is not named by ``by`` (corruptions of the group, severities,
    seeds), with the standard error over images. The relative improvement of a model is (its accuracy - the
    baseline's) / the baseline's, with a bootstrap interval over images that both models see
    (:func:`tcnn_probe.improvement`); a bar for which there is none, since the baseline is never
    right in some resample, is marked "no interval". Clean images, where there are such, come first.

    The legend above the axes and the names below are fitted to the axes' width at the time of the call.

    Args:
        ds: what :func:`tcnn_probe.robustness` gave, with what became of each image: ``correct`` (model, corruption,
            severity, seed, image), the coordinate ``group`` along corruption, and, where there are such,
            ``clean_correct`` (model, image) and ``adversarial_correct`` (model, attack, seed, image).
        ax: where to draw; None: on new axes.
        baseline: one of the models; None for accuracies.
        by: what the bars stand beside.
        confidence: of the intervals, with a baseline.

    Returns:
        the axes.

    Raises:
        TypeError: no Dataset.
        ValueError: variables, dimensions or coordinates that are missing, an unknown ``by``, or a baseline that is
            none of the models, or the only one.
    """
    clean = [None] if "clean_correct" in ds else []
    perturbed = share_right(ds, by)
    if by is None or not perturbed.size:
        raise ValueError(f"nothing to draw by {by!r}: {dict(perturbed.sizes)}")
    models = [str(name) for name in ds["model"].values]
    if baseline is None:
        right = _categories([*(share_right(ds, which) for which in clean), perturbed], by)
        heights, errors = right.mean("image"), right.std("image", ddof=1) / np.sqrt(right.sizes["image"])
        low, high, label = heights - errors, heights + errors, "accuracy\n(bars: standard error over images)"
    else:
        found = [improvement(ds, baseline, which, confidence=confidence) for which in (*clean, by)]
        heights = 100 * _categories([each.improvement for each in found], by)
        bounds = 100 * _categories([each.interval for each in found], by)
        low, high = bounds.sel(bound="low"), bounds.sel(bound="high")
        named = f"improvement over {baseline} (%)" if len(baseline) < 12 else f"improvement (%)\nover {baseline}"
        label = f"{named}\n(bars: {100 * confidence:g} % bootstrap interval)"
    axes = _bars(ax, heights, heights - low, high - heights, models, leave_out=baseline)
    axes.set_ylabel(label, fontsize="small" if label.count("\n") > 1 else None)
    axes.set(xlabel="" if by == "group" else by)
    return axes


def _categories(parts: list[xr.DataArray], by: str) -> xr.DataArray:
    """Of clean images, if there are such, and by what the bars stand beside: with the dimension "category"."""
    *clean, others = parts
    named = [part.expand_dims(category=["clean"]) for part in clean]
    others = others.rename({by: "category"}).reset_coords(drop=True)
    others = others.assign_coords(category=[str(label) for label in others["category"].values])
    return xr.concat([*named, others], "category", coords="minimal", compat="override", join="exact")


def _bars(
    ax: "Axes | None",
    heights: xr.DataArray,
    low: xr.DataArray,
    high: xr.DataArray,
    models: list[str],
    *,
    leave_out: str | None,
) -> "Axes":
    """A group of bars a category, in it one a model, whose colour is the same whatever is left out."""
    import matplotlib.pyplot as plt

    categories = [str(name) for name in heights["category"].values]
    shown = [place for place, name in enumerate(models) if name != leave_out]
    axes = plt.subplots(layout="constrained")[1] if ax is None else ax
    colors, width = list(OKABE_ITO.values()), 0.8 / len(shown)
    places, unsure = np.arange(len(categories)), list[tuple[float, float]]()
    for nth, place in enumerate(shown):
        mean, below, above = (part.isel(model=nth).values for part in (heights, low, high))
        at = places + (nth - (len(shown) - 1) / 2) * width
        errors = np.clip([below, above], 0, None)
        axes.bar(at, mean, width, color=colors[place % len(colors)], label=models[place])
        axes.errorbar(at, mean, errors, fmt="none", ecolor="k", elinewidth=0.8, capsize=2)
        alone = np.isfinite(mean) & np.isnan(errors).any(0)
        unsure += zip(at[alone], np.maximum(mean[alone], 0), strict=True)
    axes.axhline(0, color="k", lw=0.8)
    for x, y in unsure:
        mark_above(axes, x, y, "no interval")
    name_ticks(axes, places, categories)
    legend_above(axes)
    return axes
