"""Health: the signs that recordings show in trainings that go well, and in trainings that are made ill.

    python studies/training_health.py

Takes two minutes on one CPU core.

What one should see (training_health.png): queries and keys that are scaled up, and a head whose values are cut, raise
alarms at the epoch in which that is done. A learning rate that is ten times too high, without warm-up, raises them in
the first epochs, long before the validation loss shows it, if it shows it at all. Healthy trainings raise fewer than
one alarm each. Shuffled labels raise none: attention does not tell what the labels are worth, the validation loss does.

How: small ViTs of four kinds (class token, registers, mean of the patches, qk-norm) learn handwritten digits of 8 x 8
pixels, and every epoch is recorded with ``health=True``. In the middle of a training the queries and keys of all blocks
are scaled up six times, or the values of one head of the second block are set to zero and kept there. "Learning rate"
and "qk-norm" are trained alike, at a rate ten times too high and without warm-up, the latter with qk-norm.

Writes into results/:
training_health.png        the validation loss of each training, and its first alarm
training_health_signs.png  for each sign the variable that shows it, in a healthy training and in the first ill one
training_health.zarr       losses, the epoch of the first alarm and the number of alarms by (training, epoch)
training_health_runs       the recording of each training: tcnn-probe health

It ends by checking that each of the provoked illnesses but shuffled labels is named, not later than the validation loss
rises by a tenth, and that healthy trainings raise fewer than one alarm each.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.figure import Figure
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import tcnn_probe
from common.digits import plain_digits
from common.ending import ended, finish
from common.health_panels import draw_pictures, find_examples
from common.options import (
    add_machine,
    add_output,
    fill_in,
    from_least,
    parsed,
    study_parser,
)
from common.output import RunOutput

BATCH, LR, SIDE, DIM = 96, 3e-3, 8, 48
KINDS = {
    "class token": {},
    "registers": {"reg_tokens": 2},
    "mean": {"class_token": False, "global_pool": "avg"},
    "qk-norm": {"qk_norm": True},
}
ILLNESSES = (
    "healthy",
    "learning rate",
    "scaled queries and keys",
    "cut head",
    "qk-norm",
    "shuffled labels",
)
SHORT_NAMES = {
    "learning rate": "rate too high",
    "qk-norm": "rate too high, qk-norm",
    "cut head": "a head cut",
}
"""Titles of panels in which there is room for few words."""
NAMED = ILLNESSES[1:4]
"""Illnesses that are to be named. Whether qk-norm helps is asked, not checked; labels do not show in attention."""


@dataclass(frozen=True)
class Training:
    """A training: its architecture, what is done to it, and its seed."""

    kind: str
    illness: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its recording."""
        return f"{self.illness}, {self.kind}, {self.seed}".replace(" ", "-")


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 if it saw what it stands for, 3 if not."""
    args = parse(arguments)
    output = RunOutput.from_args(args, "training_health")
    trainings = plan(args)
    folder = output.beside("_runs")
    recordings = {}
    for number, training in enumerate(trainings, 1):
        store = folder / f"{training.name}.zarr"
        recordings[training] = train(training, args, store)
        print(f"{number} of {len(trainings)}: {training.name}", flush=True)
    labels = {
        "illness": [training.illness for training in trainings],
        "kind": [training.kind for training in trainings],
        "seed": [training.seed for training in trainings],
    }
    rows = [result(ds) for ds in recordings.values()]
    results = xr.concat(rows, "training").assign_coords(
        {
            name: ("training", np.array(values, dtype=object))
            if name != "seed"
            else ("training", values)
            for name, values in labels.items()
        }
    )
    output.save(results)
    draw(results, args.epochs).savefig(output.figure, dpi=200)
    examples = find_examples(beside_healthy(recordings))
    draw_pictures(examples).savefig(output.beside("_signs.png"), dpi=150)
    print(table(results))
    print(f"wrote {output.store} and {output.figure}")
    return finish(check(results), "digits")


def plan(args: argparse.Namespace) -> list[Training]:
    """List the trainings: healthy ones of every kind, and each illness with every seed."""
    kinds, seeds = list(KINDS), range(args.seed, args.seed + args.seeds)
    trainings = [
        Training(kinds[number % len(kinds)], "healthy", args.seed + number)
        for number in range(args.healthy)
    ]
    for illness in ILLNESSES[1:]:
        # Only this illness asks what an architecture changes; the others keep the commonest.
        kind = "qk-norm" if illness == "qk-norm" else "class token"
        trainings += [Training(kind, illness, seed) for seed in seeds]
    return trainings


def beside_healthy(
    recordings: Mapping[Training, xr.Dataset],
) -> Iterator[tuple[str, xr.Dataset, xr.Dataset]]:
    """Yield name and recording of each ill training, and the recording of the first healthy one of its kind."""
    healthy: dict[str, xr.Dataset] = {}
    for training, ds in recordings.items():
        if training.illness == "healthy":
            healthy.setdefault(training.kind, ds)
        elif training.kind in healthy:
            title = SHORT_NAMES.get(training.illness, training.illness)
            yield title, ds, healthy[training.kind]


def train(training: Training, args: argparse.Namespace, store: Path) -> xr.Dataset:
    """Train and record, or read what was recorded."""
    # The untrained network is marked too, as epoch 0.
    expected = args.epochs + 1
    if store.exists():
        ds = xr.open_zarr(store)
        if ds.sizes["epoch"] == expected:
            return ds.load()
    torch.manual_seed(training.seed)
    options = {"class_token": True, "global_pool": "token", **KINDS[training.kind]}
    # 4 x 4 patches and heads of 16 channels: a forward of milliseconds, so that all trainings fit into minutes.
    model = VisionTransformer(
        img_size=SIDE,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=DIM,
        depth=3,
        num_heads=3,
        **options,
    ).to(args.device)
    is_too_fast = training.illness in ("learning rate", "qk-norm")
    rate = 10 * LR if is_too_fast else LR
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    images, labels = plain_digits(training=True)
    if training.illness == "shuffled labels":
        # Once, before the training: labels that changed by epoch could not even be learned by heart.
        labels = labels[torch.randperm(len(labels))]
    steps = math.ceil(len(images) / BATCH)
    warmup = 0 if is_too_fast else 2 * steps
    with (
        warnings.catch_warnings(),
        tcnn_probe.record(model, store, mode="w", health=True) as recorder,
    ):
        # The alarms, which the study is about; they are read off the recording.
        warnings.simplefilter("ignore", RuntimeWarning)
        # The untrained network has no training loss.
        mark(recorder, model, 0, math.nan, args.device)
        for epoch in range(args.epochs):
            if (
                training.illness == "scaled queries and keys"
                and epoch == args.epochs // 2
            ):
                scale_up(model)
            total = 0.0
            for step, batch in enumerate(torch.randperm(len(images)).split(BATCH)):
                done = epoch * steps + step
                wave = 0.5 + 0.5 * math.cos(math.pi * done / (args.epochs * steps))
                for group in optimizer.param_groups:
                    group["lr"] = rate * wave * min(1, (done + 1) / max(1, warmup))
                # Pixels have 17 values, and some 1,400 images are learned by heart; noise makes each visit a new image.
                noisy = images[batch] + 0.1 * torch.randn(len(batch), 1, SIDE, SIDE)
                model.train()
                output = model(noisy.to(args.device))
                loss = F.cross_entropy(output, labels[batch].to(args.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
                # After each step, as the optimizer would bring the values back.
                if training.illness == "cut head" and epoch >= args.epochs // 2:
                    cut(model)
            mark(recorder, model, epoch + 1, total / steps, args.device)
        return recorder.dataset.load()


@torch.no_grad()
def mark(
    recorder: tcnn_probe.Recorder,
    model: nn.Module,
    epoch: int,
    train_loss: float,
    device: torch.device,
) -> None:
    """Validate, and mark the epoch."""
    images, labels = plain_digits(training=False)
    model.eval()
    output = model(images.to(device)).cpu()
    loss = F.cross_entropy(output, labels).item()
    top1 = (output.argmax(1) == labels).float().mean().item()
    recorder.mark(epoch=epoch, train_loss=train_loss, val_loss=loss, top1=top1)


@torch.no_grad()
def scale_up(model: VisionTransformer) -> None:
    """Make the queries and keys of all blocks six times as large, so that logits grow 36 times."""
    for block in model.blocks:
        # timm's rows are queries, keys and values, in this order.
        block.attn.qkv.weight[: 2 * DIM] *= 6
        block.attn.qkv.bias[: 2 * DIM] *= 6


@torch.no_grad()
def cut(model: VisionTransformer) -> None:
    """Set the values of the first head of the second block to zero."""
    attention = model.blocks[1].attn
    values = slice(2 * DIM, 2 * DIM + DIM // 3)
    attention.qkv.weight[values] = 0
    attention.qkv.bias[values] = 0


def result(ds: xr.Dataset) -> xr.Dataset:
    """Return losses by epoch, the first alarm and the first rise of the validation loss by a tenth; NaN for none."""
    alarms = tcnn_probe.health(ds).alarms
    first = min((alarm.since for alarm in alarms), default=math.nan)
    signs = sorted({alarm.sign for alarm in alarms if alarm.since == first})
    loss = ds.val_loss.values
    # Losses do not fall evenly: only a tenth above the lowest so far counts as a rise.
    risen = np.flatnonzero(loss > 1.1 * np.minimum.accumulate(loss))
    return ds[["train_loss", "val_loss", "top1"]].assign(
        alarms=len(alarms),
        first_alarm=float(first),
        first_rise=float(ds.epoch[risen[0]]) if risen.size else math.nan,
        signs=((), np.array(", ".join(signs), dtype=object)),
    )


@mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
def draw(results: xr.Dataset, epochs: int) -> Figure:
    """Draw a panel for each illness: validation losses, a point at the first alarm, a line where it begins."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for panel, illness in zip(panels, ILLNESSES, strict=False):
        rows = results.isel(training=results.illness.values == illness)
        for number in range(rows.sizes["training"]):
            row = rows.isel(training=number)
            panel.plot(row.epoch, row.val_loss, lw=1)
            if np.isfinite(row.first_alarm):
                loss = row.val_loss.sel(epoch=int(row.first_alarm))
                panel.plot(row.first_alarm, loss, "v", color="#D55E00")
        if illness in ("scaled queries and keys", "cut head"):
            # Epochs are counted from 0 in training, and an epoch's mark has the next number.
            panel.axvline(epochs // 2 + 1, color="0.7", lw=0.8, zorder=0)
        panel.set(title=illness, xlabel="epoch", ylabel="validation loss")
        panel.label_outer()
    figure.supxlabel("triangle: first alarm; line: begin of the illness", fontsize=8)
    return figure


def table(results: xr.Dataset) -> str:
    """Write a line for each training."""
    lines = [
        f"{'training':42}{'top-1':>7}{'alarms':>8}{'first':>7}{'loss +10 %':>12}  signs"
    ]
    for number in range(results.sizes["training"]):
        row = results.isel(training=number)
        name = f"{row.illness.item()}, {row.kind.item()}, seed {row.seed.item()}"
        first, rise = (
            f"{float(row[name]):g}" for name in ("first_alarm", "first_rise")
        )
        lines.append(
            f"{name:42}{float(row.top1[-1]):7.2f}{int(row.alarms):8}{first.replace('nan', '-'):>7}"
            f"{rise.replace('nan', '-'):>12}  {row.signs.item()}"
        )
    return "\n".join(lines)


def check(results: xr.Dataset) -> bool:
    """Check that illnesses are named in time, and that healthy trainings raise fewer than one alarm each."""
    is_named = []
    for illness in NAMED:
        rows = results.isel(training=results.illness.values == illness)
        # The negation also holds where the loss never rises and the epoch of its rise is NaN.
        in_time = np.isfinite(rows.first_alarm) & ~(rows.first_alarm > rows.first_rise)
        is_named.append(bool(in_time.all()))
        print(
            f"check: {illness}: named not later than by the validation loss in {int(in_time.sum())} of {len(in_time)}"
        )
    healthy = results.isel(training=results.illness.values == "healthy").alarms
    print(
        f"check: {int(healthy.sum())} alarms in {healthy.size} healthy trainings, at most {int(healthy.max())} in one"
    )
    return all(is_named) and float(healthy.mean()) < 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = study_parser(__doc__)
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--epochs", type=from_least(4), help="of each training (default: 10)")
    add("--healthy", type=from_least(1), help="healthy trainings (default: 10)")
    add(
        "--seeds",
        type=from_least(1),
        help="trainings of each illness, from --seed on (default: 3)",
    )
    add_machine(group, small="1 healthy training, 1 of each illness, 4 epochs")
    add_output(parser)
    args = parsed(parser, arguments, "training_health")
    if args.small:
        fill_in(args, {"healthy": 1, "seeds": 1, "epochs": 4})
    fill_in(args, {"healthy": 10, "seeds": 3, "epochs": 10})
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
