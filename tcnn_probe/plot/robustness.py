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
    """Draw bars of accuracy by model (T-CNN paper, Fig. 1) or, beside a baseline, of its relative improvement (Fig. 3).

    ::

        ds = xr.open_zarr("robustness.zarr")
        tcnn_probe.plot.robustness(ds, baseline="CNN", by="severity")

    Accuracies are means over images and over all that is not named by ``by`` (corruptions of the group, severities,
    seeds), with the standard error over images. The relative improvement of a model is (its accuracy - the
    baseline's) / the baseline's, with a 95 % interval over images that both models see
    (:func:`tcnn_probe.evaluation.improvement`); a bar for which there is none, since the baseline is never right in
    some resample, is hatched. Clean images, where there are such, come first.

    Args:
        ds: Results of :func:`tcnn_probe.evaluation.robustness`, with the answer to each image: ``correct`` (model,
            corruption, severity, seed, image), the coordinate ``group`` along corruption, and, where there are such,
            ``clean_correct`` (model, image) and ``adversarial_correct`` (model, attack, seed, image).
        ax: where to draw; None: on the current axes.
        baseline: one of the models; None for accuracies.
        by: what the bars stand beside.

    Returns:
        the axes, with a title and a legend above them, for which constrained layout makes room.

    Raises:
        TypeError: no Dataset.
        ValueError: variables, dimensions or coordinates that are missing, an unknown ``by``, or a baseline that is
            none of the models, or the only one.
    """
    perturbed = share_right(ds, by)
    if by is None or not perturbed.size:
        raise ValueError(f"nothing to draw by {by!r}: {dict(perturbed.sizes)}")
    kinds = [None, by] if "clean_correct" in ds else [by]
    if baseline is None:
        right = _categories([share_right(ds, kind) for kind in kinds], by)
        heights, errors = right.mean("image"), right.std("image", ddof=1) / np.sqrt(right.sizes["image"])
        low, high, label = heights - errors, heights + errors, "accuracy\n(lines: standard error over images)"
    else:
        found = [improvement(ds, baseline, kind) for kind in kinds]
        heights = 100 * _categories([each.improvement for each in found], by)
        bounds = 100 * _categories([each.interval for each in found], by)
        low, high = bounds.sel(bound="low"), bounds.sel(bound="high")
        named = f"improvement over {baseline} (%)" if len(baseline) < 12 else f"improvement (%) over\n{baseline}"
        label = f"{named}\n(lines: 95 % interval over images)"
        if bool((heights.notnull() & low.isnull()).any()):
            label = label.replace("images)", "images;\nhatched: no interval)")
    axes = axes_or_current(ax)
    _bars(axes, heights, heights - low, high - heights, {str(name): n for n, name in enumerate(ds["model"].values)})
    axes.set_xticks(range(heights.sizes["category"]), heights["category"].values, fontsize="small")
    if by == "corruption":
        for name in axes.get_xticklabels():
            name.set(rotation=60, ha="right", rotation_mode="anchor")
    axes.set_xlabel("" if by == "group" else by)
    axes.set_ylabel(label, fontsize="small")
    columns = max(1, 50 // (5 + max(len(str(name)) for name in heights["model"].values)))
    legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize="small", frameon=False)
    legend.set_title(f"{'accuracy' if baseline is None else 'improvement'} by {by}")
    legend.set_alignment("left")
    return axes


def _categories(parts: list[xr.DataArray], by: str) -> xr.DataArray:
    """Values along "category": of clean images, if there are such, and of what the bars stand side by side for."""
    *clean, others = parts
    named = [part.expand_dims(category=["clean"]) for part in clean]
    others = others.rename({by: "category"}).reset_coords(drop=True)
    others = others.assign_coords(category=[str(label) for label in others["category"].values])
    return xr.concat([*named, others], "category", coords="minimal", compat="override", join="exact")


def _bars(axes: "Axes", heights: xr.DataArray, low: xr.DataArray, high: xr.DataArray, places: dict[str, int]) -> None:
    """Draw a group of bars a category, in it one a model, whose colour is that of its place among all models."""
    colors, models = list(OKABE_ITO.values()), [str(name) for name in heights["model"].values]
    width = 0.8 / len(models)
    for nth, model in enumerate(models):
        mean, below, above = (part.isel(model=nth).values for part in (heights, low, high))
        at = np.arange(len(mean)) + (nth - (len(models) - 1) / 2) * width
        bars = axes.bar(at, mean, width, color=colors[places[model] % len(colors)], label=model)
        axes.errorbar(at, mean, np.clip([below, above], 0, None), fmt="none", ecolor="k", elinewidth=0.8, capsize=2)
        for bar in np.array(bars, dtype=object)[np.isfinite(mean) & np.isnan(below)]:
            bar.set(hatch="///", edgecolor="w")
    axes.axhline(0, color="k", lw=0.8)
