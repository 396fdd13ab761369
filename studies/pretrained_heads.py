r"""How many heads of a pretrained vision transformer can be uniform,
convolutional, static or salient, and at what cost.

    python studies/pretrained_heads.py --model vit_small_patch14_dinov2 --pretrained \
        --data folder/of/photographs
    python studies/pretrained_heads.py --weights vit_small_patch14_saliency.safetensors \
        --data folder/of/photographs

Takes 17 minutes of one CPU core with --steps 30 (a ViT-S of 72 heads on 257 tokens).

PAPA (2211.03495) drew for language models how many heads can have constant attention; we know of no
such curves for vision transformers. Here attention is replaced rung by rung: by uniform attention,
by the nearest convolution T, by its mean M over images ("static"), by M with the keys that stand
out in the image ("salient"). A recording splits the selectivity of each head into what each rung
adds, in nat. The question is whether these parts, which are read off attention alone, predict what
the rungs cost.

Writes into results/:
pretrained_heads.png    A cost of static and salient attention of single heads, against the share of
                        key content in content; B the same for content in selectivity; C to F the
                        change of the last patch features if the heads with the smallest share to
                        lose are replaced, against controls
pretrained_heads.zarr   all numbers: the recording, costs of each head and rung, curves

Protocol, written before the results of the network that is named below
-----------------------------------------------------------------------
Network: DINOv2's ViT-S/14, fine-tuned to predict what is important in a photograph (72 heads);
--weights. Photographs: Imagenette's validation images, evenly spread over its ten classes, 16 to
fit (the recording, M, T, kernels, orders) and 12 others to evaluate. Nothing is trained.

Cost of a head at a rung: norm of the change of the last patch features over the norm of these
features, for each evaluated image; a cost of a head is the mean over images. For the saliency
network also the correlation and the mean absolute difference of its map, in curves.

Intervals are over images, 95 %. Correlations are Spearman's; their intervals are a bootstrap over
the evaluated images (the photographs of the fit stay, so they are too narrow by what these add).
"Within blocks" means of ranks among the heads of a block, pooled.

1. Single heads. rho_1: key content / content against cost(salient) / cost(static), over heads with
   at least 0.1 nat of content. rho_2: share of content in selectivity against cost(static) /
   cost(zero), within blocks. The recording is said to predict costs if rho_1 <= -0.6 and rho_2 >=
   0.4. Zeroing exaggerates (2604.14433), so that rho_2 is also given with cost(uniform) in place of
   cost(zero), and no conclusion rests on zeroing alone.
2. First order. Spearman correlation of first-order costs (head_importance) with exact ones, by
   rung, over all heads and within blocks.
3. Curves. 1/8, 1/4, 1/2, 3/4 and all of the heads are replaced at once, at each rung, in the order
   of
   - shares: the share of selectivity that the rung loses, by the recording (of uniform attention:
     selectivity over log of the number of keys), smallest first;
   - deviation: DWConv_VFM's statistic (2605.22132), the standard deviation of attention over
     images, smallest first;
   - random: two random orders of all heads;
   - same layers: two random choices of as many heads from each layer as "shares" takes. "zero" sets
   the heads to zero that "static" replaces by shares. The shares are said to order heads if at 1/4
   and at 1/2 the change is smaller than that of both random controls (difference by image, interval
   below zero, mean of the two seeds), for convolutional, static and salient.

4. Training (--steps). Half of the heads become convolutions (tcnn_model.convolve), by shares and by
   deviation, and the network is trained for as many steps of AdamW to give the features that it
   gave before, on 256 further photographs (4 a step, if this is fewer).

What would show that the shares do not predict costs: rho_1 above -0.6 or rho_2 below 0.4; curves by
shares that are no lower than those of random heads of the same layers (then only the depth of a
layer counts, which needs no recording); or curves by deviation that are lower (then one number,
without parts, does as well).

It ends by saying which of these held.
"""

import argparse
import sys
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tcnn_probe
from common.figures import STYLE, add_letters, ordered_colors
from common.head_ladder import (
    RUNGS,
    attention_deviation,
    correlation,
    curves,
    lost_shares,
    trained_convolutions,
    within_blocks,
)
from common.option_table import SEED_OPTION, small_option
from common.options import Option, from_least, parse_options
from common.output import InputError, RunOutput, ended
from common.pretrained import Network, load_network, load_photographs
from common.verdicts import with_interval
from tcnn_probe.evaluation import mean_interval
from tcnn_probe.plot import OKABE_ITO

