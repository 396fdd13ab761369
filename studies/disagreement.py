r"""Disagreement of a T-CNN and its CNN,
beside that of two CNNs (thesis, Table 3.4, asked of T-CNNs).

    python studies/disagreement.py

Takes about 3 minutes on one CPU core.

What one should see (disagreement.png): any two trainings disagree, so the disagreement of a T-CNN
and its CNN means little by itself. The yardsticks are two trainings of the same CNN: with another
order of the images from the same start, and from another start. Both fail on many of the same
images, and so disagree less than independent errors would make them. The last lines that are
printed say where the T-CNN departs further from its CNN than the yardsticks do, as far as the
intervals support it. A less accurate model also disagrees more: compare the accuracies.

How: several small ResNets learn handwritten digits in cluttered scenes, each from its own seed.
Each is then fine-tuned for as long in three ways: unchanged, unchanged with the images in another
order, and as a T-CNN, with the images in the first order. All are shown the same validation images,
clean and corrupted as those of ImageNet-C.

Writes into results/:
disagreement.png    A share of images that a model and the CNN classify differently, clean and by
                    group of corruptions; B by corruption, how much more often the T-CNN differs
                    from it than the CNN of another order does
disagreement.zarr   every decision of every model, and its confidence: xarray.open_zarr

It ends by checking that the models learned, and that the CNN of another order disagrees with the
CNN less often than independent errors would make it.

Models that are trained already, such as those of that table, are compared by
``tcnn_probe.evaluation.disagreement`` (docs/robustness.md).

On your own images, with a GPU. There is then no yardstick of another start, since all start from
the same weights:

    python studies/disagreement.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --out results/imagenet
"""

import argparse
import copy
import sys
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.data import PixelBatches
from common.figures import STYLE, add_letters
from common.option_table import (
    CORRUPTIONS_OPTION,
    FEW_CORRUPTIONS,
    severities_option,
    training_options,
)
from common.options import Option, from_least, need_model, parse_options
from common.output import ended, finish
from common.training import Study, begin
from common.verdicts import learned, side_of_zero
from tcnn_model import reparameterize
from tcnn_probe import evaluation
from tcnn_probe.plot import OKABE_ITO

CNN, TCNN, ORDER, START = "CNN", "T-CNN", "CNN, other order", "CNN, other start"
COLORS = {
    TCNN: OKABE_ITO["vermillion"],
    ORDER: OKABE_ITO["sky blue"],
    START: OKABE_ITO["blue"],
}
OVER = ("training", "image")
FAR = 1000  # distance of the seeds of other orders from those of trainings


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits; with each seed train it, fine-tune it in three ways, and let all
    # decide.
    study = begin("disagreement", args, later=("corruptions", "severities", "images"))
    by_training = [decide(study, nth) for nth in range(args.seeds)]
    results = xr.concat(by_training, "training")
    # With one seed, or with --pretrained, no two CNNs start from different weights.
    if args.seeds > 1 and not args.pretrained:
        results = with_other_start(results)
    study.output.save(results)

    rates = {by: differing(results, by) for by in ("group", "corruption")}
    figure = draw(rates["group"], rates["corruption"])
    study.output.show(figure, table(rates["group"], results), verdicts(rates))
    return finish(check(rates["group"], results, study.chance), args)


def decide(study: Study, nth: int) -> xr.Dataset:
    """Train the CNN of a seed, fine-tune it in three ways,
    and return their decisions on the validation images.
    """
    args, seed = study.args, study.args.seed + nth
    # The first CNN is that of the study itself.
    if nth:
        # Another seed would split the data anew, and all models must be shown the same images.
        study = replace(study.with_seed(seed), loaders=study.loaders)
    cnn = study.model
    study.train_cnn(f"cnn_{nth}", f"CNN {nth}")

    torch.manual_seed(seed)
    models = {CNN: copy.deepcopy(cnn), TCNN: reparameterize(cnn), ORDER: copy.deepcopy(cnn)}
    files = {CNN: "control", TCNN: "tcnn", ORDER: "order"}
    for name, model in models.items():
        order = seed + FAR if name == ORDER else seed
        study.finetune(model, f"{files[name]}_{nth}", f"{name} {nth}", seed=order)

    images = PixelBatches(cnn, study.loaders[1], args.images)
    return evaluation.robustness(
        models,
        images,
        corruptions=args.corruptions,
        severities=args.severities,
        normalization=images.normalization,
        attacks=(),
        device=args.device,
    )


def with_other_start(results: xr.Dataset) -> xr.Dataset:
    """Add a model to the results: the CNN of the next training,
    which started from different weights.
    """
    decided = [name for name in results.data_vars if "model" in results[name].dims]
    next_cnn = results[decided].sel(model=[CNN]).roll(training=-1, roll_coords=False)
    return xr.concat(
        [results, next_cnn.assign_coords(model=np.array([START], dtype=object))],
        "model",
        data_vars="minimal",
    )


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


def differing(results: xr.Dataset, by: str) -> xr.DataArray:
    """Return whether each model decides differently from the CNN of its training:
    (training, model, by, image).

    Labels of ``by`` begin with "clean".
    """
    runs = [
        by_condition(results.isel(training=nth), by).sel(other=CNN, drop=True)
        for nth in range(results.sizes["training"])
    ]
    models = [name for name in COLORS if name in results.model]
    return xr.concat(runs, "training").sel(model=models).transpose("training", "model", by, "image")


