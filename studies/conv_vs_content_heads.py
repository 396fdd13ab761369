"""Whether heads that leave convolution bring the robustness, a question that the T-CNN paper leaves open (Secs. 4, 6).

    python studies/conv_vs_content_heads.py

Takes about 14 minutes on two CPU cores.

What one should see (conv_vs_content_heads.png): without the convolutional heads accuracy falls, but it stays if these
look where they look on average ("static"). What the content heads are worth, and what content is worth to them, is said
by the last sentences that are printed, and by no other: more or less than as many random heads, on which images, and
whether other trainings would agree.

How: a small ResNet learns handwritten digits in cluttered scenes. With several seeds its last stage is reparameterized
as gated positional self-attention (GPSA) and fine-tuned. The papers' start, all gates at 0.73 and one rate for all
weights, gives no content heads within so few epochs: where gates fall, heads look everywhere alike. So on the digits
this departs from it: every second head starts with a gate of 0.05, queries and keys five times as large, and these
learn five times as fast. Heads are then typed by ``tcnn_probe.head_types``: the image decides where a "content" head
looks, by its content information. The paper guesses that heads which leave convolution bring the robustness.
All heads of a type are ablated at once, and as the control as many heads drawn at random; likewise each head by itself.
Their outputs are zeroed; or their attention is replaced by its mean over training images, so that they look at places
and not at content ("static"); or by that of a training image, whose content is another ("shuffled"); or their gates are
set to 1, which leaves the positional part of attention alone ("positional"). Accuracy is measured on the same images
with and without: clean, in the four groups of ImageNet-C's corruptions, on contrast alone (faint images), and under PGD
attacks on the model whose heads are ablated.
Content information is compared with that of the same heads untrained, and of trainings on shuffled labels. A ViT, plain
attention on the ResNet's features, is fine-tuned on the same scenes and recorded beside it.
Intervals over random draws and images are for these trainings as they are; t intervals, wide as they are
with three trainings, are for others. The types may sit in different layers, so this does not tell type from place.

Writes into results/:
conv_vs_content_heads.png            what ablating each type costs, a row a mode, beside random heads; and single heads
conv_vs_content_heads_evolution.png  gates and content information of each head by epoch, T-CNN (first seed) and ViT
conv_vs_content_heads.txt            the table of differences, with 95 % intervals over draws and images
conv_vs_content_heads.zarr           every answer: xarray.open_datatree
conv_vs_content_heads_*.zarr         the recordings

It ends by checking that the models learned, that both types were found, and that removing convolutional heads hurt.

On your own model and images:

    python studies/conv_vs_content_heads.py --model resnet50 --pretrained --data path/to/imagenet --img-size 224 \
        --epochs 50 --seeds 3 --device cuda --amp --workers 16 --images 5000 --head-images 500 --out results/imagenet
"""

import argparse
import copy
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from common.content_evolution import draw_content, gain, numbers
from common.data import PixelBatches
from common.ending import ended, finish, learned
from common.head_removal import (
    MODES,
    NOTHING,
    Sets,
    conditions,
    random_heads,
    single_heads,
    type_sets,
)
from common.head_types import COLORS, PAIR
from common.options import (
    add_output,
    fill_in,
    from_least,
    parsed,
    positive_number,
    study_parser,
)
from common.removal_costs import DRAWN, WITHIN, costs, head_costs, mean_and_interval
from common.removal_report import sentence, table
from common.training import Training, add_training, begin, settle
from tcnn_probe import evaluation

