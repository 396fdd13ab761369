r"""Strictness of the convolutional start: locality strength and gate (T-CNN paper, Sec. 2).

    python studies/initial_locality.py

Takes about 8 minutes on one CPU core.

What one should see (initial_locality.png): the higher gates start, the higher they end. The paper
names a trade-off: heads that start strictly local "may stay stuck in the convolutional
configuration", and heads that start with a low gate or a wide positional attention give up the
CNN's function. The accuracy at the start shows the second. The study prints whether the start
between the extremes, the paper's alpha = lambda = 1, ends as the most accurate.

How: a small ResNet learns handwritten digits in cluttered scenes. Its last stage is reparameterized
as gated positional self-attention (GPSA), starting from each pair of a locality strength alpha and
a gating parameter lambda. All are fine-tuned with one recipe, and so is the CNN as it is. Every
head is recorded.

Writes into results/:
initial_locality.png    for each start: A accuracy before and B after fine-tuning, C mean gate and D
                        content information after it, E gates by epoch for the paper's alpha
initial_locality.zarr   heads and accuracies by (locality_strength, gating, epoch), and the accuracy
                        of the CNN that is trained further (control): xarray.open_zarr

It ends by checking that the T-CNNs learned, and that gates which start higher end higher.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/initial_locality.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --out results/imagenet
"""

import argparse
import copy
import sys

import matplotlib as mpl
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.controls import TRAINING_TITLES
from common.figures import add_letters, number_cells, ordered_colors, whole_ticks
from common.option_table import training_options
from common.options import Option, need_model, parse_options, positive_number
from common.output import ended, finish
from common.training import Study, begin
from common.verdicts import learned

