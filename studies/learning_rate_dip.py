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

from common.ending import ended, finish, learned
from common.figures import STYLE, add_letters, ordered_colors, whole_ticks
from common.options import add_output, fill_in, parsed, positive_number, study_parser
from common.training import begin, warmup
from common.training_options import add_training, settle
from tcnn_model import EpochResult, reparameterize

CONTROL, TCNN = "CNN", "T-CNN"


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return 0 if its checks hold or the images are your own, else 3."""
    args = parse(arguments)

    # Load the CNN and the digits, and train the CNN.
    study = begin("learning_rate_dip", args, stages=1 + 2 * len(args.rates))
    study.train_cnn()

    # Fine-tune the CNN as it is (control) and converted, with each rate, and watch their
    # accuracies.
    by_rate = []
    for lr in args.rates:
        torch.manual_seed(args.seed)  # the same queries and keys for each rate
        control, tcnn = copy.deepcopy(study.cnn), reparameterize(study.cnn)
        runs = {
            CONTROL: study.finetune(control, f"control_{lr:g}", f"the CNN, rate {lr:g}", lr=lr),
            TCNN: study.finetune(tcnn, f"tcnn_{lr:g}", f"the T-CNN, rate {lr:g}", lr=lr),
        }
        curves = [epoch_curves(list(results)) for results in runs.values()]
        by_rate.append(xr.concat(curves, xr.Variable("model", list(runs))))
    scores = xr.concat(by_rate, xr.Variable("lr", args.rates))
    scores["images"] = len(study.validation)

    study.output.save(scores)
    draw(scores, warmup(args.epochs)).savefig(study.output.figure, dpi=200)
    print(table(scores))
    study.output.print_files()
    return finish(check(scores, study.chance), args.data)


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
    panels[0].legend(title="peak learning rate", frameon=False)
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
    images = int(scores.images)
    # This is a list, so that each model that did not learn is printed.
    have_learned = [
        learned(f"the {model}", float(best.sel(model=model)), images, chance)
        for model in best.model.values
    ]
    climb = extremes(scores).climb.sel(model=TCNN)
    smallest, largest = float(climb[0]), float(climb[-1])
    verdict = "climbs higher" if largest > smallest else "does NOT climb higher"
    print(
        f"check: the T-CNN {verdict} with the largest rate: by {largest:.3f}, {smallest:.3f} with "
        "the smallest"
    )
    return all(have_learned) and largest > smallest


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add_training(parser, small="2 rates, 2 epochs, 10 seconds")
    add = parser.add_argument_group("rates").add_argument
    add(
        "--rates",
        type=positive_number,
        nargs="+",
        help="peak learning rates (default: 1/4, 1 and 4 times --lr)",
    )
    add_output(parser)
    args = parsed(parser, arguments, "learning_rate_dip")
    if args.small:
        fill_in(args, {"epochs": 2})
    # Trainings are longer than in most studies, so that the warm-up takes two epochs and a dip has
    # time to show.
    settle(parser, args, digits={"epochs": 10})
    # The check needs the smallest and the largest rate only.
    shares = (0.25, 4) if args.small else (0.25, 1, 4)
    fill_in(args, {"rates": [share * args.lr for share in shares]})
    # Rates ascend, as the check compares the first with the last.
    args.rates = sorted({*args.rates})
    if len(args.rates) < 2:
        parser.error("--rates: expected at least two")
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
