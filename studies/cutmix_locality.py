r"""CutMix: whether it makes the heads of the first layer local (Santiago Toledo and Martínez, arXiv
2605.16390).

    python studies/cutmix_locality.py
    python studies/cutmix_locality.py --data cifar10-jpeg --limit 8000 --epochs 20 \
        --out results/photos

The first takes four minutes on one CPU core, the second about fifteen.

The paper trains ViTs on CIFAR-100 from scratch: with CutMix the most local head of the early layers
ends at a mean attention distance of at most 0.024, without it of at least 0.210.

What one should see (cutmix_locality.png): no outcome in particular, since the study asks a
question. It prints the difference between trainings with CutMix and without at the end, and draws
it by epoch, with its interval over seeds, and says "undecided" where the interval contains zero.

How: small ViTs learn handwritten digits of 8 x 8 pixels, in patches of 2 x 2 pixels, so on a grid
of 4 x 4; or photographs of a folder, in patches of 4 x 4, flipped at random in both arms. Each seed
gives a network that is trained twice from the same weights: on the images as they are, and with
CutMix (timm's Mixup, alpha 1, of every batch). Both see the same number of images. Distances and
entropies of the first layer's heads are given as shares of those of uniform attention: 1 if a head
looks everywhere alike.

Writes into results/:
cutmix_locality.png    top: the distance of the most local head, the mean distance and the mean
                       entropy of the first layer by epoch, a line for each training; bottom: CutMix
                       minus plain, with 95 % t intervals
cutmix_locality.zarr   distances and entropies by (arm, seed, epoch, layer, head), accuracies:
                       xarray.open_zarr
cutmix_locality_runs   the recording of each training

It ends by checking that all networks learned.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from timm.data.mixup import Mixup
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import tcnn_probe
from common.figures import STYLE, whole_ticks
from common.option_table import SEED_OPTION, image_set_options, small_option
from common.options import Option, from_least, parse_options
from common.output import RunOutput, ended, finish, seeds_of
from common.small_images import ImageSet, load_image_set
from common.stepwise import noisy, shuffled_rows, take_steps, warm_up_and_anneal
from common.verdicts import compared, difference, learned
from tcnn_probe.evaluation import mean_interval

BATCH, LR, WEIGHT_DECAY = 96, 2e-3, 0.05
ARMS = {"plain": "#0072B2", "CutMix": "#D55E00"}
"""Arms with their colours."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    output = RunOutput.from_args(args, "cutmix_locality")
    data = load_image_set(args.data, args.limit, output.beside("_images"))
    folder = output.beside("_runs")
    arms = []
    for arm in ARMS:
        runs = []
        for seed in seeds_of(args):
            store = folder / f"{arm}-{seed}.zarr"
            runs.append(shares(train(arm, seed, data, args, store)))
            print(f"{arm}, seed {seed}: accuracy {runs[-1].top1[-1]:.2f}", flush=True)
        arms.append(xr.concat(runs, xr.Variable("seed", list(seeds_of(args)))))
    results = xr.concat(arms, xr.Variable("arm", np.array(list(ARMS), dtype=object)))
    output.save(results)
    measures = first_layer(results)
    output.show(draw(measures), table(measures))
    return finish(check(results, data), args)


