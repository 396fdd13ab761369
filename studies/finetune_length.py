r"""Gain of longer fine-tuning, with attention and without (T-CNN paper, Table 4).

    python studies/finetune_length.py

Takes about 4 minutes on one CPU core.

What one should see (finetune_length.png): fine-tuned for longer, the T-CNN ends more accurate, as
in the paper. The control shows what the paper's table leaves open: whether the CNN, trained further
for as long, gains as much.

How: a small ResNet learns handwritten digits in cluttered scenes. From there the CNN as it is
(control) and its T-CNN are fine-tuned for several numbers of epochs, each with its own warm-up and
cosine decay, as in the paper: a shorter run is not a longer run that was stopped early.

Writes into results/:
finetune_length.png    A accuracy at the end by the number of epochs, B accuracy by epoch of each
                       run
finetune_length.zarr   accuracies by (model, length, epoch): xarray.open_zarr

It ends by checking that the models learned, and that the longest fine-tuning of the T-CNN ended
more accurate than the shortest.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/finetune_length.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --lengths 10 20 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --out results/imagenet
"""

import argparse
import copy
import sys

import matplotlib as mpl
import torch
import xarray as xr
from matplotlib.figure import Figure

from common.figures import STYLE, add_letters, whole_ticks
from common.option_table import training_options
from common.options import Option, from_least, need_model, parse_options
from common.output import InputError, ended, finish
from common.training import begin
from common.verdicts import all_learned
from tcnn_model import reparameterize
from tcnn_probe.plot import OKABE_ITO

CONTROL, TCNN = "CNN", "T-CNN"
COLORS = {CONTROL: "0.25", TCNN: OKABE_ITO["vermillion"]}


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, and train the CNN.
    study = begin("finetune_length", args)
    study.train_cnn()

    # Fine-tune the CNN as it is (control) and converted, for each number of epochs, and watch their
    # accuracies.
    by_length = []
    for length in args.lengths:
        torch.manual_seed(args.seed)  # the same queries and keys for each length
        models = {CONTROL: copy.deepcopy(study.model), TCNN: reparameterize(study.model)}
        top1 = []
        for (name, model), file in zip(models.items(), ("control", "tcnn"), strict=True):
            title = f"the {name}, {length} epochs"
            results = study.finetune(model, f"{file}_{length}", title, epochs=length)
            top1.append([result.top1 for result in results])
        coords = {"model": list(models), "epoch": range(length + 1)}
        by_length.append(xr.DataArray(top1, coords, ("model", "epoch"), name="top1"))
    # Shorter runs have NaN at later epochs.
    lengths = xr.Variable("length", args.lengths)
    scores = xr.concat(by_length, lengths, join="outer").to_dataset()
    scores["images"] = len(study.validation)

    study.output.save(scores)
    study.output.show(draw(scores), table(scores))
    return finish(check(scores, study.chance), args)


def end(scores: xr.Dataset) -> xr.DataArray:
    """Return the accuracy after each fine-tuning, (model, length)."""
    return scores.top1.sel(epoch=scores.length)


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset) -> Figure:
    """Draw accuracies at the end, and on the way there."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    a, b = figure.subplots(1, 2, sharey=True)
    for name, color in COLORS.items():
        # Runs of all lengths start with the same accuracy.
        start = float(scores.top1.sel(model=name, epoch=0)[0])
        ends = end(scores).sel(model=name)
        a.plot(
            [0, *scores.length.values],
            [start, *ends.values],
            color=color,
            marker="o",
            label=name,
        )
        for length in scores.length.values:
            curve = scores.top1.sel(model=name, length=length)
            b.plot(scores.epoch, curve, color=color, lw=1.4)
            b.plot([length], [float(curve.sel(epoch=length))], "o", color=color, ms=4)
    a.set(
        xlabel="epochs of fine-tuning",
        ylabel="validation accuracy",
        title="accuracy at the end",
    )
    b.set(xlabel="epoch", title="accuracy by epoch, a line per run")
    a.legend()
    for panel in (a, b):
        whole_ticks(panel)
    add_letters([a, b])
    return figure


def table(scores: xr.Dataset) -> str:
    """Return Table 4 of the paper, with the control."""
    # Standard error of a share, which is largest at 1/2.
    error = (0.25 / int(scores.images)) ** 0.5
    lines = [
        f"\n{'epochs':>6}{'CNN':>8}{'T-CNN':>8}   (one seed, {int(scores.images)} validation "
        "images: a standard ",
    ]
    lines[0] += f"error is at most {error:.3f})"
    rows = [
        (0, scores.top1.isel(epoch=0, length=0)),
        *((length, end(scores).sel(length=length)) for length in scores.length.values),
    ]
    lines += [
        f"{length:>6}{float(row.sel(model=CONTROL)):>8.3f}{float(row.sel(model=TCNN)):>8.3f}"
        for length, row in rows
    ]
    return "\n".join(lines)


def check(scores: xr.Dataset, chance: float) -> bool:
    """Return whether the models learned, and the T-CNN ended more accurate
    after the longest fine-tuning.
    """
    last = end(scores)
    ends = ((f"the {name}", last.sel(model=name)[-1]) for name in COLORS)
    have_learned = all_learned(ends, int(scores.images), chance)
    shortest, longest = (float(last.sel(model=TCNN)[at]) for at in (0, -1))
    verdict = "more" if longest > shortest else "NOT more"
    print(
        f"check: the T-CNN {verdict} accurate after the longest fine-tuning: {shortest:.3f} and "
        f"{longest:.3f}"
    )
    return have_learned and longest > shortest


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    lengths = Option(
        "--lengths",
        "epochs of fine-tuning",
        from_least(2),
        [2, 4, 8],
        small=[2, 4],
        data=[10, 20, 50],
    )
    groups = {**training_options("2 and 4 epochs, 10 seconds"), "lengths": [lengths]}
    args = parse_options(__doc__, "finetune_length", arguments, groups, lengths_not_epochs)
    args.lengths = sorted({*args.lengths})
    if len(args.lengths) < 2:
        raise InputError("--lengths: expected at least two")
    return args


def lengths_not_epochs(args: argparse.Namespace) -> None:
    """Refuse ``--epochs``: two options for the number of epochs could contradict each other."""
    if args.epochs is not None:
        raise InputError("--epochs: here --lengths says how long, such as --lengths 10 20 50")
    need_model(args)


if __name__ == "__main__":
    sys.exit(ended(main))
