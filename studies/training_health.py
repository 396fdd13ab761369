r"""Training health: the signs that recordings show in trainings that go well,
and in trainings that are made ill.

    python studies/training_health.py
    python studies/training_health.py --data cifar10-jpeg --limit 8000 --seeds 1 \
        --out results/photos

The first takes five minutes on one CPU core, the second half an hour.

What one should see (training_health.png): queries and keys that are scaled up, a learning rate that
jumps, and a head whose values are cut, raise alarms at the epoch in which this is done. A learning
rate that is ten times too high, without warm-up, raises them in the first epochs. None of these is
named later than the validation loss rises by a tenth, if it does. Healthy trainings raise fewer
than one alarm each. Shuffled labels raise none: attention does not tell whether labels are right,
but the validation loss does.

How: small networks of several kinds (ViTs with a class token, with registers, with the mean of the
patches and with qk-norm, a Swin, a CaiT with talking heads, and on photographs a T-CNN) learn
handwritten digits of 8 x 8 pixels, or small photographs of one size, and every epoch is recorded
with ``health=True``. Ill ones are ViTs:

learning rate            ten times too high, without warm-up, from the start
rate jumps               30 times as high from the middle of the training on, as when one resumes
                         with a wrong rate
scaled queries and keys  six times as large in all blocks, once, in the middle
growing queries and keys three times as large in all blocks before each epoch from the middle on
cut head                 values of a head of the second block are zero from the middle on
qk-norm                  as "learning rate", with qk-norm
shuffled labels          from the start
rate tripled             three times too high, with warm-up, from the start
no warm-up               the rate that works, from the first step
weight decay             100 times as strong, from the start
precision                weights are rounded to bfloat16 after each step, from the start
label noise              four of ten labels are drawn at random, from the start

Scaled and growing queries and keys and the cut head set the variables that signs watch: that they
are named shows that signs measure what they say. All others are ills of training. The last five
were added later, and chosen before any run of them was seen. They are mild, as those are that one
meets: whether they are named is asked, not checked.

An alarm counts from the epoch in which the illness begins; an earlier one is a false alarm, as is
any alarm of a healthy training. Alarms are those of which the recorder warns at their epoch,
without knowledge of later epochs.

Writes into results/:
training_health.png        the validation loss of each training, and its first alarm
training_health_signs.png  for each sign the variable that shows it, in a healthy training and in
                           the first ill one
training_health.zarr       losses, the epoch of the first alarm and the number of alarms by
                           (training, epoch)
training_health_runs       the recording of each training: tcnn-probe health

It ends by checking that each of the first five illnesses is named, not later than the validation
loss rises by a tenth, and that healthy trainings raise fewer than one alarm each.
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
from timm.models.cait import Cait
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import tcnn_model
import tcnn_probe
from common.figures import STYLE, whole_ticks
from common.health_panels import draw_pictures, find_examples
from common.option_table import SEED_OPTION, image_set_options, small_option
from common.options import Option, from_least, parse_options
from common.output import RunOutput, ended, finish
from common.small_images import ImageSet, load_image_set
from common.stepwise import noisy, take_steps
from tcnn_probe.diagnosis import Finding

# A width that three heads divide; large enough to learn the digits in the epochs of the study.
DIM, DEPTH, HEADS = 48, 3, 3
VITS = {
    "class token": {},
    "registers": {"reg_tokens": 2},
    "mean": {"class_token": False, "global_pool": "avg"},
    "qk-norm": {"qk_norm": True},
}
"""Kinds of ViTs, with their options."""
KINDS = (*VITS, "Swin", "CaiT")
ILLNESSES = (
    "healthy",
    "learning rate",
    "rate jumps",
    "scaled queries and keys",
    "growing queries and keys",
    "cut head",
    "qk-norm",
    "shuffled labels",
    "rate tripled",
    "no warm-up",
    "weight decay",
    "precision",
    "label noise",
)
LATER = ILLNESSES[2:6]
"""Illnesses that begin in the middle of the training; the others begin at its start."""
RATES = {"learning rate": 10, "qk-norm": 10, "rate tripled": 3}
"""Factors of the learning rate."""
WITHOUT_WARMUP = ("learning rate", "qk-norm", "no warm-up")
SHORT_NAMES = {
    "learning rate": "rate too high",
    "qk-norm": "rate too high, qk-norm",
    "cut head": "a head cut",
    "growing queries and keys": "growing q and k",
}
"""Titles of panels that have room for few words only."""
NAMED = ILLNESSES[1:6]
"""Illnesses that must be named; whether the others are is asked, not checked."""


@dataclass(frozen=True)
class Training:
    """A training: its architecture, what is done to it, and its seed."""

    kind: str
    illness: str
    seed: int

    # The name has no blanks, because it becomes that of a folder.
    @property
    def name(self) -> str:
        """Name of the recording."""
        return f"{self.illness}, {self.kind}, {self.seed}".replace(" ", "-")

    def begin(self, epochs: int) -> int:
        """Return the first epoch that ends with the illness; 1 for a healthy training."""
        return epochs // 2 + 1 if self.illness in LATER else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    output = RunOutput.from_args(args, "training_health")
    data = load_image_set(args.data, args.limit, output.beside("_images"))
    trainings = plan(args)
    folder = output.beside("_runs")
    recordings = {}
    for number, training in enumerate(trainings, 1):
        store = folder / f"{training.name}.zarr"
        recordings[training] = train(training, data, args, store)
        print(f"{number} of {len(trainings)}: {training.name}", flush=True)
    rows = [result(t.begin(args.epochs), ds) for t, ds in recordings.items()]
    kinds = {
        name: ("training", np.array([getattr(t, name) for t in trainings], dtype=object))
        for name in ("illness", "kind")
    }
    seeds = "training", [training.seed for training in trainings]
    results = xr.concat(rows, "training").assign_coords({**kinds, "seed": seeds})
    output.save(results)
    examples = find_examples(beside_healthy(recordings))
    draw_pictures(examples).savefig(output.beside("_signs.png"), dpi=150)
    output.show(draw(results, args.epochs), table(results))
    return finish(check(results), args)


def plan(args: argparse.Namespace) -> list[Training]:
    """List the trainings: healthy ones of every kind, and each illness with every seed."""
    # A CNN needs more pixels than the digits have.
    kinds = KINDS if args.data == "digits" else (*KINDS, "T-CNN")
    seeds = range(args.seed, args.seed + args.seeds)
    trainings = [
        Training(kinds[number % len(kinds)], "healthy", args.seed + number)
        for number in range(args.healthy)
    ]
    for seed in seeds:
        # The small form leaves out those that are not checked.
        for illness in NAMED if args.small else ILLNESSES[1:]:
            kind = "qk-norm" if illness == "qk-norm" else "class token"
            trainings.append(Training(kind, illness, seed))
    return trainings


def beside_healthy(
    recordings: Mapping[Training, xr.Dataset],
) -> Iterator[tuple[str, xr.Dataset, xr.Dataset]]:
    """Yield name and recording of each ill training,
    and the recording of the first healthy one of its kind.
    """
    healthy: dict[str, xr.Dataset] = {}
    for training, ds in recordings.items():
        if training.illness == "healthy":
            healthy.setdefault(training.kind, ds)
        elif training.kind in healthy:
            title = SHORT_NAMES.get(training.illness, training.illness)
            yield title, ds, healthy[training.kind]


def network(kind: str, data: ImageSet) -> nn.Module:
    """Return an untrained network of a kind for images of this size."""
    side = data.images.shape[-1]
    channels = data.images.shape[1]
    if kind == "T-CNN":
        cnn = ResNet(BasicBlock, (1, 1, 1, 1), 10, channels, channels=(8, 16, 32, DIM))
        return tcnn_model.reparameterize(cnn)
    shape = {"img_size": side, "patch_size": data.patch, "in_chans": channels}
    shape |= {"num_classes": 10}
    if kind == "Swin":
        # The first of two stages has half of the width, so that the second has that of the other
        # networks.
        return SwinTransformer(
            **shape,
            embed_dim=DIM // 2,
            depths=(2, 2),
            num_heads=(2, 4),
            window_size=side // data.patch // 2,
        )
    shape |= {"embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS}
    if kind == "CaiT":
        # The published initial values are for 24 blocks and hundreds of epochs.
        return Cait(**shape, init_values=0.1, depth_token_only=1)
    # Most kinds of ViTs classify by their class token.
    return VisionTransformer(**shape, **{"class_token": True, "global_pool": "token", **VITS[kind]})


def train(training: Training, data: ImageSet, args: argparse.Namespace, store: Path) -> xr.Dataset:
    """Train and record, or read what was recorded."""
    # The untrained network is marked too, as epoch 0.
    expected = args.epochs + 1
    if store.exists():
        ds = xr.open_zarr(store)
        if ds.sizes["epoch"] == expected:
            return ds.load()
    torch.manual_seed(training.seed)
    model = network(training.kind, data).to(args.device)
    illness, labels = training.illness, data.labels
    rate = RATES.get(illness, 1) * data.rate
    decay = 5.0 if illness == "weight decay" else 0.05
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    # Labels change once: labels that change with the epoch could not even be learned by heart.
    if illness == "shuffled labels":
        labels = labels[torch.randperm(len(labels))]
    if illness == "label noise":
        is_noisy = torch.rand(len(labels)) < 0.4
        # There are ten classes.
        labels = torch.where(is_noisy, torch.randint(10, labels.shape), labels)
    steps = math.ceil(len(labels) / data.batch)
    # The warm-up takes two epochs; a rate that is ten times too high does harm at once only without
    # it.
    warmup = 0 if illness in WITHOUT_WARMUP else 2 * steps
    begin = training.begin(args.epochs)
    total = 0.0

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(1, args.epochs + 1):
            if epoch >= begin and illness == "growing queries and keys":
                # Logits grow ninefold at each epoch, while "scaled queries and keys" makes them 36
                # times as large once.
                scale_up(model, 3)
            if epoch == begin and illness == "scaled queries and keys":
                scale_up(model, 6)
            for rows in torch.randperm(len(labels)).split(data.batch):
                yield noisy(data.images[rows]).to(args.device), labels[rows].to(args.device)

    def lr(step: int, _: object) -> float:
        wave = 0.5 + 0.5 * math.cos(math.pi * step / (args.epochs * steps))
        jump = 30 if illness == "rate jumps" and step // steps + 1 >= begin else 1
        return jump * rate * wave * min(1, (step + 1) / max(1, warmup))

    def loss_of(images: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.train()(images), targets)

    with (
        warnings.catch_warnings(),
        tcnn_probe.record(model, store, mode="w", health=True) as recorder,
    ):
        # The recorder warns of alarms, which the study reads off the recording instead.
        warnings.simplefilter("ignore", RuntimeWarning)

        def after(step: int, loss: Tensor) -> None:
            nonlocal total
            total += loss.item()
            # Values are cut after each step, as the optimizer would bring them back.
            if illness == "cut head" and step > (begin - 1) * steps:
                cut(model)
            if illness == "precision":
                round_weights(model)
            if step % steps == 0:
                mark(recorder, model, data, step // steps, total / steps, args.device)
                total = 0.0

        # The untrained network has no training loss.
        mark(recorder, model, data, 0, math.nan, args.device)
        take_steps(optimizer, batches(), loss_of, lr, after=after)
        return recorder.dataset.load()


@torch.no_grad()
def mark(
    recorder: tcnn_probe.Recorder,
    model: nn.Module,
    data: ImageSet,
    epoch: int,
    train_loss: float,
    device: torch.device,
) -> None:
    """Validate, and mark the epoch."""
    model.eval()
    # Batches of 250, so that a large validation set fits into memory.
    batches = data.validation.split(250)
    output = torch.cat([model(images.to(device)).cpu() for images in batches])
    loss = F.cross_entropy(output, data.validation_labels).item()
    top1 = (output.argmax(1) == data.validation_labels).float().mean().item()
    recorder.mark(epoch=epoch, train_loss=train_loss, val_loss=loss, top1=top1)


@torch.no_grad()
def scale_up(model: VisionTransformer, factor: float) -> None:
    """Multiply the queries and keys of all blocks, so that logits grow by the factor's square."""
    width = model.embed_dim
    for block in model.blocks:
        # timm's rows are queries, keys and values, in this order.
        block.attn.qkv.weight[: 2 * width] *= factor
        block.attn.qkv.bias[: 2 * width] *= factor


