"""How strictly convolutional the start should be: locality strength and gate (T-CNN paper, Sec. 2).

    python studies/initial_locality.py

Takes about 8 minutes on one CPU core.

What one should see (initial_locality.png): the higher gates start, the higher they end. The paper names a trade-off:
heads that start strictly local "may stay stuck in the convolutional configuration", and heads that start with a low
gate or a wide positional attention give up the CNN's function. The accuracy at the start shows the second. Whether the
start between the extremes, the paper's alpha = lambda = 1, ends as the most accurate is printed.

How: a small ResNet learns handwritten digits in cluttered scenes. Its last stage is reparameterized as gated positional
self-attention (GPSA), starting from each pair of a locality strength alpha and a gating parameter lambda. All are
fine-tuned with one recipe, and so is the CNN as it is. Every head is recorded.

Writes into results/:
initial_locality.png    for each start: A accuracy before and B after fine-tuning, C mean gate and D content information
                        after it, E gates by epoch for the paper's alpha
initial_locality.zarr   heads and accuracies by (locality_strength, gating, epoch), and the accuracy of the CNN
                        that goes on as it is (control): xarray.open_zarr

It ends by checking that the T-CNNs learned, and that gates which start higher end higher.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/initial_locality.py --model resnetrs50 --pretrained --data path/to/imagenet --img-size 224 \
        --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp --workers 16 --out results/imagenet
"""

import argparse
import copy
import sys

import matplotlib as mpl
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.ending import ended, finish, learned
from common.options import add_output, fill_in, parsed, positive_number, study_parser
from common.training import add_training, begin, settle

