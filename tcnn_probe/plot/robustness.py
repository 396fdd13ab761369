"""Accuracy under corruptions and attacks, by model (T-CNN paper, Figs. 1 and 3)."""

from typing import TYPE_CHECKING, Literal

import numpy as np
import xarray as xr

from tcnn_probe.evaluation.summary import improvement, share_right
from tcnn_probe.plot.style import OKABE_ITO, axes_or_current

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["robustness"]


def robustness(
    ds: xr.Dataset,
    ax: "Axes | None" = None,
    *,
    baseline: str | None = None,
    by: Literal["group", "corruption", "severity", "attack"] = "group",
) -> "Axes":
    """Draw bars of accuracy by model, or of its relative improvement over a baseline (T-CNN paper,
    Figs. 1 and 3).

    ::

        ds = xr.open_zarr("robustness.zarr")
        tcnn_probe.plot.robustness(ds, baseline="CNN", by="severity")

    Accuracies are means over images and over all dimensions but ``by`` (corruptions of the group,
    severities, seeds), with the standard error over images. The relative improvement of a model is
    (its accuracy - the baseline's) / the baseline's, with a 95 % interval over images that both
    models see (:func:`tcnn_probe.evaluation.improvement`). A bar is hatched if it has no interval,
    because the baseline is never right in a resample. Clean images, if there are any, come first.

    Args:
        ds: Results of :func:`tcnn_probe.evaluation.robustness`, with the answer to each image:
            ``correct`` (model, corruption, severity, seed, image), the coordinate ``group`` along
            corruption, and, if measured, ``clean_correct`` (model, image) and
            ``adversarial_correct`` (model, attack, seed, image).
        ax: Axes to draw on; None for the current axes.
        baseline: Name of the model to compare the others with; None for accuracies.
        by: Dimension along the x axis.

    Returns:
        The axes, with a title and a legend above them, for which constrained layout makes room.

    Raises:
        TypeError: ``ds`` is no Dataset.
        ValueError: Variables, dimensions or coordinates are missing, ``by`` is unknown, or the
            baseline is no model or the only one.
    """
    perturbed = share_right(ds, by)
    if by is None or not perturbed.size:
        raise ValueError(f"nothing to draw by {by!r}: {dict(perturbed.sizes)}")
    kinds = [None, by] if "clean_correct" in ds else [by]
    if baseline is None:
        right = _categories([share_right(ds, kind) for kind in kinds], by)
        heights, errors = (
            right.mean("image"),
            # ddof=1, as the mean is estimated from the same images.
            right.std("image", ddof=1) / np.sqrt(right.sizes["image"]),
        )
        low, high, label = (
            heights - errors,
            heights + errors,
            "accuracy\n(lines: standard error over images)",
        )
    else:
        gains = [improvement(ds, baseline, kind) for kind in kinds]
        heights = 100 * _categories([gain.improvement for gain in gains], by)
        bounds = 100 * _categories([gain.interval for gain in gains], by)
        low, high = bounds.sel(bound="low"), bounds.sel(bound="high")
        # A long name on a line of its own: the label would be longer than the axis.
        quantity = (
            f"improvement over {baseline} (%)"
            if len(baseline) < 12
            else f"improvement (%) over\n{baseline}"
        )
        label = f"{quantity}\n(lines: 95 % interval over images)"
        if bool((heights.notnull() & low.isnull()).any()):
            label = label.replace("images)", "images;\nhatched: no interval)")
    axes = axes_or_current(ax)
    # Places among all models, so that a model keeps its colour when the baseline is left out.
    places = {str(name): number for number, name in enumerate(ds["model"].values)}
    _bars(axes, heights, heights - low, high - heights, places)
    axes.set_xticks(range(heights.sizes["category"]), heights["category"].values, fontsize="small")
    if by == "corruption":
        for name in axes.get_xticklabels():
            name.set(rotation=60, ha="right", rotation_mode="anchor")
    axes.set_xlabel("" if by == "group" else by)
    axes.set_ylabel(label, fontsize="small")
    # About 50 letters fit above axes of usual width, 5 of them for each patch of colour.
    columns = max(1, 50 // (5 + max(len(str(name)) for name in heights["model"].values)))
    legend = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        fontsize="small",
        frameon=False,
    )
    legend.set_title(f"{'accuracy' if baseline is None else 'improvement'} by {by}")
    legend.set_alignment("left")
    return axes


def _categories(parts: list[xr.DataArray], by: str) -> xr.DataArray:
    """Join values of clean images, if there are any,
    and along ``by``, in a dimension "category".
    """
    *clean, perturbed = parts
    perturbed = perturbed.rename({by: "category"}).reset_coords(drop=True)
    perturbed = perturbed.assign_coords(
        category=[str(label) for label in perturbed["category"].values]
    )
    parts = [*(part.expand_dims(category=["clean"]) for part in clean), perturbed]
    return xr.concat(parts, "category", coords="minimal", compat="override", join="exact")


def _bars(
    axes: "Axes",
    heights: xr.DataArray,
    low: xr.DataArray,
    high: xr.DataArray,
    places: dict[str, int],
) -> None:
    """Draw a group of bars for each category,
    a bar for each model, coloured by its place among all models.
    """
    from matplotlib import rcParams

    colors, models = (
        list(OKABE_ITO.values()),
        [str(name) for name in heights["model"].values],
    )
    width, color = 0.8 / len(models), rcParams["text.color"]  # black would vanish in a dark style
    for number, model in enumerate(models):
        mean, below, above = (part.isel(model=number).values for part in (heights, low, high))
        # Bars of a category side by side, centred at its tick; a fifth of the space stays free.
        x = np.arange(len(mean)) + (number - (len(models) - 1) / 2) * width
        bars = axes.bar(x, mean, width, color=colors[places[model] % len(colors)], label=model)
        axes.errorbar(
            x,
            mean,
            # Rounding can make a length negative, which errorbar refuses.
            np.clip([below, above], 0, None),
            fmt="none",
            ecolor=color,
            elinewidth=0.8,
            capsize=2,
        )
        for bar in np.array(bars, dtype=object)[np.isfinite(mean) & np.isnan(below)]:
            bar.set(hatch="///", edgecolor="w")
    axes.axhline(0, color=color, lw=0.8)