def surplus(rates: xr.DataArray, than: str) -> tuple[xr.DataArray, xr.DataArray]:
    """Return how much more often the T-CNN differs
    from the CNN than another model does, and the 95 % interval.
    """
    difference = rates.sel(model=TCNN, drop=True) - rates.sel(model=than, drop=True)
    return difference.mean(OVER), evaluation.mean_interval(difference, OVER)


@mpl.rc_context(STYLE)
def draw(by_group: xr.DataArray, by_corruption: xr.DataArray) -> Figure:
    """Draw disagreement by group, and the T-CNN's surplus by corruption."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    a, b = figure.subplots(1, 2)
    models = by_group.model.values.tolist()
    for nth, name in enumerate(models):
        values = by_group.sel(model=name)
        # Bars of all models share 0.8 of the distance between ticks.
        at = np.arange(values.sizes["group"]) + (nth - (len(models) - 1) / 2) * 0.8 / len(models)
        bar(
            a,
            at,
            values.mean(OVER),
            evaluation.mean_interval(values, OVER),
            COLORS[name],
            name,
            0.8 / len(models),
        )
    a.set_xticks(range(by_group.sizes["group"]), by_group.group.values)
    a.set(
        ylabel="share decided differently from the CNN",
        title="clean and by group of corruptions",
    )
    a.legend()
    mean, interval = surplus(by_corruption, ORDER)
    bar(b, np.arange(mean.size), mean, interval, COLORS[TCNN], "", 0.7)
    b.set_xticks(
        range(mean.size),
        [name.replace("_", " ") for name in mean.corruption.values],
        rotation=60,
        ha="right",
    )
    b.set(ylabel=f"T-CNN more often than {ORDER}", title="by corruption")
    b.axhline(0, color="k", lw=0.8)
    add_letters([a, b])
    return figure


def bar(
    axes: Axes,
    at: np.ndarray,
    mean: xr.DataArray,
    interval: xr.DataArray,
    color: str,
    label: str,
    width: float,
) -> None:
    """Draw bars with their intervals."""
    # Rounding may put a bound on the wrong side of the mean.
    reach = np.clip([mean - interval.sel(bound="low"), interval.sel(bound="high") - mean], 0, None)
    axes.bar(
        at,
        mean,
        width,
        color=color,
        label=label,
        yerr=reach,
        error_kw={"elinewidth": 0.8, "capsize": 2},
    )


def table(by_group: xr.DataArray, results: xr.Dataset) -> str:
    """Return disagreement with the CNN by model and condition, and accuracies, as a table."""
    trainings = f"{results.sizes['training']} trainings"
    lines = [
        f"\nshare of {results.sizes['image']} images decided differently from the CNN; {trainings}"
    ]
    lines.append(
        f"{'':<18}"
        + "".join(f"{name:>10}" for name in by_group.group.values)
        + "   accuracy, clean"
    )
    for name in by_group.model.values:
        cells = "".join(f"{float(value):>10.3f}" for value in by_group.sel(model=name).mean(OVER))
        lines.append(
            f"{name:<18}{cells}{float(results.clean_accuracy.sel(model=name).mean()):>18.3f}"
        )
    return "\n".join(lines)


def verdicts(rates: dict[str, xr.DataArray]) -> str:
    """Return lines on where the T-CNN departs further
    from the CNN than each yardstick, by the intervals.
    """
    lines = []
    for than in rates["group"].model.values[1:]:
        lines.append(
            f"\nthe T-CNN differs from the CNN more often than {than!r}, with 95 % interval:"
        )
        for by in ("group", "corruption"):
            mean, interval = surplus(rates[by], than)
            # Clean images are in both tables, and printed once.
            for label in mean[by].values[by == "corruption" :]:
                low, high = interval.sel({by: label}).values
                verdict = side_of_zero(
                    (low, high), "more often", "less often", "not distinguishable"
                )
                lines.append(
                    f"  {label:<18}{float(mean.sel({by: label})):+.3f} [{low:+.3f}, {high:+.3f}]  "
                    f"{verdict}"
                )
    lines.append(
        "Intervals are over these images and trainings; so few trainings say little about other "
        "trainings."
    )
    return "\n".join(lines)


def check(by_group: xr.DataArray, results: xr.Dataset, chance: float) -> bool:
    """Return whether the models learned, and the CNN
    of another order shares errors with the CNN, on clean images.
    """
    has_learned = learned(
        "a model", float(results.clean_accuracy.min()), results.sizes["image"], chance
    )
    differ = float(by_group.sel(model=ORDER, group="clean").mean())
    cnn, reordered = (results.clean_accuracy.sel(model=name) for name in (CNN, ORDER))
    return agree_on_errors(differ, cnn, reordered, "two orders of images") and has_learned


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    comparison = [
        Option("--seeds", "CNNs, each with a T-CNN, from --seed on", from_least(1), 3, small=1),
        Option(
            "--images",
            "validation images, spread evenly (default: 150; all of --data)",
            from_least(2),
            150,
            small=50,
            data=None,
        ),
        replace(CORRUPTIONS_OPTION, small=FEW_CORRUPTIONS),
        severities_option([1, 3, 5], small=[1, 5]),
    ]
    # Some CNNs learn little from larger scenes.
    easier = {"img_size": 40, "clutter": 3, "cnn_epochs": 12, "epochs": 4}
    small = "1 seed, 2 epochs, 4 corruptions, 2 severities, 30 seconds"
    groups = {**training_options(small, **easier), "comparison": comparison}
    return parse_options(__doc__, "disagreement", arguments, groups, need_model)


if __name__ == "__main__":
    sys.exit(ended(main))