def train(arm: str, seed: int, data: ImageSet, args: argparse.Namespace, store: Path) -> xr.Dataset:
    """Train and record, or read what was recorded."""
    if store.exists():
        ds = xr.open_zarr(store)
        # A training that was interrupted has fewer epochs, and starts anew.
        if ds.sizes["epoch"] == args.epochs + 1:
            return ds.load()
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (timm's Mixup draws from it)
    model = VisionTransformer(
        img_size=data.images.shape[-1],
        patch_size=data.patch,
        in_chans=data.images.shape[1],
        num_classes=10,
        embed_dim=48,
        depth=3,
        num_heads=3,
    ).to(args.device)
    # timm's Mixup smooths labels by default, which is switched off because the plain arm has no
    # smoothing.
    mix = Mixup(mixup_alpha=0, cutmix_alpha=1, label_smoothing=0, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    # The last batch of an epoch would be smaller, and odd: CutMix takes images in pairs.
    per_epoch = len(data.images) // BATCH
    steps = args.epochs * per_epoch

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in shuffled_rows(len(data.images), BATCH, args.epochs):
            batch, labels = noisy(data.images[rows]), data.labels[rows]
            if args.data != "digits":
                is_flipped = (torch.rand(len(rows)) < 0.5)[:, None, None, None]
                batch = torch.where(is_flipped, batch.flip(-1), batch)
            # Both arms give class probabilities to the loss, so that they differ in CutMix alone.
            yield mix(batch, labels) if arm == "CutMix" else (batch, F.one_hot(labels, 10).float())

    def loss_of(batch: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.train()(batch.to(args.device)), target.to(args.device))

    with tcnn_probe.record(model, store, mode="w") as recorder:

        def after(step: int, *_: object) -> None:
            if step % per_epoch == 0:
                validate(recorder, model, data, step // per_epoch, args.device)

        after(0)
        take_steps(optimizer, batches(), loss_of, warm_up_and_anneal(LR, steps), after=after)
        return recorder.dataset.load()


@torch.no_grad()
def validate(
    recorder: tcnn_probe.Recorder,
    model: nn.Module,
    data: ImageSet,
    epoch: int,
    device: torch.device,
) -> None:
    """Validate on images that are not mixed, and mark the epoch."""
    model.eval()
    batches = data.validation.split(500)
    classes = torch.cat([model(images.to(device)).argmax(1).cpu() for images in batches])
    top1 = (classes == data.validation_labels).float().mean().item()
    recorder.mark(epoch=epoch, top1=top1)


def shares(ds: xr.Dataset) -> xr.Dataset:
    """Return distances and entropies (epoch, layer, head)
    as shares of those of uniform attention, and accuracies.
    """
    return xr.Dataset(
        {
            "distance": ds.attention_distance / ds.uniform_distance,
            "entropy": ds.entropy / ds.uniform_entropy,
            "top1": ds.top1,
        }
    )


def first_layer(results: xr.Dataset) -> xr.Dataset:
    """Return the measures of the first layer, (arm, seed, epoch), and the accuracy."""
    first = results.isel(layer=0, drop=True)
    return xr.Dataset(
        {
            "distance of the most local head": first.distance.min("head"),
            "mean distance": first.distance.mean("head"),
            "mean entropy": first.entropy.mean("head"),
            "accuracy": first.top1,
        }
    )


@mpl.rc_context(STYLE)
def draw(measures: xr.Dataset) -> Figure:
    """Draw the measures by epoch for both arms, and below the difference with its interval."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    names = [name for name in measures.data_vars if name != "accuracy"]
    panels = figure.subplots(2, len(names), sharex=True)
    for (top, bottom), name in zip(panels.T, names, strict=True):
        draw_arms(top, measures[name])
        top.set_title(str(name))
        # At epoch 0 both arms are the same network.
        pairs = difference(measures[name].isel(epoch=slice(1, None)), "CutMix", "plain")
        interval = mean_interval(pairs, "seed")
        low, high = interval.sel(bound="low"), interval.sel(bound="high")
        bottom.fill_between(pairs.epoch, low, high, color="0.85")
        bottom.plot(pairs.epoch, pairs.mean("seed"), color="k")
        bottom.axhline(0, color="0.5", lw=0.8, ls="--")
        bottom.set_xlabel("epoch")
        whole_ticks(bottom)
    panels[0, 0].set_ylabel("share of uniform attention")
    panels[1, 0].set_ylabel("CutMix minus plain")
    panels[0, 0].legend()
    return figure


def draw_arms(panel: Axes, values: xr.DataArray) -> None:
    """Draw each training thin, and the mean of each arm thick."""
    for arm, color in ARMS.items():
        of_arm = values.sel(arm=arm).transpose("epoch", "seed")
        panel.plot(of_arm.epoch, of_arm, color=color, lw=0.5, alpha=0.6)
        panel.plot(of_arm.epoch, of_arm.mean("seed"), color=color, lw=2, label=arm)


def table(measures: xr.Dataset) -> str:
    """Return means of both arms at the last epoch,
    and their difference with its interval and a verdict.
    """
    lines = [f"\n{'last epoch':34}{'plain':>7}{'CutMix':>8}  difference"]
    last = measures.isel(epoch=-1)
    for name, values in last.data_vars.items():
        plain, mixed = (float(values.sel(arm=arm).mean()) for arm in ARMS)
        verdict = compared(difference(values, "CutMix", "plain"), "seed", "higher", "lower")
        lines.append(f"{name:34}{plain:7.3f}{mixed:8.3f}  {verdict}")
    return "\n".join(lines)


def check(results: xr.Dataset, data: ImageSet) -> bool:
    """Return whether each network learned."""
    labels = data.validation_labels
    # Chance is the accuracy of always naming the most frequent digit.
    chance = float(labels.bincount().max() / len(labels))
    top1 = results.top1.isel(epoch=-1)
    has_learned = [
        learned(
            f"{arm}, seed {seed}",
            float(top1.sel(arm=arm, seed=seed)),
            len(labels),
            chance,
        )
        for arm in top1.arm.values
        for seed in top1.seed.values
    ]
    print(f"check: {sum(has_learned)} of {len(has_learned)} networks learned")
    return all(has_learned)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = [
        Option("--epochs", "epochs of each training", from_least(1), 30, small=2),
        Option("--seeds", "trainings of each arm, from --seed on", from_least(1), 3, small=1),
        *image_set_options(small=400),
        SEED_OPTION,
        small_option("1 seed, 2 epochs, 400 digits"),
    ]
    return parse_options(__doc__, "cutmix_locality", arguments, {"training": options})


if __name__ == "__main__":
    sys.exit(ended(main))
