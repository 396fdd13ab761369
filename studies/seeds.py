r"""Twenty seeds: how far trainings differ,
and whether early accuracy ranks them (thesis, Figs. 6.7 to 6.10).

    python studies/seeds.py

Takes about 4 minutes on one CPU core.

What one should see (seeds.png): accuracies spread widely early, and less at the end. In the thesis,
with a hundred seeds of a ResNet-50, "it is only towards the end of the training that one can
determine the most interesting seeds", and a seed that is lucky on one test set need not be so on
another. The study prints whether this holds here, as rank correlations with intervals over seeds,
and what the seeds agree on about the heads: gates, content information and types.

How: with each seed a small ResNet learns handwritten digits in cluttered scenes, is reparameterized
as a T-CNN, and fine-tuned with every head recorded. All seeds have the same images. Even and odd
validation images stand for two test sets.

Writes into results/:
seeds.png    A mean, standard deviation and range of the accuracies by epoch, B accuracy early
             against that at the end, C accuracy at the end on one half of the images against that
             on the other, D mean gates and E mean content information by layer, F types of heads by
             layer; a point for each seed
seeds.zarr   accuracies by (seed, epoch), right answers at the end by (seed, image), gates, content
             information and types by (seed, epoch, layer, head), where epochs after the last one of
             the CNN are the T-CNN's: xarray.open_zarr

It ends by checking that the trainings learned, and that the first layer's mean gate ends above the
last one's.

On your own images, as the papers did on ImageNet with a GPU:

    python studies/seeds.py --model resnetrs50 --pretrained --data path/to/imagenet --img-size 224 \
        --seeds 20 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp --workers 16 \
        --out results/imagenet
"""

import argparse
import sys
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import norm, spearmanr
from torch import nn

import tcnn_probe
from common.figures import BY_GATE, COLORS, STYLE, add_letters, ordered_colors, whole_ticks
from common.option_table import training_options
from common.options import Option, from_least, need_model, parse_options
from common.output import ended, finish, seeds_of
from common.training import Study, begin
from common.verdicts import learned
from tcnn_probe.plot import OKABE_ITO

# Recorded variables that the figure and the table need.
SAVED = ["gate", "content_information", "images"]


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    first = begin("seeds", args)
    trainings = [train(first, seed) for seed in seeds_of(args)]
    # Attributes that differ, such as the time of a recording, are dropped.
    seeds = xr.Variable("seed", list(seeds_of(args)))
    results = xr.concat(trainings, seeds, combine_attrs="drop_conflicts")
    first.output.save(results)
    first.output.show(draw(results), table(results))
    return finish(check(results, first.chance), args)


def train(first: Study, seed: int) -> xr.Dataset:
    """Train the CNN of a seed, convert it, and fine-tune and record the T-CNN."""
    # Another seed would split the data anew, and all seeds must be shown the same images.
    study = replace(first.with_seed(seed), loaders=first.loaders)
    before = [result.top1 for result in study.train_cnn(f"cnn_{seed}", f"the CNN, seed {seed}")]
    store = study.output.beside(f"_{seed}.zarr")
    tcnn, recording = study.record_tcnn(store, f"tcnn_{seed}", f"the T-CNN, seed {seed}")
    # The T-CNN's epochs are numbered on from the CNN's.
    heads = recording[SAVED].assign_coords(epoch=recording.epoch + len(before))
    heads["head_type"] = (
        heads.gate.dims,
        tcnn_probe.head_types(recording, by="gate").values.astype(object),
    )
    top1 = [*before, *recording.top1.values]
    accuracies = xr.DataArray(top1, {"epoch": range(len(top1))}, ("epoch",), name="top1")
    # The join is outer, since the CNN's epochs have accuracies but no heads.
    return xr.merge([heads, accuracies], join="outer").assign(correct=("image", right(tcnn, study)))


@torch.no_grad()
def right(model: nn.Module, study: Study) -> np.ndarray:
    """Return whether each validation image is classified correctly, (image,)."""
    model.eval()
    device = study.args.device
    return np.concatenate(
        [
            (model(images.to(device)).argmax(1).cpu() == labels).numpy()
            for images, labels in study.loaders[1]
        ]
    )


