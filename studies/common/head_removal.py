"""Which heads are intervened on, and how, and what a model gets right then, by condition."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from common.data import PixelBatches
from common.head_types import PAIR
from tcnn_probe import evaluation

__all__ = [
    "CLEAN",
    "MODES",
    "NOTHING",
    "Sets",
    "conditions",
    "random_heads",
    "single_heads",
    "type_sets",
]

Sets = Mapping[str, xr.DataArray | None]
"""Boolean arrays (layer, head) by name; True is a head that is taken away, None takes nothing away."""

NOTHING, CLEAN = "nothing", "clean"

MODES = {
    "zero": "zeroing the outputs of",
    "mean": "replacing by their means the outputs of",
    "static": "replacing by its mean the attention of",
    "shuffled": "giving another image's attention to",
    "positional": "setting to 1 the gates of",
}
"""What :func:`tcnn_probe.ablate` does to heads, and the words for it."""

_ALONE = (
    "contrast",
)  # a condition of its own as well: the paper guesses that faint images need content


def type_sets(types: xr.DataArray) -> dict[str, xr.DataArray | None]:
    """Nothing, and all heads of each type that the model has; ``types`` has the dims (layer, head)."""
    return {NOTHING: None} | {
        kind: types == kind for kind in PAIR if bool((types == kind).any())
    }


def random_heads(
    types: xr.DataArray, draws: int, rng: np.random.Generator
) -> dict[str, xr.DataArray | None]:
    """For each type ``draws`` sets of as many heads as it has, drawn from all heads of the model."""
    there = np.flatnonzero(types.values.ravel() != "")
    sets = {}
    for kind in PAIR:
        count = int((types == kind).sum())
        for draw in range(draws if count else 0):
            chosen = np.zeros(types.size, bool)
            chosen[rng.choice(there, count, replace=False)] = True
            sets[f"random for {kind}#{draw}"] = types.copy(
                data=chosen.reshape(types.shape)
            )
    return sets


def single_heads(types: xr.DataArray) -> dict[str, xr.DataArray | None]:
    """One set for each head, named "layer:head"."""
    sets = {}
    for (row, column), kind in np.ndenumerate(types.values):
        if kind != "":
            chosen = np.zeros(types.shape, bool)
            chosen[row, column] = True
            name = f"{types.layer.values[row]}:{types['head'].values[column]}"
            sets[name] = types.copy(data=chosen)
    return sets


def conditions(
    *,
    model: nn.Module,
    sets: Sets,
    batches: PixelBatches,
    mode: str,
    reference: Sequence[Tensor],
    corruptions: Sequence[str] | None,
    severities: Sequence[int],
    epsilon: float,
    steps: int,
    seed: int,
    device: str,
    part: Path,
) -> xr.Dataset:
    """What the model gets right with each set of heads ablated.

    Args:
        model: in eval mode.
        sets: a name before "#" is one thing, drawn several times.
        batches: the images.
        mode: one of ``MODES``.
        reference: batches of images, as the model takes them, over which means are taken; of the first one attention is
            given to other images.
        corruptions: names, or None for all.
        severities: of the corruptions.
        epsilon, steps: of PGD.
        seed: of corruptions and PGD.
        device: where the model is.
        part: where the answers are kept; they are read from there if they were measured before.

    Returns:
        ``right`` (ablation, draw, condition, image): the share of right answers over corruptions and severities.
    """
    if not part.exists():
        results = evaluation.robustness(
            {
                name: without(model, heads, mode, reference)
                for name, heads in sets.items()
            },
            batches,
            corruptions=corruptions,
            severities=severities,
            attacks={"pgd": {"epsilon": epsilon, "step": epsilon / 2, "steps": steps}},
            seeds=(seed,),
            normalization=batches.normalization,
            device=device,
        )
        partial = part.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        by_condition(results).to_zarr(partial, consolidated=False)
        os.replace(partial, part)
    return xr.open_zarr(part, consolidated=False).load()


def without(
    model: nn.Module,
    heads: xr.DataArray | None,
    mode: str,
    reference: Sequence[Tensor] = (),
) -> Callable[[Tensor], Tensor]:
    """The model with some of its heads ablated, as a function of images."""
    if heads is None or not heads.any():
        return model
    images = {"mean": reference, "static": reference, "shuffled": reference[:1]}.get(
        mode
    )
    ablation = tcnn_probe.ablate(model, heads, mode, images=images)  # type: ignore[arg-type]
    ablation.remove()  # until it is entered

    def classify(images: Tensor) -> Tensor:
        with ablation:
            return model(images)

    return classify


def by_condition(results: xr.Dataset) -> xr.Dataset:
    """Means of the answers by condition; where nothing is drawn at random, all draws are the same."""
    corrupted = results.correct.astype(float).mean(["severity", "seed"])
    groups = list(dict.fromkeys(results.group.values.tolist()))
    parts = {CLEAN: results.clean_correct.astype(float)}
    parts |= {
        group: corrupted.sel(corruption=(results.group == group).values).mean(
            "corruption"
        )
        for group in groups
    }
    parts |= {
        name: corrupted.sel(corruption=name, drop=True)
        for name in _ALONE
        if name in results.corruption
    }
    parts["PGD"] = (
        results.adversarial_correct.astype(float)
        .mean("seed")
        .sel(attack="pgd", drop=True)
    )
    names = xr.DataArray(list(parts), dims="condition", name="condition")
    right = xr.concat([row.reset_coords(drop=True) for row in parts.values()], names)
    draws: dict[str, list[str]] = {}
    for name in right.model.values.tolist():
        draws.setdefault(name.partition("#")[0], []).append(name)
    most = max(map(len, draws.values()))
    rows = [
        right.sel(model=(names * most)[:most]).rename(model="draw")
        for names in draws.values()
    ]
    labels = xr.DataArray(
        np.array(list(draws), object), dims="ablation", name="ablation"
    )
    means = xr.concat([row.assign_coords(draw=range(most)) for row in rows], labels)
    means["condition"] = means.condition.astype(object)
    means.attrs = {"units": "1", "long_name": "right answers"}
    return xr.Dataset(
        {"right": means.transpose("ablation", "draw", "condition", "image")}
    )
