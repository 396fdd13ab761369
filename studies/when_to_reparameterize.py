r"""When to reparameterize, at equal total training (T-CNN paper, Sec. 5 and Table 3).

    python studies/when_to_reparameterize.py

Takes about 6 minutes on one CPU core.

What one should see (when_to_reparameterize.png): in the paper, a ResNet-50 trained for 400 epochs
in all does best when it becomes a T-CNN after 100 of them (80.44 %), better than from scratch
(79.95 %) and than late (79.28 % after 300). Here the same question is asked of a small ResNet on
handwritten digits. There is one run for each t1, and runs that are closer than two standard errors
are not told apart; the last line that is printed says which lie further behind.

How: the loop of ``tcnn-finetune`` trains a CNN with SGD and momentum for t1 epochs, converts its
last stage to gated positional self-attention (GPSA), and continues with the same optimizer and
schedule for t2 epochs, where t1 + t2 is the same in all runs (the paper's T-CNN*). With t1 = 0 the
hybrid is trained from scratch; with t2 = 0 the CNN alone.

Writes into results/:
when_to_reparameterize.png    A accuracy at the end by t1, B accuracy by epoch of each run
when_to_reparameterize.zarr   accuracies and losses by (t1, epoch): xarray.open_zarr
when_to_reparameterize_runs   the folder of each run: its settings, checkpoints, and recording.zarr
                              with its heads

It ends by checking that each run learned, and continued as a T-CNN where it should.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/when_to_reparameterize.py --model resnet50 --data path/to/imagenet \
        --img-size 224 --epochs 400 --times 0 100 200 300 400 --batch-size 1024 --lr 0.4 \
        --device cuda --amp --workers 16 --out results/imagenet
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

import matplotlib as mpl
import xarray as xr
from matplotlib.figure import Figure

import tcnn_probe
from common.ending import ended, finish, learned, refused
from common.figures import STYLE, add_letters, ordered_colors, whole_ticks
from common.options import (
    add_machine,
    add_output,
    fill_in,
    from_least,
    need_model,
    parsed,
    positive_number,
    study_parser,
)
from common.output import RunOutput
from common.training_options import add_augment, settle_augment
from tcnn_model.training.command import train
from tcnn_model.training.config import Config, recipe_settings

MEASURES = ("top1", "val_loss", "train_loss", "train_top1")


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return 0 if its checks hold or the images are your own, else 3."""
    args = parse(arguments)
    output = RunOutput.from_args(args, "when_to_reparameterize")

    # Train each run with the library's own command, or resume it.
    runs = [train_run(args, output, t1) for t1 in args.times]
    scores = xr.concat(runs, "t1", join="outer")
    # All runs have the same validation images, but recordings without heads do not count them.
    scores["images"] = scores.images.max()

    output.save(scores)
    draw(scores).savefig(output.figure, dpi=200)
    print(table(scores))
    output.print_files()
    return finish(check(scores), args.data)


