r"""Four claims of the T-CNN paper that it states without a figure, each asked of several trainings.

    python studies/tcnn_claims.py

Takes about 4 minutes on one CPU core.

What one should see (tcnn_claims.png): no outcome in particular, since the study asks questions. For
each claim it prints a difference with its interval over trainings, and says "undecided" where the
interval contains zero. The paper does not say how its claims are to be measured: these measures are
our operationalisations, each above zero if the claim holds as we read it.

- The centre tap: "the attention head initially focusing on the query pixel (head 5) stays
  convolutional in all layers" (Sec. 4). Its gate, less the mean gate of the eight other heads, in
  each layer.
- The gate: without it, content and position share one softmax, which "ignores the smallest of the
  two", and heads choose one and stick to it (Sec. 2). How one-sided heads are: the larger of the
  two kinds of information in their attention, as a share of both. Information is what an image, or
  the place of a query, tells about where a head looks.
- The filters: W_out begins as the CNN's filters (Eq. 6). The accuracy at the end, less that from a
  W_out drawn anew.
- The optimizer: "we obtained worse results with SGD" (footnote 3). The accuracy at the end, less
  that of the better of several rates of SGD.

How: with each seed a small ResNet learns handwritten digits in cluttered scenes. Its last stage is
reparameterized as gated positional self-attention (GPSA), and fine-tuned in each of these ways.
Queries and keys learn faster than the other weights: in so few steps, heads could not learn content
otherwise.

Writes into results/:
tcnn_claims.png    A gates of the centre tap and of the other heads, B information by content and by
                   position of each head, C accuracy by epoch from the CNN's filters and from
                   others, D accuracy at the end by optimizer
tcnn_claims.zarr   accuracies by (seed, arm, epoch), information by (seed, arm, epoch, layer, head),
                   gates by (seed, epoch, layer, head): xarray.open_zarr

It ends by checking that the T-CNNs learned, and that all heads start by position, with a gate and
without.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/tcnn_claims.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --seeds 3 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --out results/imagenet
"""

import argparse
import math
import sys
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import tcnn_probe
from common.data import probed_images
from common.figures import STYLE, add_letters, whole_ticks
from common.option_table import training_options
from common.options import Option, from_least, need_model, parse_options, positive_number
from common.output import ended, finish, seeds_of
from common.training import Study, begin
from common.verdicts import difference, difference_lines, learned
from tcnn_model import GPSA, gpsa_layers, reparameterize
from tcnn_probe.plot import OKABE_ITO

GATED, UNGATED, REDRAWN = "gated", "ungated", "filters drawn anew"
COLORS = {
    GATED: OKABE_ITO["blue"],
    UNGATED: OKABE_ITO["vermillion"],
    REDRAWN: OKABE_ITO["orange"],
}
CENTER = 4
"""Head of the centre tap of a 3 x 3 kernel, head 5 of the paper."""
# Enough that no single image dominates the mean; the attention of all of them fits into memory at
# once.
IMAGES = 48
"""Validation images whose attention is measured."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    arms = [GATED, UNGATED, REDRAWN, *(f"SGD, {lr:g}" for lr in args.sgd_lrs)]
    first = begin("tcnn_claims", args)
    by_seed = []
    for seed in seeds_of(args):
        # Each seed has its own split and its own CNN.
        study = first.with_seed(seed)
        study.train_cnn(f"cnn_{seed}")
        trained = [train(study, arm, seed) for arm in arms]
        by_seed.append(
            # The join is outer, since arms without gates lack the variables of gates.
            xr.concat(trained, xr.Variable("arm", np.array(arms, object)), join="outer")
        )
    results = xr.concat(by_seed, xr.Variable("seed", list(seeds_of(args))))
    results["images"] = len(first.validation)
    first.output.save(results)
    first.output.show(draw(results), table(results))
    return finish(check(results, first.chance), args)


class Ungated(nn.Module):
    """Positional self-attention without a gate:
    one softmax of content and position (T-CNN paper, Eq. 3).

    It forms the whole attention, and has the parameters of a GPSA layer, whose gates have no effect
    and are not trained. The zeros around the image are keys without content, so that their logits
    depend on their place alone.

    Args:
        layer: GPSA layer to take the parameters from.
    """

    def __init__(self, layer: GPSA) -> None:
        super().__init__()
        layer.gating.requires_grad_(False)
        self.layer = layer

    def attention(self, x: Tensor) -> Tensor:
        """Return the attention (B, heads, N_query, N_key),
        keys row-major over the image and its padding.
        """
        parts = self.layer.gated_attention(x)
        content = parts.query @ parts.key.mT * parts.scale
        padding = (parts.x.before, parts.x.after, parts.y.before, parts.y.after)
        on_grid = content.unflatten(-1, (parts.y.length, parts.x.length))
        content = F.pad(on_grid, padding).flatten(-2)
        # The logarithm of the positional attention is its logits, up to a constant of the row.
        # The logarithm of a factor that is zero in float32 would be minus infinity.
        rows, columns = (factor.clamp_min(1e-30).log() for factor in parts.factors())
        position = rows[:, :, None, :, None] + columns[:, None, :, None, :]
        position = position.flatten(3).flatten(1, 2)
        return (content + position.to(content.dtype)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, (B, C_in, H, W) -> (B, C_out, H_out, W_out)."""
        parts = self.layer.gated_attention(x)
        padding = (parts.x.before, parts.x.after, parts.y.before, parts.y.after)
        values = self.layer.values(F.pad(x, padding))
        return self.layer.combine(self.attention(x) @ values, parts)


