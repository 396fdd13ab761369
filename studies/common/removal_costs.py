"""Cost in accuracy of removed heads, and intervals for it."""

import numpy as np
import xarray as xr
from scipy.stats import t as student

from common.ending import side_of_zero
from common.head_removal import NOTHING
from common.head_types import PAIR
from tcnn_probe import evaluation

__all__ = [
    "DRAWN",
    "WITHIN",
    "beyond_these_trainings",
    "beyond_zero",
    "by_side",
    "costs",
    "differences",
    "head_costs",
    "interval_in_words",
    "mean_and_interval",
]

DRAWN = ("draw", "image")

WITHIN = "contrast"
"""Condition that is also part of the digital group, and so is left out of means over conditions."""


def costs(right: xr.DataArray, ablation: str) -> xr.DataArray:
    """Return the accuracy lost by an ablation: (training, draw, condition, image)."""
    return right.sel(ablation=NOTHING, drop=True) - right.sel(ablation=ablation, drop=True)


def differences(right: xr.DataArray) -> dict[str, xr.DataArray]:
    """Return, by type, the cost in excess of that of as many random heads:
    (training, draw, condition, image).
    """
    return {
        # Otherwise a type with more heads would cost more for their number alone.
        kind: costs(right, kind) - costs(right, f"random for {kind}")
        for kind in PAIR
    }


def head_costs(heads: xr.Dataset) -> xr.DataArray:
    """Return the cost of each head by itself: (training, layer, head, draw, condition, image)."""
    names = [[f"{layer}:{head}" for head in heads["head"].values] for layer in heads.layer.values]
    labels = xr.DataArray(names, {"layer": heads.layer, "head": heads["head"]}, ("layer", "head"))
    # Heads that a layer lacks become NaN.
    right = heads.right.reindex(ablation=[NOTHING, *labels.values.ravel()])
    cost = right.sel(ablation=NOTHING, drop=True) - right.sel(ablation=labels).drop_vars("ablation")
    return cost.transpose("training", "layer", "head", "draw", "condition", "image")


def mean_and_interval(values: xr.DataArray) -> tuple[float, float, float]:
    """Return the mean, and an interval over random draws
    of heads and over images, for these trainings only.
    """
    low, high = evaluation.mean_interval(values.mean("training"), DRAWN).values
    return float(values.mean()), float(low), float(high)


def interval_in_words(values: xr.DataArray) -> str:
    """Return the mean and the interval as text."""
    mean, low, high = mean_and_interval(values)
    # The mean of no head is NaN, the only value that differs from itself.
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" if mean == mean else "none"


def beyond_these_trainings(values: xr.DataArray) -> tuple[float, float]:
    """Return a t interval for the mean over all possible trainings and images.

    Two or three trainings are too few to resample; trainings and images each add their variance.
    """
    by_training = values.mean(DRAWN).dropna("training")
    # dropna has removed trainings without heads of the type.
    count = by_training.sizes["training"]
    if count < 2:
        # One training says nothing about how trainings differ.
        return np.nan, np.nan
    by_image = values.mean(["training", "draw"])
    # Trainings and images are both samples, so the variances of their means add up.
    variance = float(by_training.var(ddof=1)) / count + float(by_image.var(ddof=1)) / by_image.size
    half = float(student.ppf(0.975, count - 1)) * variance**0.5
    return float(by_training.mean()) - half, float(by_training.mean()) + half


def by_side(values: xr.DataArray, above: str, below: str, neither: str) -> list[tuple[str, str]]:
    """Return the conditions whose interval lies above zero,
    lies below it or contains it, with the words for each.
    """
    conditions: dict[str, list[str]] = {above: [], below: [], neither: []}
    for condition in values.condition.values:
        _, low, high = mean_and_interval(values.sel(condition=condition))
        side = side_of_zero((low, high), above, below, neither)
        conditions[side].append(str(condition))
    return [(words, ", ".join(names)) for words, names in conditions.items() if names]


def beyond_zero(interval: tuple[float, float]) -> bool:
    """Return whether zero lies outside the interval."""
    return interval[0] > 0 or interval[1] < 0