@torch.no_grad()
def cut(model: VisionTransformer) -> None:
    """Set the values of the first head of the second block to zero."""
    attention, width = model.blocks[1].attn, model.embed_dim
    values = slice(2 * width, 2 * width + attention.head_dim)
    attention.qkv.weight[values] = 0
    attention.qkv.bias[values] = 0


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Round all parameters to bfloat16, as if they were kept in it."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def result(begin: int, ds: xr.Dataset) -> xr.Dataset:
    """Return losses by epoch, the first alarm and the first rise
    of the validation loss by a tenth; NaN for none.

    Args:
        begin: Epoch in which the illness begins; alarms before it are counted apart.
        ds: Recording.
    """
    alarms = warned_of(ds)
    named = [alarm for alarm in alarms if alarm.since >= begin]
    first = min((alarm.since for alarm in named), default=math.nan)
    signs = sorted({alarm.sign for alarm in named if alarm.since == first})
    loss = ds.val_loss.values
    # Losses do not fall evenly, so that only a tenth above the lowest so far counts as a rise.
    risen = ds.epoch.values[loss > 1.1 * np.minimum.accumulate(loss)]
    risen = risen[risen >= begin]
    return ds[["train_loss", "val_loss", "top1"]].assign(
        alarms=len(alarms),
        early_alarms=len(alarms) - len(named),
        first_alarm=float(first),
        first_rise=float(risen[0]) if risen.size else math.nan,
        signs=((), np.array(", ".join(signs), dtype=object)),
    )