def rank_correlation(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return Spearman's rank correlation with its 95 % interval over seeds,
    after Bonett and Wright (2000, Eq. 3).
    """
    # Three seeds leave no degree of freedom for the standard error, and constant ranks have no
    # correlation.
    if len(x) < 4 or not np.ptp(x) or not np.ptp(y):
        return np.nan, np.nan, np.nan
    rho = float(spearmanr(x, y).statistic)
    # For ranks, Bonett and Wright multiply Fisher's variance by 1 + rho^2 / 2.
    half = norm.ppf(0.975) * np.sqrt((1 + rho**2 / 2) / (len(x) - 3))
    # The Fisher transform of a correlation of 1 is infinite.
    low, high = np.tanh(np.arctanh(np.clip(rho, -1 + 1e-12, 1 - 1e-12)) + np.array([-half, half]))
    return rho, float(low), float(high)


def by_epoch(results: xr.Dataset) -> dict[int, tuple[float, float, float]]:
    """Return the rank correlation of each epoch's accuracies with those at the end."""
    last = results.top1.isel(epoch=-1).values
    return {
        int(epoch): rank_correlation(results.top1.sel(epoch=epoch).values, last)
        for epoch in results.epoch.values[:-1]
    }


def halves(results: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracies at the end on the even and on the odd validation images, by seed."""
    return tuple(
        results.correct.isel(image=slice(start, None, 2)).mean("image").values for start in (0, 1)
    )


def converted(results: xr.Dataset) -> int:
    """Return the epoch at which the CNN had become a T-CNN."""
    return int(results.epoch[results.gate.notnull().any(["seed", "layer", "head"])][0])


@mpl.rc_context(STYLE)
def draw(results: xr.Dataset) -> Figure:
    """Draw accuracies by epoch and against each other, and the heads of all seeds."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    draw_spread(panels[0], results)
    last = results.isel(epoch=-1)
    begin_at, end_at = converted(results), int(results.epoch[-1])
    # The epochs are halfway through the CNN's training, at its conversion, and just before the end.
    shown = sorted({begin_at // 2, begin_at, end_at - 1})
    for color, epoch in zip(ordered_colors(len(shown)), shown, strict=True):
        panels[1].plot(
            results.top1.sel(epoch=epoch),
            last.top1,
            "o",
            color=color,
            ms=4,
            label=f"epoch {epoch}",
        )
    panels[1].set(
        xlabel="accuracy at an epoch",
        ylabel="accuracy at the end",
        title="does early accuracy rank seeds?",
    )
    panels[1].legend()
    even, odd = halves(results)
    panels[2].plot(even, odd, "o", color="0.3", ms=4)
    panels[2].set(
        xlabel="accuracy on even images",
        ylabel="on odd images",
        title="does luck transfer?",
    )
    for panel, name, label in (
        (panels[3], "gate", r"mean gate"),
        (panels[4], "content_information", "nat"),
    ):
        means = last[name].mean("head").transpose("seed", "layer")
        # A line for each seed, as layers of one network go together.
        for row in means.values:
            panel.plot(range(means.sizes["layer"]), row, "-", color="0.7", lw=0.8)
        panel.plot(
            range(means.sizes["layer"]),
            means.mean("seed"),
            "o-",
            color=OKABE_ITO["vermillion"],
            lw=2,
        )
        panel.set(ylabel=label, title=name.replace("_", " "))
    draw_types(panels[5], last.head_type)
    for panel in panels[3:]:
        panel.set_xticks(
            range(results.sizes["layer"]), results.layer.values, rotation=20, fontsize=7
        )
    add_letters(panels)
    return figure


def draw_spread(panel: Axes, results: xr.Dataset) -> None:
    """Draw mean, standard deviation and range of the accuracies by epoch (thesis, Fig. 6.9)."""
    top1, epochs = results.top1, results.epoch
    mean, deviation = (
        top1.mean("seed"),
        # A single seed has no standard deviation; with ddof=0 it is 0, which draws no band.
        top1.std("seed", ddof=1 if top1.sizes["seed"] > 1 else 0),
    )
    panel.fill_between(epochs, top1.min("seed"), top1.max("seed"), color="0.9", label="range")
    panel.fill_between(
        epochs,
        mean - deviation,
        mean + deviation,
        color="0.75",
        label="standard deviation",
    )
    panel.plot(epochs, mean, color="k", label="mean")
    panel.axvline(
        converted(results) - 0.5,
        # Between the last epoch of the CNN and the first of the T-CNN.
        color=OKABE_ITO["blue"],
        lw=1,
        ls=":",
        label="reparameterized",
    )
    panel.set(xlabel="epoch", ylabel="accuracy", title=f"{top1.sizes['seed']} seeds")
    whole_ticks(panel)
    panel.legend(fontsize=7)


def draw_types(panel: Axes, types: xr.DataArray) -> None:
    """Draw the share of each type of heads by layer, with the range over seeds."""
    for kind, words in BY_GATE.items():
        shares = (types == kind).mean("head")
        mean = shares.mean("seed").values
        # matplotlib takes lengths of error bars, not their ends.
        spread = np.abs(np.stack([shares.min("seed").values, shares.max("seed").values]) - mean)
        panel.errorbar(
            range(len(mean)),
            mean,
            spread,
            color=COLORS[kind],
            marker="o",
            ms=4,
            capsize=2,
            label=words,
        )
    panel.set(
        ylabel="share of heads",
        # The axis extends a little beyond 0 and 1, where most shares lie.
        ylim=(-0.05, 1.05),
        title="types by gate, and their range",
    )
    panel.legend(fontsize=7)


def table(results: xr.Dataset) -> str:
    """Return what the seeds agree on, and how early accuracies
    and halves of the images rank them.
    """
    top1, seeds = results.top1, results.sizes["seed"]
    lines = [
        f"\n{seeds} seeds, {results.sizes['image']} validation images; converted before epoch "
        f"{converted(results)}"
    ]
    lines.append(
        f"{'epoch':>6}{'mean':>8}{'std':>8}{'min':>8}{'max':>8}"
        "   rank correlation with the end, same images [95 %]"
    )
    correlations = by_epoch(results)
    for epoch in results.epoch.values:
        values = top1.sel(epoch=epoch).values
        # The last epoch is what the others are compared with.
        rho, low, high = correlations.get(int(epoch), (np.nan,) * 3)
        deviation = values.std(ddof=1) if seeds > 1 else np.nan
        numbers = f"{values.mean():8.3f}{deviation:8.3f}{values.min():8.3f}{values.max():8.3f}"
        lines.append(
            f"{epoch:>6}{numbers}"
            # At the last epoch, and where seeds do not differ, there is no correlation.
            + (f"   {rho:+.2f} [{low:+.2f}, {high:+.2f}]" if rho == rho else "")
        )
    even, odd = halves(results)
    rho, low, high = rank_correlation(even, odd)
    lines.append(
        f"at the end, even images rank the seeds as odd ones do by {rho:+.2f} [{low:+.2f}, "
        f"{high:+.2f}]"
    )
    accuracy = float(top1.isel(epoch=-1).mean())
    # The spread that the choice of images alone would give, for comparison with that of the seeds.
    by_chance = (accuracy * (1 - accuracy) / results.sizes["image"]) ** 0.5
    lines.append(f"a standard error over {results.sizes['image']} images is {by_chance:.3f}")
    last = results.isel(epoch=-1)
    lines.append(
        "at the end, over "
        f"seeds:{'mean gate':>22}{'std':>6}{'range':>14}{'content (nat)':>18}{'std':>6}"
    )
    for layer in results.layer.values:
        gate, content = (
            last[name].sel(layer=layer).mean("head").values
            for name in ("gate", "content_information")
        )
        deviations = [part.std(ddof=1) if seeds > 1 else np.nan for part in (gate, content)]
        lines.append(
            f"  {layer:28}{gate.mean():15.2f}{deviations[0]:6.2f}{gate.min():8.2f}-{gate.max():.2f}"
            f"{content.mean():17.2f}{deviations[1]:7.2f}"
        )
    ordered = (last.gate.mean("head").diff("layer") < 0).all("layer")
    lines.append(
        f"the deeper the layer, the lower its mean gate, in {int(ordered.sum())} of {seeds} seeds"
    )
    as_first = last.head_type == last.head_type.isel(seed=0)
    if seeds > 1:
        share = float(as_first.isel(seed=slice(1, None)).mean())
        lines.append(f"{share:.2f} of the heads have the type that they have with the first seed")
    return "\n".join(lines)


def check(results: xr.Dataset, chance: float) -> bool:
    """Return whether the median training learned,
    and the first layer's mean gate ends above the last one's.
    """
    last = results.isel(epoch=-1)
    # The median is judged, as a single training may fail.
    median = float(last.top1.median())
    has_learned = learned("the median T-CNN", median, results.sizes["image"], chance)
    gates = last.gate.mean(["head", "seed"]).values
    above = gates[0] > gates[-1]
    verdict = "above" if above else "NOT above"
    print(
        f"check: the first layer's mean gate ends {verdict} the last one's: {gates[0]:.2f}, "
        f"{gates[-1]:.2f}"
    )
    return has_learned and bool(above)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    # Few small images, so that forty trainings take minutes; the rate of queries and keys is as in
    # tcnn_claims.py.
    few = {"img_size": 32, "clutter": 3, "batch_size": 16}
    few |= {"limit": (600, 120), "cnn_epochs": (6, 2)}
    training = training_options("2 seeds, 1 epoch", epochs=(4, 1), qk_lr=5e-3, **few)
    seeds = Option("--seeds", "trainings, from --seed on", from_least(1), 20, small=2)
    return parse_options(__doc__, "seeds", arguments, {**training, "seeds": [seeds]}, need_model)


if __name__ == "__main__":
    sys.exit(ended(main))