SAVED = (
    "gate",
    "attention_span",
    "entropy",
    "content_information",
    "top1",
    "val_loss",
    "images",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, and train the CNN.
    study = begin("initial_locality", args)
    study.train_cnn()

    # Convert it from each start, fine-tune, and record every head.
    by_strength = []
    for strength in args.strengths:
        recordings = [record_start(study, strength, gating) for gating in args.gatings]
        by_strength.append(stack(recordings, "gating", args.gatings))
    scores = stack(by_strength, "locality_strength", args.strengths)

    # As the control, the CNN is trained further for as long.
    control = copy.deepcopy(study.model)
    results = study.finetune(control, "control", TRAINING_TITLES["control"])
    scores["control_top1"] = "epoch", [result.top1 for result in results]

    study.output.save(scores)
    study.output.show(draw(scores), table(scores))
    return finish(check(scores, study.chance), args)


def record_start(study: Study, strength: float, gating: float) -> xr.Dataset:
    """Fine-tune a T-CNN that starts from these alpha and lambda,
    and return the recording of its heads.
    """
    name = f"alpha={strength:g},lambda={gating:g}"
    title = f"alpha = {strength:g}, lambda = {gating:g}"
    start = {"locality_strength": strength, "gating": gating}
    # Queries and keys are the same from each start.
    _, recording = study.record_tcnn(study.output.beside(f"_{name}.zarr"), name, title, start=start)
    return recording[list(SAVED)]


def stack(datasets: list[xr.Dataset], dim: str, labels: list[float]) -> xr.Dataset:
    """Return the datasets along a new dimension;
    attributes in which they differ, such as times, are dropped.
    """
    return xr.concat(datasets, xr.Variable(dim, labels), combine_attrs="drop_conflicts")


@mpl.rc_context({"font.size": 9})
def draw(scores: xr.Dataset) -> Figure:
    """Draw a coloured table of each outcome, and the gates by epoch."""
    first, last = scores.isel(epoch=0), scores.isel(epoch=-1)
    heads = ["layer", "head"]
    content = last.content_information.max(heads)
    # Colours end at 0.1 nat at least, above which a head counts as one of content.
    content_end = max(0.1, float(content.max()))
    tables = [
        (first.top1, "accuracy at the start", 1),
        (last.top1, "accuracy after fine-tuning", 1),
        (last.gate.mean(heads), "mean gate after fine-tuning", 1),
        (content, "largest content information (nat)", content_end),
    ]
    figure = Figure(figsize=(11.5, 5.6), layout="constrained")
    axes = figure.subplot_mosaic("ABE;CDE", width_ratios=[1, 1, 1.2])
    for letter, (values, title, end) in zip("ABCD", tables, strict=True):
        tabulate(axes[letter], values, end)
        axes[letter].set_title(title)
    draw_gates(axes["E"], scores)
    add_letters(axes[letter] for letter in "ABCDE")
    return figure


def draw_gates(panel: Axes, scores: xr.Dataset) -> None:
    """Draw the gates by epoch for the middle alpha,
    a colour for each lambda: heads thin, their mean thick.
    """
    strengths = scores.locality_strength.values
    middle = strengths[len(strengths) // 2]
    colors = ordered_colors(scores.sizes["gating"])
    for row, gating in enumerate(scores.gating.values):
        gates = scores.gate.sel(locality_strength=middle, gating=gating)
        by_head = gates.stack(heads=("layer", "head"))
        panel.plot(gates.epoch, by_head, color=colors[row], lw=0.4, alpha=0.5)
        panel.plot(
            gates.epoch,
            gates.mean(["layer", "head"]),
            color=colors[row],
            lw=2.4,
            label=f"{gating:g}",
        )
    panel.set(
        xlabel="epoch",
        ylabel=r"gate $\sigma(\lambda)$",
        ylim=(0, 1),
        title=rf"gates from $\alpha$ = {middle:g}",
    )
    whole_ticks(panel)
    panel.legend(title=r"$\lambda$ at the start", frameon=False)


def tabulate(panel: Axes, values: xr.DataArray, end: float) -> None:
    """Draw a cell for each start, with its number; colours go from 0 to ``end``."""
    values = values.transpose("locality_strength", "gating")
    panel.imshow(values, cmap="cividis", vmin=0, vmax=end, aspect="auto")
    # cividis is dark in its lower half.
    number_cells(panel, values, lambda number: number < end / 2)
    gatings, strengths = values.gating.values, values.locality_strength.values
    panel.set_xticks(range(len(gatings)), [f"{gating:g}" for gating in gatings])
    panel.set_yticks(range(len(strengths)), [f"{alpha:g}" for alpha in strengths])
    panel.set(
        xlabel=r"$\lambda$ at the start",
        ylabel=r"$\alpha$ at the start (1 / pixel$^2$)",
    )


def table(scores: xr.Dataset) -> str:
    """Return the outcome of each start as a table."""
    lines = [
        f"\n{'alpha':>6}{'lambda':>8}{'top-1 at start':>16}{'at the end':>12}"
        f"{'mean gate':>11}{'content (nat)':>15}"
    ]
    for strength in scores.locality_strength.values:
        for gating in scores.gating.values:
            run = scores.sel(locality_strength=strength, gating=gating)
            last = run.isel(epoch=-1)
            lines.append(
                f"{strength:>6g}{gating:>8g}"
                f"{float(run.top1[0]):16.3f}{float(last.top1):12.3f}"
                f"{float(last.gate.mean()):11.2f}{float(last.content_information.max()):15.2f}"
            )
    end = scores.top1.isel(epoch=-1)
    best = end.where(end == end.max(), drop=True)
    alpha = float(best.locality_strength[0])
    gate = float(best.gating[0])
    control = scores.control_top1.values
    images = int(scores.images.max())
    error = (0.25 / images) ** 0.5  # standard error of a share, largest at 1/2
    lines += [
        f"the CNN, and the CNN trained further: {control[0]:.3f}, {control[-1]:.3f}",
        f"most accurate: alpha = {alpha:g}, lambda = {gate:g}",
        f"(one seed, {images} validation images; a standard error is at most {error:.3f})",
    ]
    return "\n".join(lines)


def check(scores: xr.Dataset, chance: float) -> bool:
    """Return whether the T-CNNs learned, and gates that start higher end higher."""
    last = scores.isel(epoch=-1)
    has_learned = learned(
        "the most accurate T-CNN",
        float(last.top1.max()),
        int(last.images.max()),
        chance,
    )
    ends = last.gate.mean(["layer", "head", "locality_strength"]).values
    ordered = bool((ends[1:] > ends[:-1]).all())
    verdict = "end higher" if ordered else "do NOT end higher"
    print(f"check: gates that start higher {verdict}: {', '.join(f'{end:.2f}' for end in ends)}")
    return has_learned and ordered


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    # The paper's alpha = lambda = 1 in the middle, and a start on either side of it.
    starts = [
        Option(
            "--strengths",
            "alpha of every head",
            positive_number,
            [0.2, 1, 5],
            small=[1],
        ),
        Option("--gatings", "lambda of every head", float, [-1, 1, 3], small=[-1, 3]),
    ]
    groups = {**training_options("2 starts, 1 epoch", epochs=(4, 1)), "starts": starts}
    args = parse_options(__doc__, "initial_locality", arguments, groups, need_model)
    args.strengths = sorted({*args.strengths})
    args.gatings = sorted({*args.gatings})
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