REPORTED = (1 / 4, 1 / 2)
"""Shares of heads at which the orders of their removal are compared."""
FRACTIONS = (1 / 8, *REPORTED, 3 / 4, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; return 0, as the verdict on a user's own network is a finding."""
    args = parse(arguments)
    torch.manual_seed(args.seed)
    output = RunOutput.from_args(args, "pretrained_heads", later=("steps",))
    network = load_network(args.model, args.weights, args.pretrained, small=args.small)
    fit, evaluated = load_photographs_of(args, network)
    results = measure(args, output, network, fit, evaluated)
    output.save(xr.DataTree.from_dict(results))
    measured = results["heads"], results["costs"], results["curves"]
    report(*measured)
    output.show(draw(*measured))
    return 0


def load_photographs_of(
    args: argparse.Namespace, network: Network
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the photographs to fit, and others to evaluate."""
    count = args.fit + args.evaluate
    photographs = load_photographs(args.data, count, network)
    # Every so many photographs one is for the fit, so that both have the same classes.
    is_fit = np.arange(count) * args.fit // count != ((np.arange(count) + 1) * args.fit // count)
    print(f"{args.fit} photographs to fit, {args.evaluate} others to evaluate")
    return photographs[is_fit], photographs[~is_fit]


def measure(
    args: argparse.Namespace,
    output: RunOutput,
    network: Network,
    fit: torch.Tensor,
    evaluated: torch.Tensor,
) -> dict[str, xr.Dataset]:
    """Return the anatomy of the heads, their costs and the curves, and after a training, with
    ``--steps``, the changes; a killed run keeps what it has measured.
    """
    model = network.features
    heads = lost_shares(output.once("recording", lambda: record(model, fit)))
    deviation = output.once("deviation", lambda: attention_deviation(model, fit).to_dataset())
    heads["deviation"] = deviation.deviation
    fractions = (*REPORTED, 1) if args.small else FRACTIONS
    by_count = output.once(
        "curves", lambda: curves(network, heads, fit, evaluated, fractions, seed=args.seed)
    )
    costs = output.once("costs", lambda: single_heads(model, fit, evaluated))
    results = {"heads": heads, "costs": costs, "curves": by_count}
    if args.steps:
        count = args.fit + args.evaluate
        training = load_photographs(args.data, min(256, 4 * args.steps), network, besides=count)
        images = fit, evaluated, training
        results["trained"] = output.once(
            f"trained-{args.steps}",
            lambda: trained_convolutions(network, heads, *images, steps=args.steps),
        )
        print(results["trained"].change.mean("image").to_pandas())
    return results


def record(model: torch.nn.Module, images: torch.Tensor) -> xr.Dataset:
    """Return the anatomy of all heads over images."""
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for batch in images.split(8):
            model(batch)
        recorder.mark(epoch=0)
    ds = recorder.dataset.isel(epoch=0, drop=True)
    names = [
        "selectivity",
        "offset_information",
        "position_information",
        "key_content_information",
        "query_key_content_information",
        "uniform_entropy",
    ]
    return ds[names].load()


def single_heads(model: torch.nn.Module, fit: torch.Tensor, evaluated: torch.Tensor) -> xr.Dataset:
    """Return exact and first-order costs of each head and rung, (mode, layer, head, image)."""
    options = {"modes": RUNGS, "reference": fit}
    with torch.no_grad():
        size = model(evaluated).flatten(1).norm(dim=1).numpy()
    size = xr.DataArray(size, dims="image")
    exact = tcnn_probe.head_costs(model, evaluated, **options) / size
    first = tcnn_probe.head_importance(model, evaluated, **options) / size
    return xr.Dataset({"exact": exact, "first_order": first})


def report(heads: xr.Dataset, costs: xr.Dataset, by_count: xr.Dataset) -> bool:
    """Print what the protocol asks for, and return whether the shares predict costs."""
    exact = {mode: costs.exact.sel(mode=mode) for mode in costs.mode.values}
    content = heads.key_content + heads.query_key_content
    rho_1 = correlation(
        (heads.key_content / content).where(content >= 0.1),
        exact["salient"],
        exact["static"],
    )
    print(f"rho_1, key content / content, salient / static: {rho_1}")
    rho_2 = {
        lower: correlation(
            content / heads.selectivity,
            exact["static"],
            exact[lower],
            ranks=within_blocks,
        )
        for lower in ("zero", "uniform")
    }
    for lower, rho in rho_2.items():
        print(f"rho_2, content / selectivity within blocks, static / {lower}: {rho}")
    passed = rho_1.value <= -0.6 and rho_2["zero"].value >= 0.4
    for mode, cost in exact.items():
        first = costs.first_order.sel(mode=mode).mean("image")
        over_all = correlation(first, cost)
        inside = correlation(first, cost, ranks=within_blocks)
        print(f"first order, {mode}: {over_all}, within blocks {inside}")
    ordered = True
    for mode in ("convolutional", "static", "salient"):
        for fraction in REPORTED:
            change = by_count.change.sel(mode=mode, fraction=fraction)
            for control in ("random", "same layers", "deviation"):
                others = change.sel(order=control).mean("seed")
                difference = change.sel(order="shares").isel(seed=0) - others
                print(
                    f"{mode}, {fraction:.2f} of the heads, shares minus {control}: "
                    f"{with_interval(difference)}"
                )
                is_below = bool(mean_interval(difference)[1] < 0)
                ordered &= control == "deviation" or is_below
    print(f"check: the parts {'predict' if passed else 'do NOT predict'} costs")
    print(f"check: the shares {'order' if ordered else 'do NOT order'} heads")
    return passed and ordered


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = [
        Option("--model", "name of a timm ViT", default="vit_small_patch14_dinov2"),
        Option("--pretrained", "timm's own weights", bool),
        Option("--weights", "file of the model's weights, or a saliency network"),
        Option("--data", "folder of photographs, also in subfolders"),
        Option("--fit", "photographs to fit", from_least(8), 16, small=8, data=16),
        Option("--evaluate", "others to evaluate", from_least(4), 12, small=4, data=12),
        Option(
            "--steps",
            "steps of training after half of the heads became convolutions",
            from_least(0),
            0,
            small=1,
            data=0,
        ),
        SEED_OPTION,
        small_option("random weights, and pieces of two photographs"),
    ]
    args = parse_options(__doc__, "pretrained_heads", arguments, {"model and data": options})
    if not args.small and (args.data is None or not (args.weights or args.pretrained)):
        raise InputError("expected --data, and --pretrained or --weights (or --small)")
    return args


COLORS = {
    "shares": OKABE_ITO["vermillion"],
    "deviation": OKABE_ITO["blue"],
    "random": "0.6",
    "same layers": OKABE_ITO["green"],
}
LABELS = {
    "shares": "by the share that the rung loses",
    "deviation": "by standard deviation over images",
    "random": "random",
    "same layers": "random, same layers",
}


@mpl.rc_context(STYLE)
def draw(heads: xr.Dataset, costs: xr.Dataset, curves: xr.Dataset) -> Figure:
    """Draw costs of single heads above, and curves of each rung below."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplot_mosaic("AABB;CDEF")
    cost = costs.exact.mean("image")
    content = heads.key_content + heads.query_key_content
    panels = {
        "A": (heads.key_content / content, "salient", "static"),
        "B": (content / heads.selectivity, "static", "zero"),
    }
    colors = ordered_colors(heads.sizes["layer"])
    for letter, (share, upper, lower) in panels.items():
        ratio = cost.sel(mode=upper) / cost.sel(mode=lower)
        for layer, color in zip(heads.layer.values, colors, strict=True):
            x, y = share.sel(layer=layer), ratio.sel(layer=layer)
            axes[letter].plot(x, y, "o", color=color, ms=4)
        axes[letter].set_ylabel(f"cost({upper}) / cost({lower})")
    axes["A"].set(xlabel="key content / content", title="single heads, dark: first blocks")
    axes["B"].set(xlabel="content / selectivity", title="single heads")
    top = float(curves.change.mean("image").max())
    for letter, mode in zip("CDEF", ("uniform", "convolutional", "static", "salient"), strict=True):
        draw_curve(axes[letter], curves.change.sel(mode=mode))
        axes[letter].set(title=mode, xlabel="share of heads replaced", ylim=(0, 1.05 * top))
    zero = curves.change.sel(mode="zero", order="shares", seed=0).mean("image")
    axes["E"].plot(zero.fraction, zero, ":", color="0.2", label="the same heads zero")
    axes["C"].set_ylabel("relative change of the last patch features")
    handles, labels = axes["E"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    add_letters(axes[letter] for letter in "ABCDEF")
    return figure


def draw_curve(panel: Axes, change: xr.DataArray) -> None:
    """Draw the change against the share of heads, with intervals over images."""
    for order, color in COLORS.items():
        by_image = change.sel(order=order).mean("seed")
        # All heads are replaced in one order only.
        last = change.sel(order="shares").isel(fraction=-1, seed=0)
        by_image[{"fraction": -1}] = last
        low, high = mean_interval(by_image).transpose("bound", ...).values
        panel.fill_between(by_image.fraction, low, high, color=color, alpha=0.2, lw=0)
        mean = np.asarray(by_image.mean("image"))
        panel.plot(by_image.fraction, mean, "-o", ms=3, color=color, label=LABELS[order])


if __name__ == "__main__":
    sys.exit(ended(main))
