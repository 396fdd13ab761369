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
from common.figures import STYLE, add_letters, ordered_colors, whole_ticks
from common.option_table import (
    AUGMENT_OPTION,
    SEED_OPTION,
    device_option,
    machine_options,
    small_option,
)
from common.options import Option, from_least, need_model, parse_options, positive_number
from common.output import InputError, RunOutput, ended, finish, refused
from common.verdicts import learned
from tcnn_model.training.command import train
from tcnn_model.training.config import Config, recipe_settings

MEASURES = ("top1", "val_loss", "train_loss", "train_top1")


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    output = RunOutput.from_args(args, "when_to_reparameterize")

    # Train each run with the library's own command, or resume it.
    runs = [train_run(args, output, t1) for t1 in args.times]
    scores = xr.concat(runs, "t1", join="outer")
    # All runs have the same validation images, but recordings without heads do not count them.
    scores["images"] = scores.images.max()

    output.save(scores)
    output.show(draw(scores), table(scores))
    return finish(check(scores), args)


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
    b.legend(title="t1")
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
    model_and_data = [
        Option("--model", "timm name of a CNN (default: test_resnet, a small one)"),
        Option(
            "--data",
            "folder with train/ and val/, and in each a folder for every class",
            default="digits",
        ),
        Option(
            "--img-size", "height and width of the images", from_least(1), 64, small=48, data=224
        ),
        Option(
            "--limit",
            "number of training images, and as many to validate on (default: all)",
            from_least(4),
            small=64,
            data=None,
        ),
    ]
    training = [
        Option("--epochs", "epochs in all, t1 + t2", from_least(2), 12, small=2, data=400),
        Option(
            "--times",
            "values of t1 (default: 0, 1/4, 1/2, 3/4 and all of --epochs)",
            from_least(0),
            lambda args: [args.epochs * share // 4 for share in range(5)],
            # One run that becomes a T-CNN, and the CNN.
            small=[1, 2],
            nargs="+",
        ),
        Option("--batch-size", "images per step", from_least(1), 32, small=16, data=256),
        Option("--lr", "peak learning rate", positive_number, 0.1),
        AUGMENT_OPTION,
        device_option(),
        *machine_options(),
        SEED_OPTION,
        small_option("few small images, 2 runs of 2 epochs", only="digits"),
    ]
    groups = {"model and data": model_and_data, "training": training}
    args = parse_options(__doc__, "when_to_reparameterize", arguments, groups, need_model)
    args.model = args.model or "test_resnet"
    args.times = sorted({*args.times})
    if len(args.times) < 2 or args.times[-1] > args.epochs:
        raise InputError(
            f"--times: expected at least two, none above --epochs {args.epochs}, got {args.times}"
        )
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
