r"""How many heads of a pretrained vision transformer can be uniform,
convolutional, static or salient, and at what cost.

    python studies/pretrained_heads.py --model vit_small_patch14_dinov2 --pretrained \
        --data folder/of/photographs
    python studies/pretrained_heads.py --weights vit_small_patch14_saliency.safetensors \
        --data folder/of/photographs

Takes 17 minutes of one CPU core with --steps 30 (a ViT-S of 72 heads on 257 tokens).

PAPA (2211.03495) drew for language models how many heads can have constant attention; for vision
transformers nobody has. Here attention is replaced rung by rung: by uniform attention, by the
nearest convolution T, by its mean M over images ("static"), by M with the keys that stand out in
the image ("salient"). A recording splits the selectivity of each head into what each rung adds, in
nat. The question is whether these parts, which are read off attention alone, predict what the rungs
cost.

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

import numpy as np
import torch
import xarray as xr

import tcnn_probe
from common.ending import ended
from common.head_ladder import (
    RUNGS,
    attention_deviation,
    correlation,
    curves,
    lost_shares,
    trained_convolutions,
    within_blocks,
)
from common.ladder_figure import draw
from common.options import add_output, add_seed, from_least, parsed, study_parser
from common.output import RunOutput, write_whole
from common.pretrained import load_network, load_photographs
from tcnn_probe.evaluation import mean_interval

FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; return 0, as the verdict on a user's own network is a finding."""
    args = parse(arguments)
    torch.manual_seed(args.seed)
    output = RunOutput.from_args(args, "pretrained_heads", later=("steps",))
    network = load_network(args.model, args.weights, args.pretrained, small=args.small)
    count = args.fit + args.evaluate
    photographs = load_photographs(args.data, count, network)
    # Every so many photographs one is for the fit, so that both have the same classes.
    is_fit = np.arange(count) * args.fit // count != ((np.arange(count) + 1) * args.fit // count)
    fit, evaluated = photographs[is_fit], photographs[~is_fit]
    print(f"{len(fit)} photographs to fit, {len(evaluated)} others to evaluate")

    def stage(name: str, measure: object) -> xr.Dataset:
        """Read the numbers of a stage that a killed run has finished, or measure them."""
        path = output.checkpoints / f"{name}.zarr"
        if not path.exists():
            write_whole(measure(), path)  # type: ignore[operator]
            print(f"{name} is done", flush=True)
        return xr.open_zarr(path, consolidated=False).load()

    model = network.features
    recording = stage("recording", lambda: record(model, fit))
    heads = lost_shares(recording)
    heads["deviation"] = stage(
        "deviation", lambda: attention_deviation(model, fit).to_dataset()
    ).deviation
    by_count = stage(
        "curves",
        lambda: curves(network, heads, fit, evaluated, FRACTIONS, seed=args.seed),
    )
    costs = stage("costs", lambda: single_heads(model, fit, evaluated))

    results = {"heads": heads, "costs": costs, "curves": by_count}
    if args.steps:
        training = load_photographs(args.data, min(256, 4 * args.steps), network, besides=count)
        results["trained"] = stage(
            f"trained-{args.steps}",
            lambda: trained_convolutions(
                network, heads, fit, evaluated, training, steps=args.steps
            ),
        )
        print(results["trained"].change.mean("image").to_pandas())
    output.save(xr.DataTree.from_dict(results))
    draw(heads, costs, by_count).savefig(output.figure, dpi=200)
    report(heads, costs, by_count)
    output.print_files()
    return 0


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
        for fraction in (1 / 4, 1 / 2):
            change = by_count.change.sel(mode=mode, fraction=fraction)
            for control in ("random", "same layers", "deviation"):
                others = change.sel(order=control).mean("seed")
                difference = change.sel(order="shares").isel(seed=0) - others
                low, high = mean_interval(difference).values
                print(
                    f"{mode}, {fraction:.2f} of the heads, shares minus {control}: "
                    f"{float(difference.mean()):+.3f} [{low:+.3f}, {high:+.3f}]"
                )
                ordered &= control == "deviation" or high < 0
    print(f"check: the parts {'predict' if passed else 'do NOT predict'} costs")
    print(f"check: the shares {'order' if ordered else 'do NOT order'} heads")
    return passed and ordered


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = study_parser(__doc__)
    add = parser.add_argument_group("model and data").add_argument
    add("--model", default="vit_small_patch14_dinov2", help="name of a timm ViT")
    add("--pretrained", action="store_true", help="timm's own weights")
    add("--weights", metavar="FILE", help="weights of the model, or a saliency network")
    add("--data", help="folder of photographs, also in subfolders")
    add("--fit", type=from_least(8), default=16, help="photographs to fit (16)")
    add(
        "--steps",
        type=from_least(0),
        default=0,
        help="steps of training after half of the heads became convolutions (0)",
    )
    add("--evaluate", type=from_least(4), default=12, help="others to evaluate (12)")
    add_seed(parser, small="random weights, and pieces of two photographs")
    add_output(parser)
    args = parsed(parser, list(arguments or []) or None, "pretrained_heads")
    if args.small:
        args.fit, args.evaluate, args.steps = 8, 4, 1
    elif args.data is None or not (args.weights or args.pretrained):
        parser.error("expected --data, and --pretrained or --weights (or --small)")
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
