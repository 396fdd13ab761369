"""How often models decide differently, clean and corrupted; and models of the user's, compared as they are."""

import argparse
from itertools import combinations

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import nn

from common.data import PixelBatches, own_model_and_data
from common.ending import refused
from common.options import NOT_SAVED
from common.output import RunOutput
from tcnn_probe import evaluation

__all__ = ["agree_on_errors", "by_condition", "compare_given"]


def compare_given(args: argparse.Namespace, later: tuple[str, ...]) -> bool:
    """Compare the models of ``--model`` with each other, as they are; whether each two share errors.

    Args:
        args: the study's command line; ``model`` is a list, and ``pretrained`` one of files, or of True.
        later: options that may change with ``--resume``.
    """
    results, output = decide(args, later)
    output.save(results)
    found = by_condition(results, "group")
    draw_pairs(found).savefig(output.figure, dpi=200)
    print(pair_table(found))
    print(f"wrote {output.store} and {output.figure}")
    seen = True
    for one, other in combinations(results.model.values.tolist(), 2):
        differ = float(found.sel(model=one, other=other, group="clean").mean())
        accuracies = (results.clean_accuracy.sel(model=name) for name in (one, other))
        seen &= agree_on_errors(differ, *accuracies, f"{one} and {other}")
    return seen


def decide(
    args: argparse.Namespace, later: tuple[str, ...]
) -> tuple[xr.Dataset, RunOutput]:
    """What the models decide of the same validation images, and where that is written.

    Images are resized and cropped as the first model wants it, and normalised for each.
    """
    options = {
        name: value for name, value in vars(args).items() if name not in NOT_SAVED
    }
    models: dict[str, nn.Module] = {}
    loaders = []
    with refused(ValueError, RuntimeError, OSError):
        for name, weights in zip(args.model, args.pretrained, strict=True):
            one = argparse.Namespace(
                **{**vars(args), "model": name, "pretrained": weights}
            )
            label = name if args.model.count(name) == 1 else f"{name}, {weights}"
            torch.manual_seed(args.seed)
            models[label], (_, validation) = own_model_and_data(one, args.img_size)
            loaders.append(validation)
        output = RunOutput(
            args.out,
            "disagreement",
            options,
            later=later,
            resume=args.resume,
            overwrite=args.overwrite,
        )
    images = PixelBatches(next(iter(models.values())), loaders[0], args.images)
    conditions = {"corruptions": args.corruptions, "severities": args.severities}
    models = {name: model.to(args.device) for name, model in models.items()}
    return evaluation.robustness(
        models, images, **conditions, attacks=(), device=args.device
    ), output


def by_condition(results: xr.Dataset, by: str) -> xr.DataArray:
    """How often two models decide differently: (model, other, by, image). Labels of ``by`` begin with "clean"."""
    clean, worse = (
        evaluation.disagreement(results, each).differ for each in (None, by)
    )
    worse = worse.assign_coords(
        {by: worse[by].astype(str).astype(object)}
    ).reset_coords(drop=True)
    return xr.concat(
        [clean.expand_dims({by: np.array(["clean"], dtype=object)}), worse], by
    )


def agree_on_errors(
    differ: float, one: xr.DataArray, other: xr.DataArray, names: str
) -> bool:
    """Whether two models differ less than models of their accuracies whose errors are independent; says so."""
    independent = float(
        (one * (1 - other) + other * (1 - one)).mean()
    )  # if no image is harder than another
    verdict = "less" if differ < independent else "NOT less"
    print(
        f"check: {names} disagree {verdict} than independent errors: {differ:.3f}, {independent:.3f}"
    )
    return differ < independent


@mpl.rc_context({"font.size": 9})
def draw_pairs(found: xr.DataArray) -> Figure:
    """Disagreement of each with each, the ground truth among them: clean, and under all corruptions."""
    names = found.model.values.tolist()
    figure = Figure(
        figsize=(4 + 1.6 * len(names), 2 + 0.6 * len(names)), layout="constrained"
    )
    rates = found.mean("image").transpose("model", "other", "group")
    shown = {
        "clean": rates.sel(group="clean"),
        "corrupted": rates.isel(group=slice(1, None)).mean("group"),
    }
    for axes, (title, matrix) in zip(
        figure.subplots(1, 2, sharey=True), shown.items(), strict=True
    ):
        axes.imshow(matrix, vmin=0, vmax=float(rates.max()), cmap="Blues")
        for row, column in np.ndindex(matrix.shape):
            number = float(matrix[row, column])
            color = "w" if number > 0.6 * float(rates.max()) else "k"
            axes.text(
                column, row, f"{number:.3f}", ha="center", va="center", color=color
            )
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.set_title(title)
    figure.suptitle("share of images that two models classify differently")
    return figure


def pair_table(found: xr.DataArray) -> str:
    """Each pair with 95 % intervals over images, by condition; pairs with the ground truth have the error rates."""
    rates, intervals = found.mean("image"), evaluation.mean_interval(found).clip(0)
    pairs = list(combinations(found.model.values.tolist(), 2))
    width = max(len(one) + len(other) for one, other in pairs) + 7
    lines = [
        f"\nshare of {found.sizes['image']} images decided differently, with 95 % interval over images"
    ]
    lines.append(" " * width + "".join(f"{name:>22}" for name in found.group.values))
    for one, other in pairs:
        at = {"model": one, "other": other}
        low_high = intervals.sel(at).transpose("group", "bound").values
        cells = [
            f"{rate:.3f} [{low:.3f}, {high:.3f}]"
            for rate, (low, high) in zip(rates.sel(at).values, low_high, strict=True)
        ]
        lines.append(
            f"{f'{one} and {other}':<{width}}"
            + "".join(f"{cell:>22}" for cell in cells)
        )
    return "\n".join(lines)
