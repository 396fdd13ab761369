"""Sets of heads to ablate, and means of a model's answers by condition."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from common.head_types import PAIR

__all__ = [
    "CLEAN",
    "MODES",
    "NOTHING",
    "HeadSets",
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
