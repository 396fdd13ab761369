"""What taking heads away costs, and what intervals say of it."""

import numpy as np
import xarray as xr
from scipy.stats import t as student

import tcnn_probe
from common.ablations import NOTHING

__all__ = ["DRAWN", "beyond_these_trainings", "beyond_zero", "by_side", "costs", "mean_and_interval"]

DRAWN = ("draw", "image")


def costs(right: xr.DataArray, ablation: str) -> xr.DataArray:
    """What it costs in accuracy: (training, draw, condition, image)."""
    return right.sel(ablation=NOTHING, drop=True) - right.sel(ablation=ablation, drop=True)


def mean_and_interval(values: xr.DataArray) -> tuple[float, float, float]:
    """Of these trainings, as they are: bootstrap over random draws of heads and images."""
    low, high = tcnn_probe.bootstrap_interval(values.mean("training"), DRAWN).values
    return float(values.mean()), float(low), float(high)


def beyond_these_trainings(values: xr.DataArray) -> tuple[float, float]:
    """A t interval for the mean over all trainings that there could be, and all images.

    So few trainings cannot be resampled; trainings and images each add their variance.
    """
    by_training = values.mean(DRAWN).dropna("training")
    count = by_training.sizes["training"]
    if count < 2:
        return np.nan, np.nan
    by_image = values.mean(["training", "draw"])
    variance = float(by_training.var(ddof=1)) / count + float(by_image.var(ddof=1)) / by_image.size
    half = float(student.ppf(0.975, count - 1)) * variance**0.5
    return float(by_training.mean()) - half, float(by_training.mean()) + half


def by_side(values: xr.DataArray, above: str, below: str, neither: str) -> list[tuple[str, str]]:
    """On which conditions an interval lies above, below or about zero: these words, and the conditions."""
    found: dict[str, list[str]] = {above: [], below: [], neither: []}
    for condition in values.condition.values:
        _, low, high = mean_and_interval(values.sel(condition=condition))
        found[above if low > 0 else below if high < 0 else neither].append(str(condition))
    return [(words, ", ".join(names)) for words, names in found.items() if names]


def beyond_zero(interval: tuple[float, float]) -> bool:
    """Whether zero lies outside."""
    return interval[0] > 0 or interval[1] < 0
