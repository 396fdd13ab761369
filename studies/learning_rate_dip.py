"""Whether accuracy dips while the learning rate warms up, and what a lower rate changes (T-CNN paper, Fig. 6).

    python studies/learning_rate_dip.py

Takes about 7 minutes on one CPU core.

What one should see (learning_rate_dip.png): with the largest rate the T-CNN climbs furthest from its lowest accuracy.
In the paper, whose CNN is fully trained, accuracy dips first, lower with a larger rate. The table that is printed says
whether it did here, and how deep, beside the CNN that goes on.

How: a small ResNet learns handwritten digits in cluttered scenes. From there the CNN as it is (control) and its T-CNN
are fine-tuned with several peak learning rates, all with the same warm-up and cosine decay.

Writes into results/:
learning_rate_dip.png    A the T-CNN, B the control: validation accuracy by epoch, a line a rate; grey: warm-up
learning_rate_dip.zarr   accuracies and losses by (model, lr, epoch): xarray.open_zarr

It ends by checking that the models learned, and that the T-CNN climbs higher from its lowest accuracy with the largest
rate than with the smallest.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/learning_rate_dip.py --model resnet50 --pretrained --data path/to/imagenet --img-size 224 \
        --rates 2.5e-5 5e-5 1e-4 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp --workers 16 \
        --out results/imagenet
"""

import argparse
import sys
from collections.abc import Iterator

import matplotlib as mpl
import xarray as xr
from matplotlib.figure import Figure

from common.ending import ended, finish, learned
from common.options import add_output, fill_in, parsed, positive_number, study_parser
from common.training import Training, add_training, begin, settle, warmup

CONTROL, TCNN = "CNN", "T-CNN"


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 if it saw what it stands for, 3 if not."""
    args = parse(arguments)
    study = begin("learning_rate_dip", args, stages=1 + 2 * len(args.rates))
    study.train_cnn()
    found = xr.concat(list(curves(study)), "lr").assign(
        images=len(study.loaders[1].dataset)
    )
    study.output.save(found)
    draw(found, warmup(args.epochs)).savefig(study.output.figure, dpi=200)
    print(table(found))
    print(f"wrote {study.output.store} and {study.output.figure}")
    return finish(check(found, study.chance), args.data)


def curves(study: Training) -> Iterator[xr.Dataset]:
    """Accuracy and loss of both models by epoch, for each rate."""
    for lr in study.args.rates:
        results = study.both(f"{lr:g}", f"rate {lr:g}", lr=lr)
        measured = {
            variable: (
                ("lr", "model", "epoch"),
                [[[getattr(r, variable) for r in run] for run in results]],
            )
            for variable in ("top1", "val_loss", "train_loss")
        }
        coords = {"model": [CONTROL, TCNN], "epoch": range(len(results[0])), "lr": [lr]}
        of_rate = xr.Dataset(measured, coords)
        yield of_rate.assign_coords(
            model=of_rate.model.astype(object)
        )  # zarr warns of fixed-width text


@mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
def draw(found: xr.Dataset, warm: int) -> Figure:
    """Accuracy by epoch; a panel a model."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colors = mpl.colormaps["viridis"].resampled(found.sizes["lr"] + 1)
    for panel, name, letter in zip(panels, (TCNN, CONTROL), "AB", strict=True):
        panel.axvspan(0, warm, color="0.93", zorder=0)
        for at, lr in enumerate(found.lr.values):
            one = found.top1.sel(model=name, lr=lr)
            panel.plot(
                found.epoch,
                one,
                color=colors(at),
                marker="o",
                ms=3,
                lw=1.8,
                label=f"{lr:g}",
            )
        panel.set(
            xlabel="epoch", title="T-CNN" if name == TCNN else "CNN goes on (control)"
        )
        panel.set_title(letter, loc="left", fontweight="bold")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("validation accuracy")
    panels[0].legend(title="peak learning rate", frameon=False)
    return figure


def extremes(found: xr.Dataset) -> xr.Dataset:
    """Accuracy at the start and at the end; how far it falls below the start, and rises from its lowest."""
    start, last = (
        found.top1.isel(epoch=0, drop=True),
        found.top1.isel(epoch=-1, drop=True),
    )
    lowest = found.top1.min("epoch")
    return xr.Dataset(
        {"start": start, "end": last, "dip": start - lowest, "climb": last - lowest}
    )


def table(found: xr.Dataset) -> str:
    """The extremes by model and rate."""
    measured, error = extremes(found), (0.25 / int(found.images)) ** 0.5
    lines = [
        f"\naccuracy on {int(found.images)} validation images (one seed; a standard error is at most {error:.3f})"
    ]
    lines.append(
        f"{'':<8}{'rate':>9}" + "".join(f"{name:>8}" for name in measured.data_vars)
    )
    for name in found.model.values:
        for lr in found.lr.values:
            one = measured.sel(model=name, lr=lr)
            cells = "".join(f"{float(value):8.3f}" for value in one.data_vars.values())
            lines.append(f"{name:<8}{lr:>9g}{cells}")
    return "\n".join(lines)


def check(found: xr.Dataset, chance: float) -> bool:
    """Whether the models learned, and the T-CNN climbs higher with the largest rate than with the smallest."""
    best = found.top1.isel(epoch=-1).max("lr")
    seen = [
        learned(f"the {name}", float(best.sel(model=name)), int(found.images), chance)
        for name in best.model.values
    ]
    climb = extremes(found).climb.sel(model=TCNN)
    smallest, largest = float(climb[0]), float(climb[-1])
    verdict = "climbs higher" if largest > smallest else "does NOT climb higher"
    print(
        f"check: the T-CNN {verdict} with the largest rate: by {largest:.3f}, {smallest:.3f} with the smallest"
    )
    return all(seen) and largest > smallest


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the digits and the user's own images have different defaults."""
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
    settle(parser, args, digits={"epochs": 10})
    fill_in(
        args,
        {
            "rates": [
                share * args.lr for share in ((0.25, 4) if args.small else (0.25, 1, 4))
            ]
        },
    )
    args.rates = sorted({*args.rates})
    if len(args.rates) < 2:
        parser.error("--rates: expected at least two")
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