def convert(arm: str, study: Study, seed: int) -> nn.Module:
    """Convert the CNN to the T-CNN of an arm; all arms of a seed have the same queries and keys."""
    # The seed determines queries and keys, so that arms of a seed differ in their treatment alone.
    torch.manual_seed(seed)
    tcnn = reparameterize(study.model)
    for name, layer in gpsa_layers(tcnn).items():
        if arm == UNGATED:
            tcnn.set_submodule(name, Ungated(layer))
        if arm == REDRAWN:
            # torch draws the weights of a convolution in this way.
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))
    return tcnn


def train(study: Study, arm: str, seed: int) -> xr.Dataset:
    """Convert the CNN, fine-tune it, and measure its attention after each epoch."""
    tcnn = convert(arm, study, seed)
    recipe: dict[str, Any] = {}
    if arm.startswith("SGD"):
        # A separate rate for queries and keys is meant for AdamW, whose steps do not grow with the
        # gradient.
        recipe = {"opt": "momentum", "lr": float(arm.split()[-1]), "qk_lr": None}
    file = f"{arm.replace(' ', '-').replace(',', '')}_{seed}"
    title = f"{arm}, seed {seed}"
    images = probed_images(study.validation, IMAGES).images.to(study.args.device)
    training = partial(study.record, tcnn, study.output.beside(f"_{file}.zarr"), file, title)
    # The recorder does not know layers without gates.
    if arm == UNGATED:
        training = partial(study.finetune, tcnn, file, title)
    heads, ds = study.measure_epochs(
        partial(training, **recipe), file, lambda: measured(tcnn, images)
    )
    if arm == UNGATED:
        return ds
    ds["head_type"] = tcnn_probe.head_types(heads, by="gate").astype(object)
    return ds.assign(gate=heads.gate).reset_coords(drop=True)


@torch.no_grad()
def measured(model: nn.Module, images: Tensor) -> xr.Dataset:
    """Return the information by position and by content
    in the attention of each head, (layer, head), in nat.
    """
    # An ungated layer has a GPSA layer inside.
    names = [name.removesuffix(".layer") for name in gpsa_layers(model)]
    parts: list[Tensor] = []

    def keep(layer: Any, inputs: tuple[Tensor]) -> None:
        parts.append(information(layer.attention(inputs[0])))

    hooks = [model.get_submodule(name).register_forward_pre_hook(keep) for name in names]
    # Hooks are removed whatever happens, because the training of the model continues.
    try:
        model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    dims, measures = ("layer", "head"), torch.stack(parts).cpu().unbind(1)
    data = {
        name: (dims, values) for name, values in zip(("position", "content"), measures, strict=True)
    }
    return xr.Dataset(data, {"layer": names})


