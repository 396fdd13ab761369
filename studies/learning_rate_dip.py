r"""Dip of accuracy while the learning rate warms up,
and the effect of a lower rate (T-CNN paper, Fig. 6).

    python studies/learning_rate_dip.py

Takes about 7 minutes on one CPU core.

What one should see (learning_rate_dip.png): with the largest rate the T-CNN climbs furthest from
its lowest accuracy. In the paper, whose CNN is fully trained, accuracy dips first, lower with a
larger rate. The table that is printed says whether it did here, and how far, for the T-CNN and for
the CNN that is trained further.

How: a small ResNet learns handwritten digits in cluttered scenes. From there the CNN as it is
(control) and its T-CNN are fine-tuned with several peak learning rates, all with the same warm-up
and cosine decay.

Writes into results/:
learning_rate_dip.png    A the T-CNN, B the control: validation accuracy by epoch, a line per rate;
                         grey: warm-up
learning_rate_dip.zarr   accuracies and losses by (model, lr, epoch): xarray.open_zarr

It ends by checking that the models learned, and that the T-CNN climbs higher from its lowest
accuracy with the largest rate than with the smallest.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/learning_rate_dip.py --model resnet50 --pretrained --data path/to/imagenet \
        --img-size 224 --rates 2.5e-5 5e-5 1e-4 --epochs 50 --batch-size 1024 --drop-path 0.1 \
        --device cuda --amp --workers 16 --out results/imagenet
"""

import argparse
import copy
import sys

import matplotlib as mpl
import torch
import xarray as xr
from matplotlib.figure import Figure

from common.figures import STYLE, add_letters, ordered_colors, whole_ticks
from common.option_table import training_options
from common.options import Option, need_model, parse_options, positive_number
from common.output import InputError, ended, finish
from common.training import begin, warmup
from common.verdicts import all_learned
from tcnn_model import EpochResult, reparameterize

CONTROL, TCNN = "CNN", "T-CNN"


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, and train the CNN.
    study = begin("learning_rate_dip", args)
    study.train_cnn()

    # Fine-tune the CNN as it is (control) and converted, with each rate, and watch their
    # accuracies.
    by_rate = []
    for lr in args.rates:
        torch.manual_seed(args.seed)  # the same queries and keys for each rate
        models = {CONTROL: copy.deepcopy(study.model), TCNN: reparameterize(study.model)}
        curves = [
            epoch_curves(study.finetune(model, f"{file}_{lr:g}", f"the {name}, rate {lr:g}", lr=lr))
            for (name, model), file in zip(models.items(), ("control", "tcnn"), strict=True)
        ]
        by_rate.append(xr.concat(curves, xr.Variable("model", list(models))))
    scores = xr.concat(by_rate, xr.Variable("lr", args.rates))
    scores["images"] = len(study.validation)

    study.output.save(scores)
    study.output.show(draw(scores, warmup(args.epochs)), table(scores))
    return finish(check(scores, study.chance), args)


def epoch_curves(results: list[EpochResult]) -> xr.Dataset:
    """Return accuracy and losses by epoch."""
    names = ("top1", "val_loss", "train_loss")
    curves = {name: ("epoch", [getattr(result, name) for result in results]) for name in names}
    return xr.Dataset(curves, {"epoch": range(len(results))})


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset, warmup_epochs: int) -> Figure:
    """Draw accuracy by epoch; a panel for each model."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colors = ordered_colors(scores.sizes["lr"])
    titles = {TCNN: "T-CNN", CONTROL: "CNN, trained further (control)"}
    for panel, (model, title) in zip(panels, titles.items(), strict=True):
        panel.axvspan(0, warmup_epochs, color="0.93", zorder=0)
        for row, lr in enumerate(scores.lr.values):
            panel.plot(
                scores.epoch,
                scores.top1.sel(model=model, lr=lr),
                color=colors[row],
                marker="o",
                ms=3,
                lw=1.8,
                label=f"{lr:g}",
            )
        panel.set(xlabel="epoch", title=title)
        whole_ticks(panel)
    add_letters(panels)
    panels[0].set_ylabel("validation accuracy")
    panels[0].legend(title="peak learning rate")
    return figure


def extremes(scores: xr.Dataset) -> xr.Dataset:
    """Return accuracy at the start and at the end,
    its fall below the start, and its rise from the lowest.
    """
    start = scores.top1.isel(epoch=0, drop=True)
    last = scores.top1.isel(epoch=-1, drop=True)
    lowest = scores.top1.min("epoch")
    return xr.Dataset({"start": start, "end": last, "dip": start - lowest, "climb": last - lowest})


def table(scores: xr.Dataset) -> str:
    """Return the extremes by model and rate as a table."""
    by_model, images = extremes(scores), int(scores.images)
    error = (0.25 / images) ** 0.5  # standard error of a share, largest at 1/2
    header = "".join(f"{name:>8}" for name in by_model.data_vars)
    lines = [
        f"\naccuracy on {images} validation images (one seed; a standard error is at most "
        f"{error:.3f})",
        f"{'':<8}{'rate':>9}{header}",
    ]
    for model in scores.model.values:
        for lr in scores.lr.values:
            row = by_model.sel(model=model, lr=lr)
            cells = "".join(f"{float(value):8.3f}" for value in row.data_vars.values())
            lines.append(f"{model:<8}{lr:>9g}{cells}")
    return "\n".join(lines)


def check(scores: xr.Dataset, chance: float) -> bool:
    """Return whether the models learned, and the T-CNN climbs higher
    with the largest rate than with the smallest.
    """
    best = scores.top1.isel(epoch=-1).max("lr")
    ends = ((f"the {model}", best.sel(model=model)) for model in best.model.values)
    have_learned = all_learned(ends, int(scores.images), chance)
    climb = extremes(scores).climb.sel(model=TCNN)
    smallest, largest = float(climb[0]), float(climb[-1])
    verdict = "climbs higher" if largest > smallest else "does NOT climb higher"
    print(
        f"check: the T-CNN {verdict} with the largest rate: by {largest:.3f}, {smallest:.3f} with "
        "the smallest"
    )
    return have_learned and largest > smallest


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    # The check needs the smallest and the largest rate only.
    rates = Option(
        "--rates",
        "peak learning rates (default: 1/4, 1 and 4 times --lr)",
        positive_number,
        lambda args: [share * args.lr for share in (0.25, 1, 4)],
        small=lambda args: [share * args.lr for share in (0.25, 4)],
        nargs="+",
    )
    # Trainings are longer than in most studies, so that the warm-up takes two epochs and a dip has
    # time to show.
    training = training_options("2 rates, 2 epochs, 10 seconds", epochs=(10, 2))
    groups = {**training, "rates": [rates]}
    args = parse_options(__doc__, "learning_rate_dip", arguments, groups, need_model)
    # Rates ascend, as the check compares the first with the last.
    args.rates = sorted({*args.rates})
    if len(args.rates) < 2:
        raise InputError("--rates: expected at least two")
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