KEPT = (
    "gate",
    "attention_span",
    "entropy",
    "content_information",
    "top1",
    "val_loss",
    "images",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 if it saw what it stands for, 3 if not."""
    args = parse(arguments)
    study = begin(
        "initial_locality", args, stages=2 + len(args.strengths) * len(args.gatings)
    )
    study.train_cnn()
    rows = []
    for strength in args.strengths:
        row = []
        for gating in args.gatings:
            name = f"alpha={strength:g},lambda={gating:g}"
            _, heads = study.tcnn(
                study.output.beside(f"_{name}.zarr"),
                file=name,
                title=f"alpha = {strength:g}, lambda = {gating:g}",
                start={"locality_strength": strength, "gating": gating},
            )
            row.append(heads[list(KEPT)])
        rows.append(
            xr.concat(
                row, xr.Variable("gating", args.gatings), combine_attrs="drop_conflicts"
            )
        )
    found = xr.concat(
        rows,
        xr.Variable("locality_strength", args.strengths),
        combine_attrs="drop_conflicts",
    )
    control = study.fine_tune(
        copy.deepcopy(study.cnn), "control", "the CNN goes on (control)"
    )
    found["control_top1"] = "epoch", [result.top1 for result in control]
    study.output.save(found)
    draw(found).savefig(study.output.figure, dpi=200)
    print(table(found))
    print(f"wrote {study.output.store} and {study.output.figure}")
    return finish(check(found, study.chance), args.data)


@mpl.rc_context({"font.size": 9})
def draw(found: xr.Dataset) -> Figure:
    """A table for each outcome, coloured; and the gates by epoch."""
    first, last = found.isel(epoch=0), found.isel(epoch=-1)
    content = last.content_information.max(["layer", "head"])
    shown = [
        (first.top1, "accuracy at the start", 1),
        (last.top1, "accuracy after fine-tuning", 1),
        (last.gate.mean(["layer", "head"]), "mean gate after fine-tuning", 1),
        (
            content,
            "largest content information (nat)",
            max(0.1, float(content.max())),
        ),  # 0.1: a content head
    ]
    figure = Figure(figsize=(11.5, 5.6), layout="constrained")
    axes = figure.subplot_mosaic("ABE;CDE", width_ratios=[1, 1, 1.2])
    for letter, (values, title, most) in zip("ABCD", shown, strict=True):
        tabulate(axes[letter], values, most)
        axes[letter].set_title(title)
    middle = found.locality_strength.values[found.sizes["locality_strength"] // 2]
    gates = found.gate.sel(locality_strength=middle)
    colors = mpl.colormaps["viridis"].resampled(found.sizes["gating"] + 1)
    for at, gating in enumerate(found.gating.values):
        one = gates.sel(gating=gating)
        axes["E"].plot(
            one.epoch,
            one.stack(each=("layer", "head")),
            color=colors(at),
            lw=0.4,
            alpha=0.5,
        )
        axes["E"].plot(
            one.epoch,
            one.mean(["layer", "head"]),
            color=colors(at),
            lw=2.4,
            label=f"{gating:g}",
        )
    axes["E"].set(
        xlabel="epoch",
        ylabel=r"gate $\sigma(\lambda)$",
        ylim=(0, 1),
        title=rf"gates from $\alpha$ = {middle:g}",
    )
    axes["E"].xaxis.get_major_locator().set_params(integer=True)
    axes["E"].legend(title=r"$\lambda$ at the start", frameon=False)
    for letter, panel in axes.items():
        panel.set_title(letter, loc="left", fontweight="bold")
    return figure


def tabulate(axes: Axes, values: xr.DataArray, most: float) -> None:
    """A cell for each start, with its number; colours from 0 to ``most``."""
    values = values.transpose("locality_strength", "gating")
    axes.imshow(values, cmap="cividis", vmin=0, vmax=most, aspect="auto")
    for row, column in (
        (r, c) for r in range(values.shape[0]) for c in range(values.shape[1])
    ):
        number = float(values[row, column])
        axes.text(
            column,
            row,
            f"{number:.2f}",
            ha="center",
            va="center",
            color="w" if number < most / 2 else "k",
        )
    axes.set_xticks(range(values.shape[1]), [f"{x:g}" for x in values.gating.values])
    axes.set_yticks(
        range(values.shape[0]), [f"{x:g}" for x in values.locality_strength.values]
    )
    axes.set(
        xlabel=r"$\lambda$ at the start",
        ylabel=r"$\alpha$ at the start (1 / pixel$^2$)",
    )


def table(found: xr.Dataset) -> str:
    """What came of each start."""
    lines = [
        f"\n{'alpha':>6}{'lambda':>8}{'top-1 at start':>16}{'at the end':>12}{'mean gate':>11}{'content (nat)':>15}"
    ]
    for strength in found.locality_strength.values:
        for gating in found.gating.values:
            one = found.sel(locality_strength=strength, gating=gating)
            last = one.isel(epoch=-1)
            numbers = [
                float(one.top1[0]),
                float(last.top1),
                float(last.gate.mean()),
                float(last.content_information.max()),
            ]
            cells = "".join(
                f"{n:{w}.{d}f}"
                for n, w, d in zip(numbers, (16, 12, 11, 15), (3, 3, 2, 2), strict=True)
            )
            lines.append(f"{strength:>6g}{gating:>8g}{cells}")
    end = found.top1.isel(epoch=-1)
    best = end.where(end == end.max(), drop=True)
    alpha, gate = float(best.locality_strength[0]), float(best.gating[0])
    control = found.control_top1.values
    lines.append(
        f"the CNN, and when it goes on as it is: {control[0]:.3f}, {control[-1]:.3f}"
    )
    images = int(found.images.max())
    error = (0.25 / images) ** 0.5
    lines.append(f"most accurate: alpha = {alpha:g}, lambda = {gate:g}")
    lines.append(
        f"(one seed, {images} validation images; a standard error is at most {error:.3f})"
    )
    return "\n".join(lines)


def check(found: xr.Dataset, chance: float) -> bool:
    """Whether the T-CNNs learned, and gates that start higher end higher."""
    last = found.isel(epoch=-1)
    best = learned(
        "the most accurate T-CNN",
        float(last.top1.max()),
        int(last.images.max()),
        chance,
    )
    ends = last.gate.mean(["layer", "head", "locality_strength"]).values
    ordered = bool((ends[1:] > ends[:-1]).all())
    verdict = "end higher" if ordered else "do NOT end higher"
    print(
        f"check: gates that start higher {verdict}: {', '.join(f'{end:.2f}' for end in ends)}"
    )
    return best and ordered


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add_training(parser, small="2 starts, 2 epochs, 10 seconds")
    add = parser.add_argument_group("starts").add_argument
    add(
        "--strengths",
        type=positive_number,
        nargs="+",
        help="alpha of every head (default: 0.2 1 5)",
    )
    add(
        "--gatings",
        type=float,
        nargs="+",
        help="lambda of every head (default: -1 1 3)",
    )
    add_output(parser)
    args = parsed(parser, arguments, "initial_locality")
    if args.small:
        fill_in(args, {"epochs": 2, "strengths": [1], "gatings": [-1, 3]})
    settle(parser, args, digits={"epochs": 4})
    fill_in(args, {"strengths": [0.2, 1, 5], "gatings": [-1, 1, 3]})
    args.strengths, args.gatings = sorted({*args.strengths}), sorted({*args.gatings})
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
