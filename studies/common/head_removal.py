"""Sets of heads to ablate, and what their removal costs in accuracy, with intervals."""

from collections.abc import Mapping

import numpy as np
import xarray as xr
from scipy.stats import t as student

from common.figures import PAIR
from common.verdicts import side_of_zero
from tcnn_probe import evaluation

__all__ = [
    "CLEAN",
    "DRAWN",
    "MODES",
    "NOTHING",
    "WITHIN",
    "HeadSets",
    "beyond_these_trainings",
    "beyond_zero",
    "by_side",
    "costs",
    "differences",
    "head_costs",
    "interval_in_words",
    "mean_and_interval",
    "mean_by_condition",
    "random_heads",
    "single_heads",
    "type_sets",
]

HeadSets = Mapping[str, xr.DataArray | None]
"""Boolean arrays (layer, head) by name, with True for heads to ablate; None ablates nothing."""

NOTHING, CLEAN = "nothing", "clean"

MODES = {
    "zero": "zeroing the outputs of",
    "mean": "replacing by their means the outputs of",
    "static": "replacing by its mean the attention of",
    "shuffled": "giving another image's attention to",
    "positional": "setting to 1 the gates of",
}
"""Modes of :func:`tcnn_probe.ablate`, and the words for each in printed results."""

# Contrast is also a condition of its own, because the paper guesses that faint images need content.
_ALONE = ("contrast",)


def type_sets(types: xr.DataArray) -> dict[str, xr.DataArray | None]:
    """Return the heads of each type that the model has,
    and the empty set; ``types`` has the dims (layer, head).
    """
    return {NOTHING: None} | {kind: types == kind for kind in PAIR if bool((types == kind).any())}


def random_heads(
    types: xr.DataArray, draws: int, rng: np.random.Generator
) -> dict[str, xr.DataArray | None]:
    """Return, for each type, ``draws`` sets of as many heads as it has,
    drawn from all heads of the model.
    """
    existing = np.flatnonzero(types.values.ravel() != "")
    sets = {}
    for kind in PAIR:
        count = int((types == kind).sum())
        for draw in range(draws if count else 0):
            mask = np.zeros(types.size, bool)
            # Heads are drawn without replacement, so that a set has as many as the type.
            mask[rng.choice(existing, count, replace=False)] = True
            sets[f"random for {kind}#{draw}"] = types.copy(data=mask.reshape(types.shape))
    return sets


def single_heads(types: xr.DataArray) -> dict[str, xr.DataArray | None]:
    """Return one set for each head, named "layer:head"."""
    sets = {}
    for (row, column), kind in np.ndenumerate(types.values):
        # The type of a head that a layer lacks is empty.
        if kind != "":
            mask = np.zeros(types.shape, bool)
            mask[row, column] = True
            name = f"{types.layer.values[row]}:{types['head'].values[column]}"
            sets[name] = types.copy(data=mask)
    return sets


def mean_by_condition(results: xr.Dataset) -> xr.Dataset:
    """Return the mean correctness by condition;
    sets that are not drawn at random have the same value in each draw.
    """
    # Correctness becomes a number, because it is averaged over severities and seeds.
    corrupted = results.correct.astype(float).mean(["severity", "seed"])
    groups = list(dict.fromkeys(results.group.values.tolist()))
    parts = {CLEAN: results.clean_correct.astype(float)}
    parts |= {
        group: corrupted.sel(corruption=(results.group == group).values).mean("corruption")
        for group in groups
    }
    parts |= {
        name: corrupted.sel(corruption=name, drop=True)
        for name in _ALONE
        if name in results.corruption
    }
    parts["PGD"] = (
        results.adversarial_correct.astype(float).mean("seed").sel(attack="pgd", drop=True)
    )
    names = xr.DataArray(list(parts), dims="condition", name="condition")
    right = xr.concat([row.reset_coords(drop=True) for row in parts.values()], names)
    draws: dict[str, list[str]] = {}
    for name in right.model.values.tolist():
        draws.setdefault(name.partition("#")[0], []).append(name)
    draw_count = max(map(len, draws.values()))
    rows = [
        # A set that is not drawn at random is repeated, so that all sets have the same number of
        # draws.
        right.sel(model=(names * draw_count)[:draw_count]).rename(model="draw")
        for names in draws.values()
    ]
    labels = xr.DataArray(np.array(list(draws), object), dims="ablation", name="ablation")
    means = xr.concat([row.assign_coords(draw=range(draw_count)) for row in rows], labels)
    means.attrs = {"units": "1", "long_name": "right answers"}
    return xr.Dataset({"right": means.transpose("ablation", "draw", "condition", "image")})


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