SETS = [NOTHING, *PAIR, *(f"random for {kind}" for kind in PAIR)]
MEASURED = (
    "modes",
    "draws",
    "images",
    "head_images",
    "corruptions",
    "severities",
    "epsilon",
)  # no part of training


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 if it saw what it stands for, 3 if not."""
    args = parse(arguments)
    shuffles = args.data == "digits" and not args.small
    has_vit = args.data == "digits" and args.model is None
    study = begin(
        "conv_vs_content_heads",
        args,
        stages=1 + args.seeds * (1 + shuffles) + has_vit,
        later=MEASURED,
    )
    study.train_cnn()
    seeds = range(args.seed, args.seed + args.seeds)
    groups, heads, contents = zip(
        *(one_training(study, seed) for seed in seeds), strict=True
    )
    labels = xr.DataArray(list(seeds), dims="training", name="training")
    of_types = xr.concat(groups, labels, join="outer").reindex(
        ablation=SETS
    )  # NaN of types that no training has
    parts = {
        "types": of_types,
        "heads": xr.concat(heads, labels, join="outer"),
        "content": xr.concat(contents, labels),
    }
    output = study.output
    if shuffles:
        by_seed = [
            numbers(tcnn(study.on_shuffled_labels(seed), seed, "_shuffled_labels")[1])
            for seed in seeds
        ]
        parts["shuffled_labels"] = xr.concat(by_seed, labels)
    if has_vit:
        parts["vit"] = numbers(study.vit(output.beside("_vit.zarr")))
    tree = xr.DataTree.from_dict(parts)
    output.save(tree)
    draw(tree).savefig(output.figure, dpi=200)
    evolution = {"T-CNN": contents[0]} | ({"ViT": parts["vit"]} if has_vit else {})
    draw_content(evolution).savefig(output.beside("_evolution.png"), dpi=200)
    lines = f"{table(tree)}\n\n{gain(parts['content'], parts.get('shuffled_labels'))}"
    output.beside(".txt").write_text(lines + "\n")
    print(lines)
    print(
        f"wrote {output.store}, {output.figure}, {output.beside('_evolution.png')} and {output.beside('.txt')}"
    )
    print(sentence(tree))
    return finish(check(tree, study.chance, small=args.small), args.data)


def tcnn(study: Training, seed: int, labels: str = "") -> tuple[nn.Module, xr.Dataset]:
    """Fine-tune a T-CNN, every head recorded; ``labels`` tells it from another one."""
    name, gates = f"{labels}_{seed}", study.args.gating
    start = {
        "gating": gates if gates[1:] else gates[0],
        "qk_scale": study.args.qk_scale,
    }
    title = f"the T-CNN,{labels.replace('_', ' ')} seed {seed}"
    return study.tcnn(
        study.output.beside(f"{name}.zarr"),
        file=f"tcnn{name}",
        title=title,
        seed=seed,
        start=start,
    )


def one_training(
    study: Training, seed: int
) -> tuple[xr.Dataset, xr.Dataset, xr.Dataset]:
    """Fine-tune a T-CNN, type its heads, and remove them, by type, and one by one; and what they were at each epoch."""
    args = study.args
    model, recording = tcnn(study, seed)
    model.eval()
    content = numbers(recording)
    types = content.head_type
    options = {
        "corruptions": args.corruptions,
        "severities": args.severities,
        "epsilon": args.epsilon,
    }
    options |= {"device": args.device, "seed": seed, "steps": 2 if args.small else 5}
    torch.manual_seed(args.seed)
    count = 32 if args.small else 128
    options["reference"] = [
        images for images, _ in islice(study.loaders[0], -(-count // args.batch_size))
    ]

    def right(title: str, sets: Sets, images: int, mode: str) -> xr.Dataset:
        how = zlib.crc32(repr([getattr(args, name) for name in MEASURED[1:]]).encode())
        part = study.output.checkpoints / f"{title}_{mode}_{seed}_{how:08x}.zarr"
        batches = PixelBatches(study.cnn, study.loaders[1], images)
        return conditions(
            model=copy.deepcopy(model),
            sets=sets,
            batches=batches,
            mode=mode,
            part=part,
            **options,
        )

    sets = type_sets(types) | random_heads(
        types, args.draws, np.random.default_rng(seed)
    )
    alone: Sets = {NOTHING: None} | single_heads(types)
    jobs = [("heads", alone, args.head_images, args.modes[0])]
    jobs += [("types", sets, args.images, mode) for mode in args.modes]
    with ThreadPoolExecutor(2) as pool:  # a core each
        one_by_one, *by_mode = pool.map(right, *zip(*jobs, strict=True))
    by_type = xr.concat(
        by_mode, xr.DataArray(np.array(args.modes, object), dims="mode", name="mode")
    )
    last = recording.isel(epoch=-1, drop=True)
    by_type = by_type.assign(
        head_type=types, top1=last.top1, top1_images=last.images.max()
    )
    return (
        by_type,
        one_by_one.assign(head_type=types, **last[["gate", "attention_distance"]]),
        content,
    )


def draw(tree: xr.DataTree) -> Figure:
    """What types cost, a row for each mode, by condition; and what each head costs, by its gate."""
    right = tree["types"].right.load()
    modes = [str(mode) for mode in right.mode.values]
    figure = Figure(figsize=(11, 1.6 + 3 * len(modes)), layout="constrained")
    axes = figure.subplot_mosaic([[mode, mode, "heads"] for mode in modes])
    shown = [
        ("convolutional", 1.0),
        ("random for convolutional", 0.35),
        ("content", 1.0),
        ("random for content", 0.35),
    ]
    for mode in modes:
        panel = axes[mode]
        for place, (name, alpha) in enumerate(shown):
            bars(panel, costs(right.sel(mode=mode), name), place, alpha, name)
        panel.set_xticks(range(right.sizes["condition"]), right.condition.values)
        panel.axhline(0, color="0.3", lw=0.8)
        panel.set_ylabel("accuracy lost (share of images)")
    figure.legend(
        *axes[modes[0]].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    single(axes["heads"], tree["heads"].dataset.load())
    for letter, (name, panel) in zip("ABCDE", axes.items(), strict=False):
        title = (
            f"{modes[0]}, one head"
            if name == "heads"
            else f"{name}; lines: 95 % intervals"
        )
        panel.set_title(f"{letter}  {title}", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def bars(panel: Axes, cost: xr.DataArray, place: int, alpha: float, name: str) -> None:
    """One set of heads, a bar for each condition."""
    means = cost.mean(["training", *DRAWN]).values
    bounds = evaluation.mean_interval(cost.mean("training"), DRAWN).values
    x = np.arange(len(means)) + 0.2 * (place - 1.5)
    kind = name.removeprefix("random for ")
    label = f"{kind} heads" if name in PAIR else f"as many as {kind}, at random"
    panel.bar(
        x, means, 0.19, color=mpl.colors.to_rgba(COLORS[kind], alpha), label=label
    )
    panel.errorbar(
        x, means, np.abs(bounds.T - means), fmt="none", ecolor="0.2", elinewidth=0.9
    )


def single(panel: Axes, heads: xr.Dataset) -> None:
    """What each head costs, mean over the conditions, by its gate."""
    cost = (
        head_costs(heads)
        .drop_sel(condition=WITHIN, errors="ignore")
        .mean(["draw", "condition", "image"])
    )
    for kind, color in COLORS.items():
        of_kind = (heads.head_type == kind).values.ravel()
        x, y = (
            values.values.ravel()[of_kind]
            for values in (heads.gate, cost.transpose(*heads.gate.dims))
        )
        panel.scatter(x, y, s=14, color=color, label=f"{kind} ({of_kind.sum()})")
    panel.axhline(0, color="0.3", lw=0.8)
    panel.set(
        xlabel=r"gate $\sigma(\lambda)$", ylabel="accuracy lost, mean of conditions"
    )
    panel.legend(frameon=False, fontsize=8)


def check(tree: xr.DataTree, chance: float, *, small: bool = False) -> bool:
    """Whether the models learned, both types were found and removing the convolutional heads hurt.

    The few images of the small form do not tell the last, so there it is printed only.
    """
    of_types = tree["types"].dataset.load()
    right, types = of_types.right.isel(mode=0), of_types.head_type
    seen = learned(
        "a T-CNN", float(of_types.top1.min()), int(of_types.top1_images.min()), chance
    )
    for kind in PAIR:
        if not bool((types == kind).any()):
            print(f"check: NO {kind} heads were found in any training")
            seen = False
    of_condition = costs(right, "convolutional").drop_sel(
        condition=WITHIN, errors="ignore"
    )
    mean, low, high = mean_and_interval(of_condition.mean("condition"))
    what = f"{MODES[str(right.mode.values)]} the convolutional heads {'hurts' if low > 0 else 'does NOT hurt'}"
    print(f"check: {what}: {mean:+.3f} [{low:+.3f}, {high:+.3f}] over all conditions")
    return seen and (low > 0 or small)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add_training(
        parser,
        small="1 seed, 2 modes, 2 corruptions, few images, heads peaked from the start, 20 seconds",
    )
    add = parser.add_argument_group("interventions").add_argument
    add(
        "--seeds",
        type=from_least(1),
        help="trainings of the T-CNN, from --seed on (default: 3)",
    )
    gates = "initial lambda of the gates, one number or one for each head (default: 1 and -3 in turn; 1 with --data)"
    add("--gating", type=float, nargs="+", help=gates)
    add(
        "--qk-scale",
        type=positive_number,
        help="initial scale of queries and keys (default: 5; 1 with --data)",
    )
    add(
        "--modes",
        nargs="+",
        choices=MODES,
        help="of tcnn_probe.ablate, the first for single heads too (default: zero static shuffled positional)",
    )
    add(
        "--draws",
        type=from_least(1),
        help="random sets of heads for each type (default: 3)",
    )
    add(
        "--images",
        type=from_least(2),
        help="validation images for types (default: 64; 1000 of --data)",
    )
    add(
        "--head-images",
        type=from_least(2),
        help="and for single heads (default: 16; 200 of --data)",
    )
    add(
        "--corruptions",
        nargs="+",
        choices=evaluation.CORRUPTIONS,
        metavar="NAME",
        help="(default: all 15)",
    )
    add(
        "--severities",
        type=int,
        nargs="+",
        choices=range(1, 6),
        default=[1],
        help="of corruptions (default: 1)",
    )
    add(
        "--epsilon",
        type=positive_number,
        default=1 / 255,
        help="of PGD, in pixels of 0 to 1 (default: 1/255)",
    )
    add_output(parser)
    args = parsed(parser, arguments, "conv_vs_content_heads")
    modes = (
        ["zero", "static"]
        if args.small
        else ["zero", "static", "shuffled", "positional"]
    )
    defaults = {"seeds": 3, "draws": 3, "images": 64, "head_images": 16}
    if args.small:
        defaults = {
            "seeds": 1,
            "draws": 2,
            "images": 16,
            "head_images": 2,
            "corruptions": ["shot_noise", "contrast"],
        }
    if args.modes and args.modes[0] not in ("zero", "mean"):
        parser.error("the first of --modes removes heads: zero or mean")
    settle(parser, args)
    if (
        args.data == "digits"
    ):  # so that heads attend to content within six epochs, and others convolve
        high, scale = (3.0, 20.0) if args.small else (1.0, 5.0)
        defaults |= {
            "gating": [*[high, -3.0] * 4, high],
            "qk_scale": scale,
            "qk_lr": 5e-3,
        }
    else:
        defaults = {
            "seeds": 3,
            "draws": 3,
            "images": 1000,
            "head_images": 200,
            "gating": [1.0],
            "qk_scale": 1.0,
        }
    fill_in(args, {"modes": modes} | defaults)
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
