"""Disagreement of models on clean and corrupted images,
and the comparison of the user's own models.
"""

import argparse
from itertools import combinations

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import nn

from common.data import PixelBatches, own_model_and_data
from common.figures import number_cells
from common.output import RunOutput, refused
from tcnn_probe import evaluation

__all__ = ["agree_on_errors", "by_condition", "compare_given"]


def compare_given(args: argparse.Namespace, later: tuple[str, ...]) -> bool:
    """Compare the models of ``--model`` without training;
    return whether the models of every pair share errors.

    Args:
        args: Command line of the study; ``model`` is a list of names, and ``pretrained`` a list of
            files, or of True.
        later: Options that may change with ``--resume``.
    """
    results, output = decide(args, later)
    output.save(results)
    rates = by_condition(results, "group")
    output.show(draw_pairs(rates), pair_table(rates))
    passed = True
    for first, second in combinations(results.model.values.tolist(), 2):
        differ = float(rates.sel(model=first, other=second, group="clean").mean())
        accuracies = (results.clean_accuracy.sel(model=name) for name in (first, second))
        passed &= agree_on_errors(differ, *accuracies, f"{first} and {second}")
    return passed


def decide(args: argparse.Namespace, later: tuple[str, ...]) -> tuple[xr.Dataset, RunOutput]:
    """Return the decisions of the models on the same validation images, and the output folder.

    Images are resized and cropped as the first model expects them, and normalised for each model.
    """
    models: dict[str, nn.Module] = {}
    loaders = []
    with refused(ValueError, RuntimeError, OSError):
        # Each model is loaded by the command line that it would have alone.
        for name, weights in zip(args.model, args.pretrained, strict=True):
            model_args = argparse.Namespace(**{**vars(args), "model": name, "pretrained": weights})
            # Models of the same name are told apart by their weights.
            label = name if args.model.count(name) == 1 else f"{name}, {weights}"
            # New classifiers are drawn at random.
            torch.manual_seed(args.seed)
            models[label], (_, validation) = own_model_and_data(model_args, args.img_size)
            loaders.append(validation)
        output = RunOutput.from_args(args, "disagreement", later=later)
    # All models see the same pixels, which each normalises in its own way.
    images = PixelBatches(next(iter(models.values())), loaders[0], args.images)
    conditions = {"corruptions": args.corruptions, "severities": args.severities}
    models = {name: model.to(args.device) for name, model in models.items()}
    return evaluation.robustness(
        models, images, **conditions, attacks=(), device=args.device
    ), output


def by_condition(results: xr.Dataset, by: str) -> xr.DataArray:
    """Return whether two models decide differently:
    (model, other, by, image); ``by`` begins with "clean".
    """
    clean, corrupted = (
        evaluation.disagreement(results, condition).differ for condition in (None, by)
    )
    corrupted = corrupted.assign_coords({by: corrupted[by].astype(object)}).reset_coords(drop=True)
    return xr.concat([clean.expand_dims({by: np.array(["clean"], dtype=object)}), corrupted], by)


def agree_on_errors(differ: float, first: xr.DataArray, second: xr.DataArray, names: str) -> bool:
    """Print and return whether two models differ less than models
    of their accuracies with independent errors.
    """
    # The probability that exactly one model is right, if no image is harder than another.
    independent = float((first * (1 - second) + second * (1 - first)).mean())
    verdict = "less" if differ < independent else "NOT less"
    print(
        f"check: {names} disagree {verdict} than independent errors: {differ:.3f}, "
        f"{independent:.3f}"
    )
    return differ < independent


@mpl.rc_context({"font.size": 9})
def draw_pairs(disagreement: xr.DataArray) -> Figure:
    """Draw how often the models of each pair disagree,
    on clean and on corrupted images; the truth counts as one.
    """
    names = disagreement.model.values.tolist()
    figure = Figure(figsize=(4 + 1.6 * len(names), 2 + 0.6 * len(names)), layout="constrained")
    rates = disagreement.mean("image").transpose("model", "other", "group")
    panels = {
        "clean": rates.sel(group="clean"),
        "corrupted": rates.isel(group=slice(1, None)).mean("group"),
    }
    for axes, (title, matrix) in zip(
        figure.subplots(1, 2, sharey=True), panels.items(), strict=True
    ):
        axes.imshow(matrix, vmin=0, vmax=float(rates.max()), cmap="Blues")
        # "Blues" is dark in its upper half.
        number_cells(axes, matrix, lambda number: number > 0.6 * float(rates.max()), digits=3)
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.set_title(title)
    figure.suptitle("share of images that two models classify differently")
    return figure


def pair_table(disagreement: xr.DataArray) -> str:
    """Return the disagreement of each pair by condition,
    with 95 % intervals; with the truth it is the error rate.
    """
    rates, intervals = (
        disagreement.mean("image"),
        # A share is never below 0.
        evaluation.mean_interval(disagreement).clip(0),
    )
    pairs = list(combinations(disagreement.model.values.tolist(), 2))
    width = max(len(first) + len(second) for first, second in pairs) + 7
    lines = [
        f"\nshare of {disagreement.sizes['image']} images decided differently, with 95 % interval "
        "over images"
    ]
    lines.append(" " * width + "".join(f"{name:>22}" for name in disagreement.group.values))
    for first, second in pairs:
        at = {"model": first, "other": second}
        low_high = intervals.sel(at).transpose("group", "bound").values
        cells = [
            f"{rate:.3f} [{low:.3f}, {high:.3f}]"
            for rate, (low, high) in zip(rates.sel(at).values, low_high, strict=True)
        ]
        lines.append(
            f"{f'{first} and {second}':<{width}}" + "".join(f"{cell:>22}" for cell in cells)
        )
    return "\n".join(lines)