def warned_of(ds: xr.Dataset) -> list[Finding]:
    """Return all alarms in the order in which the recorder warns of them,
    each as it is at its first epoch.
    """
    alarms = []
    for marks in range(1, ds.sizes["epoch"] + 1):
        so_far = ds.isel(epoch=slice(marks))
        epoch = so_far.epoch.values[-1]
        current = tcnn_probe.health(so_far).alarms
        alarms += [alarm for alarm in current if alarm.since == epoch]
    return alarms


@mpl.rc_context(STYLE)
def draw(results: xr.Dataset, epochs: int) -> Figure:
    """Draw a panel for each illness: validation losses,
    a point at the first alarm, a line where it begins.
    """
    figure = Figure(figsize=(12, 7), layout="constrained")
    # Twelve illnesses, and the healthy trainings.
    panels = figure.subplots(3, 5, sharex=True, sharey=True).ravel()
    for panel in panels[len(ILLNESSES) :]:
        panel.set_visible(False)
    for panel, illness in zip(panels, ILLNESSES, strict=False):
        rows = results.isel(training=results.illness.values == illness)
        for number in range(rows.sizes["training"]):
            row = rows.isel(training=number)
            panel.plot(row.epoch, row.val_loss, lw=1)
            if np.isfinite(row.first_alarm):
                loss = row.val_loss.sel(epoch=int(row.first_alarm))
                panel.plot(row.first_alarm, loss, "v", color="#D55E00")
        if illness in LATER:
            panel.axvline(epochs // 2 + 1, color="0.7", lw=0.8, zorder=0)
        panel.set(title=illness, xlabel="epoch", ylabel="validation loss")
        whole_ticks(panel)
        panel.label_outer()
    # The last row is not full.
    for panel in panels[len(ILLNESSES) - 5 : len(ILLNESSES)]:
        panel.set_xlabel("epoch")
        panel.tick_params(labelbottom=True)
    figure.supxlabel("triangle: first alarm; line: onset of the illness", fontsize=8)
    return figure


def table(results: xr.Dataset) -> str:
    """Return a line for each training."""
    lines = [
        f"{'training':48}{'top-1':>7}{'alarms':>8}{'early':>7}{'first':>7}{'loss +10 %':>12}  signs"
    ]
    for number in range(results.sizes["training"]):
        row = results.isel(training=number)
        name = f"{row.illness.item()}, {row.kind.item()}, seed {row.seed.item()}"
        first, rise = (f"{float(row[name]):g}" for name in ("first_alarm", "first_rise"))
        lines.append(
            f"{name:48}{float(row.top1[-1]):7.2f}{int(row.alarms):8}{int(row.early_alarms):7}"
            f"{first.replace('nan', '-'):>7}"
            f"{rise.replace('nan', '-'):>12}  {row.signs.item()}"
        )
    return "\n".join(lines)


def check(results: xr.Dataset) -> bool:
    """Check that illnesses are named in time,
    and that healthy trainings raise fewer than one alarm each.
    """
    is_named = []
    for illness in NAMED:
        rows = results.isel(training=results.illness.values == illness)
        in_time = np.isfinite(rows.first_alarm) & ~(rows.first_alarm > rows.first_rise)
        is_named.append(bool(in_time.all()))
        # Comparisons with NaN, which stands for no alarm or no rise, are False.
        risen, sooner = np.isfinite(rows.first_rise), rows.first_alarm < rows.first_rise
        print(
            f"check: {illness}: named in time in {int(in_time.sum())} of {len(in_time)}; the "
            f"validation loss rose by a tenth in {int(risen.sum())}, after the alarm in "
            f"{int(sooner.sum())}"
        )
    healthy = results.isel(training=results.illness.values == "healthy").alarms
    print(
        f"check: {int(healthy.sum())} alarms in {healthy.size} healthy trainings, at most "
        f"{int(healthy.max())} in one; {int(results.early_alarms.sum())} in ill ones before their "
        "illness"
    )
    return all(is_named) and float(healthy.mean()) < 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = [
        Option("--epochs", "epochs of each training", from_least(3), 10, small=3),
        Option("--healthy", "healthy trainings", from_least(1), 10, small=1),
        Option("--seeds", "trainings of each illness, from --seed on", from_least(1), 3, small=1),
        *image_set_options(small=240),
        SEED_OPTION,
        small_option(
            "240 digits, 3 epochs, 1 healthy training, 1 of each illness that must be named"
        ),
    ]
    return parse_options(__doc__, "training_health", arguments, {"training": options})


if __name__ == "__main__":
    sys.exit(ended(main))