def information(attention: Tensor) -> Tensor:
    """Return the information in attention (B, heads, N_query, N_key), shape (2, heads), in nat.

    By position: the entropy of the mean attention of all queries, less the mean entropy of a
    query's. By content: the mean entropy of a query's attention, averaged over images, less that in
    an image, times B / (B - 1) against its bias, as tcnn_probe records it.
    """
    # Entropies are in float64, as the information is a small difference of them.
    attention = attention.double()
    by_query = attention.mean(0)
    position = entropy(by_query.mean(1)) - entropy(by_query).mean(1)
    content = entropy(by_query).mean(1) - entropy(attention).mean((0, 2))
    return torch.stack([position, content * len(attention) / (len(attention) - 1)])


def entropy(shares: Tensor) -> Tensor:
    """Return the entropy along the last dimension, in nat."""
    return torch.special.entr(shares).sum(-1)


def differences(results: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return each claim as a difference that is above zero
    if the claim holds as we read it, by seed.
    """
    last = results.isel(epoch=-1)
    gates = last.gate.sel(arm=GATED)
    off_center = gates.drop_sel(head=CENTER).mean("head")
    claims = {
        f"gate of the centre tap, less the others', {layer}": gates.sel(head=CENTER, layer=layer)
        - off_center.sel(layer=layer)
        for layer in gates.layer.values
    }
    sides = one_sided(last).mean(["layer", "head"])
    content = last.content.mean(["layer", "head"])
    top1, sgd = last.top1, best_sgd(results)
    return claims | {
        "how one-sided heads are, ungated less gated": difference(sides, UNGATED, GATED),
        "information by content (nat), gated less ungated": difference(content, GATED, UNGATED),
        "accuracy, gated less ungated": difference(top1, GATED, UNGATED),
        "accuracy, the CNN's filters less drawn ones": difference(top1, GATED, REDRAWN),
        f"accuracy, AdamW less {sgd}": difference(top1, GATED, sgd),
    }


def one_sided(ds: xr.Dataset) -> xr.DataArray:
    """Return the larger of the two kinds of information as a share of both:
    1/2 if equal, 1 if one of them is zero.
    """
    # The bias correction may bring content information below zero, and a share of a negative number
    # has no meaning.
    position, content = ds.position.clip(0), ds.content.clip(0)
    return np.maximum(position, content) / (position + content)


def best_sgd(results: xr.Dataset) -> str:
    """Return the arm of SGD with the highest mean accuracy at the end."""
    top1 = results.top1.isel(epoch=-1).mean("seed")
    arms = [arm for arm in results.arm.values if arm.startswith("SGD")]
    return max(arms, key=lambda arm: float(top1.sel(arm=arm)))


def kept_sides(results: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the share of heads that end with the kind
    of information that led after the first epoch, by seed.
    """
    of_arm = results.sel(arm=arm)
    leads = of_arm.position > of_arm.content
    # Epoch 0 is before any training: the first comparison is after one epoch.
    return (leads.isel(epoch=1) == leads.isel(epoch=-1)).mean(["layer", "head"])


@mpl.rc_context(STYLE)
def draw(results: xr.Dataset) -> Figure:
    """Draw a panel for each claim."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    last = results.isel(epoch=-1)
    draw_gates(panels[0], last.gate.sel(arm=GATED))
    for arm in (GATED, UNGATED):
        of_arm = last.sel(arm=arm)
        panels[1].scatter(
            of_arm.position,
            of_arm.content,
            s=7,
            color=COLORS[arm],
            alpha=0.6,
            label=arm,
        )
    panels[1].set(
        xlabel="information by position (nat)",
        ylabel="information by content (nat)",
        title="a point per head",
    )
    for arm in (GATED, REDRAWN):
        curves = results.top1.sel(arm=arm).transpose("epoch", "seed")
        panels[2].plot(curves.epoch, curves, color=COLORS[arm], lw=0.6, alpha=0.6)
        label = "the CNN's filters" if arm == GATED else arm
        panels[2].plot(curves.epoch, curves.mean("seed"), color=COLORS[arm], lw=2.2, label=label)
    panels[2].set(xlabel="epoch", ylabel="accuracy", title="where W_out begins")
    whole_ticks(panels[2])
    draw_optimizers(panels[3], last.top1)
    for panel in panels[1:3]:
        panel.legend()
    add_letters(panels)
    return figure


def draw_gates(panel: Axes, gates: xr.DataArray) -> None:
    """Draw the gates of the centre tap and of the other heads by layer,
    a point for each training.
    """
    # The other heads are drawn in one row, as the claim is about their difference from the centre
    # tap.
    off_center = gates.drop_sel(head=CENTER).transpose("layer", "seed", "head")
    for row, layer in enumerate(gates.layer.values):
        rest = off_center.sel(layer=layer).values.ravel()
        # Only the first layer is in the legend, as all rows look alike.
        panel.plot(
            np.full(rest.size, row - 0.12),
            rest,
            ".",
            color="0.7",
            ms=4,
            label=None if row else "other heads",
        )
        center = gates.sel(layer=layer, head=CENTER).values
        panel.plot(
            np.full(center.size, row + 0.12),
            center,
            "o",
            color=OKABE_ITO["blue"],
            ms=4,
            label=None if row else "centre tap",
        )
    panel.set_xticks(range(gates.sizes["layer"]), gates.layer.values, rotation=20, fontsize=7)
    panel.set(ylabel=r"gate $\sigma(\lambda)$", ylim=(0, 1), title="gates at the end")
    panel.legend()


def draw_optimizers(panel: Axes, top1: xr.DataArray) -> None:
    """Draw the accuracy at the end by optimizer, a point for each training, and means."""
    arms = [GATED, *(arm for arm in top1.arm.values if arm.startswith("SGD"))]
    for row, arm in enumerate(arms):
        values = top1.sel(arm=arm).values
        panel.plot(np.full(values.size, row), values, ".", color="0.4")
        panel.plot(row, values.mean(), "_", color=OKABE_ITO["vermillion"], ms=22, mew=2)
    panel.set_xticks(range(len(arms)), ["AdamW", *arms[1:]])
    panel.set(ylabel="accuracy", title="at the end, by optimizer and rate")


def table(results: xr.Dataset) -> str:
    """Return each claim with its interval over trainings, and a verdict."""
    seeds = results.sizes["seed"]
    lines = [
        f"\nmean [95 % interval] over {seeds} trainings; above zero if the claim holds, by our "
        "operationalisation"
    ]
    # An interval that contains zero leaves the claim open.
    lines += difference_lines(differences(results), 61)
    types = results.head_type.sel(arm=GATED).isel(epoch=-1)
    convolutional = (types == "convolutional").sel(head=CENTER)
    everywhere = int(convolutional.all("layer").sum())
    lines.append(
        f"the centre tap is convolutional by its gate in all layers in {everywhere} of {seeds} "
        "trainings"
    )
    for arm in (GATED, UNGATED):
        share = float(kept_sides(results, arm).mean())
        lines.append(
            f"{arm}: {share:.2f} of the heads end with the kind of information that led after the "
            "first epoch"
        )
    means = results.top1.isel(epoch=-1).mean("seed").to_series()
    lines.append(
        "accuracy at the end: " + ", ".join(f"{arm} {value:.3f}" for arm, value in means.items())
    )
    return "\n".join(lines)


def check(results: xr.Dataset, chance: float) -> bool:
    """Return whether the T-CNNs learned, and all heads start by position,
    with a gate and without.
    """
    # The median is judged: one training that failed must not decide for the others.
    median = float(results.top1.sel(arm=GATED).isel(epoch=-1).median())
    has_learned = learned("the median T-CNN", median, int(results.images), chance)
    start = results.sel(arm=[GATED, UNGATED]).isel(epoch=0)
    by_position = bool((start.position > start.content).all())
    verdict = "start" if by_position else "do NOT all start"
    position = float(start.position.min())
    content = float(start.content.max())
    print(
        f"check: heads {verdict} by position: {position:.2f} nat or more, by content {content:.4f} "
        "nat or less"
    )
    return has_learned and by_position


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    few = {"img_size": 32, "clutter": 3, "batch_size": 16}
    few |= {"limit": (600, 120), "cnn_epochs": (6, 2)}
    # A rate of 0.005 lets queries and keys move 14 times their initial distance from zero, that of
    # the weights 3 times.
    training = training_options("1 seed, 1 epoch", epochs=(4, 1), qk_lr=5e-3, **few)
    arms = [
        Option("--seeds", "trainings of each kind, from --seed on", from_least(1), 5, small=1),
        Option(
            "--sgd-lrs",
            "peak rates of SGD",
            positive_number,
            [0.01, 0.1],
            small=[0.1],
        ),
    ]
    return parse_options(__doc__, "tcnn_claims", arguments, {**training, "arms": arms}, need_model)


if __name__ == "__main__":
    sys.exit(ended(main))