def train_run(args: argparse.Namespace, output: RunOutput, t1: int) -> xr.Dataset:
    """Train the CNN for ``t1`` epochs and the T-CNN for the rest,
    and return accuracies and losses by epoch.
    """
    folder = output.beside("_runs") / f"t1_{t1}"
    config = Config(
        args.model,
        data=args.data,
        img_size=args.img_size,
        limit=args.limit,
        epochs=args.epochs,
        # A tenth, as in the paper's 5 of 50 epochs.
        warmup_epochs=max(1, args.epochs // 10),
        batch_size=args.batch_size,
        opt="momentum",
        lr=args.lr,
        weight_decay=1e-4,
        reparameterize_at=t1 if t1 < args.epochs else None,
        # The paper's T-CNN* continues with the optimizer and the schedule of the CNN.
        keep_optimizer=True,
        # Digits are in memory, where loading processes only cost time.
        workers=args.workers if args.data != "digits" else 0,
        device=args.device,
        amp="bfloat16" if args.amp else None,
        seed=args.seed,
        out=str(folder),
        **augmentation(args),
    )
    with refused(ValueError, OSError):
        results = [asdict(result) for result in train(config, resume=folder.exists())]
    scores: dict[str, Any] = {
        name: (("t1", "epoch"), [[result[name] for result in results]]) for name in MEASURES
    }
    heads = images = 0
    recording = tcnn_probe.open(folder / "recording.zarr")
    if "heads" in recording.children:  # the CNN has no heads
        last = recording["heads"].dataset.isel(epoch=-1)
        heads = int(last.gate.notnull().sum())
        images = int(last.images.max())
    scores |= {"heads": ("t1", [heads]), "images": ("t1", [images])}
    epochs = [result["epoch"] for result in results]
    return xr.Dataset(scores, {"t1": [t1], "epoch": epochs})


def augmentation(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the recipe for the training images; the digits are not augmented."""
    names: tuple[str, ...] = ()
    if args.data != "digits":
        names = ("auto_augment", "random_erasing")
    if args.augment == "papers":
        names += ("repeated_augmentation", "mixup", "cutmix")
    recipe = recipe_settings("tcnn_scratch", args.model)
    return {name: recipe[name] for name in names}


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset) -> Figure:
    """Draw accuracies at the end, and on the way there."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    a, b = figure.subplots(1, 2, sharey=True)
    ends, error = at_the_end(scores)
    a.errorbar(scores.t1, ends, error, color="0.2", marker="o", capsize=3)
    a.set(
        xlabel="t1: epochs before it becomes a T-CNN",
        ylabel="validation accuracy",
        title="accuracy at the end",
    )
    colors = ordered_colors(scores.sizes["t1"])
    for row, t1 in enumerate(scores.t1.values):
        curve = scores.top1.sel(t1=t1)
        b.plot(
            scores.epoch,
            curve,
            color=colors[row],
            lw=1.6,
            label=f"{t1}" if scores.heads[row] else f"{t1}: the CNN",
        )
        # The CNN is not converted.
        if scores.heads[row]:
            b.plot([t1], [float(curve.sel(epoch=t1))], "o", color=colors[row], ms=5)
    b.set(xlabel="epoch", title="accuracy by epoch; dots: becomes a T-CNN")
    b.legend(title="t1", frameon=False)
    for panel in (a, b):
        whole_ticks(panel)
    add_letters([a, b])
    return figure


def at_the_end(scores: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Return accuracy after the last epoch, and its standard error over validation images."""
    ends = scores.top1.isel(epoch=-1, drop=True)
    return ends, (ends * (1 - ends) / float(scores.images)) ** 0.5


def table(scores: xr.Dataset) -> str:
    """Return Table 3 of the paper, and what the standard errors tell apart."""
    ends, error = at_the_end(scores)
    total = int(scores.epoch[-1])
    best = int(ends.argmax("t1"))
    lines = [
        f"\n{'t1':>5}{'t2':>5}{'heads':>7}{'top-1':>8}"
        f"   (one seed each, {int(scores.images)} validation images)"
    ]
    for t1, end, heads in zip(scores.t1.values, ends.values, scores.heads.values, strict=True):
        lines.append(f"{t1:>5}{total - t1:>5}{heads:>7}{end:>8.3f}")
    # Two standard errors of a difference are about a 95 % interval.
    apart = ends[best] - ends > 2 * (error**2 + error[best] ** 2) ** 0.5
    behind = ", ".join(str(t1) for t1 in scores.t1.values[apart.values]) or "none"
    lines.append(
        f"most accurate: t1 = {int(scores.t1[best])}; behind it by more than two standard errors: "
        f"{behind}"
    )
    return "\n".join(lines)


def check(scores: xr.Dataset) -> bool:
    """Return whether each run learned, and has the heads of a T-CNN where it became one."""
    checks = []
    for t1, group in scores.groupby("t1"):
        run = group.squeeze("t1")
        # Chance is too low a bar: a run must beat its own start, which may have no right answer.
        untrained = max(float(run.top1[0]), 1 / float(scores.images))
        checks.append(
            learned(
                f"the run of t1 = {t1}",
                float(run.top1[-1]),
                int(scores.images),
                untrained,
            )
        )
        checks.append((int(run.heads) > 0) == (t1 < int(scores.epoch[-1])))
        if not checks[-1]:
            print(
                f"check: the run of t1 = {t1} has {int(run.heads)} heads: NOT what it should have "
                "become"
            )
    print(
        f"check: {sum(checks)} of {len(checks)} hold: runs that learned, and became T-CNNs where "
        "they should"
    )
    return all(checks)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add = parser.add_argument_group("model and data").add_argument
    add("--model", help="timm name of a CNN (default: test_resnet, a small one)")
    add(
        "--data",
        default="digits",
        help="folder with train/ and val/, and in each a folder for every class (default: digits)",
    )
    add(
        "--img-size",
        type=from_least(1),
        help="height and width of the images (default: 64; 224 for --data)",
    )
    add(
        "--limit",
        type=from_least(4),
        help="number of training images, and as many to validate on (default: all)",
    )
    group = parser.add_argument_group("training")
    add = group.add_argument
    add(
        "--epochs",
        type=from_least(2),
        help="epochs in all, t1 + t2 (default: 12; 400 for --data)",
    )
    add(
        "--times",
        type=from_least(0),
        nargs="+",
        help="values of t1 (default: 0, 1/4, 1/2, 3/4 and all of --epochs)",
    )
    add(
        "--batch-size",
        type=from_least(1),
        help="images per step (default: 32; 256 for --data)",
    )
    add("--lr", type=positive_number, help="peak learning rate (default: 0.1)")
    add_augment(add)
    add_machine(group, small="2 runs of 3 epochs, 20 seconds")
    add_output(parser)
    args = parsed(parser, arguments, "when_to_reparameterize")
    defaults: dict[str, Any] = {
        "img_size": 64,
        "epochs": 12,
        "batch_size": 32,
        "lr": 0.1,
    }
    if args.small:
        defaults |= {
            "img_size": 48,
            "epochs": 3,
            "limit": 240,
            "batch_size": 16,
            # One run that becomes a T-CNN, and the CNN.
            "times": [1, 3],
        }
    settle_augment(parser, args)
    if args.data != "digits":
        need_model(parser, args)
        if args.small:
            parser.error(
                "--small is for the digits; with --data, --limit and --epochs make a run short"
            )
        defaults = {"img_size": 224, "epochs": 400, "batch_size": 256, "lr": 0.1}
    fill_in(args, defaults)
    fill_in(
        args,
        {
            "model": "test_resnet",
            "times": [args.epochs * share // 4 for share in range(5)],
        },
    )
    args.times = sorted({*args.times})
    if len(args.times) < 2 or args.times[-1] > args.epochs:
        parser.error(
            f"--times: expected at least two, none above --epochs {args.epochs}, got {args.times}"
        )
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
