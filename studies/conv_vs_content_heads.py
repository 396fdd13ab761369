"""Whether content heads bring the robustness: the question that the T-CNN paper leaves open (Secs. 4 and 6).

    python studies/conv_vs_content_heads.py

The paper sees that some heads stay convolutional and others turn to content, and guesses that the latter bring the
robustness on blurred and faint images. Here heads are typed and taken away. A small ResNet learns real handwritten
digits in cluttered scenes; with several seeds its last stage is reparameterized as gated positional self-attention
(GPSA) and fine-tuned, recorded. The heads of each type are taken away, all of a type together, and as the control as
many heads drawn at random; likewise each head by itself. What a taken head gave is replaced by its mean over training
images, position by position, so that it says nothing of the image (--mode zero: by nothing). Each time accuracy is
measured on the same images: clean, in the four groups of ImageNet-C's corruptions, on contrast alone (the paper's guess
is of faint images), and after PGD attacks on the very model whose heads are gone.

Takes about 4 minutes, on 2 CPU cores. Writes into results/:
conv_vs_content_heads.png        A what taking each type away costs, beside random heads; B what each single head costs
conv_vs_content_heads.txt        the table of differences, with 95 % intervals over draws and images
conv_vs_content_heads.zarr       every answer: xarray.open_datatree
conv_vs_content_heads_*.zarr     the recordings

What one should see: taking heads away costs accuracy. The last sentence says whether content heads are worth more, or
less, than as many random ones, and whether more so on perturbed images than on clean ones; that is all that it says.
Differences are paired: the same images, the same training, with and without the heads. The bootstrap intervals, over
draws of random heads and images, are of these trainings as they are; what holds for other trainings too is said by t
intervals, wide as they are of three. (Convolutional heads sit in the early layers, content heads in the late ones: a
type and a place in the network cannot be told apart here.) The script ends by checking that the models learned, that
heads of both types were found, and that taking the convolutional ones away hurt.

On one's own model and images:

    python studies/conv_vs_content_heads.py --model resnet50 --pretrained --data path/to/imagenet --img-size 224 \
        --epochs 50 --seeds 3 --device cuda --amp --workers 16 --images 5000 --head-images 500 --out results/imagenet
"""

import argparse
import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tcnn_probe
from common.ablations import CLEAN, NOTHING, Sets, conditions, random_heads, single_heads, type_sets
from common.comparing import DRAWN, beyond_these_trainings, beyond_zero, by_side, costs, mean_and_interval
from common.data import PixelBatches
from common.options import add_output, fill_in, study_parser
from common.training import Training, add_training, begin, settle
from tcnn_probe.plot.style import BLUE, RED

PAIR = ("convolutional", "content")
SETS = [NOTHING, *PAIR, *(f"random for {kind}" for kind in PAIR)]
WITHIN = "contrast"  # of the digital group as well, so left out of means over conditions
MEASURED = ("mode", "draws", "images", "head_images", "severities", "epsilon")  # these leave the trainings as they are


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 if it saw what it stands for, 1 if not."""
    args = parse(arguments)
    study = begin("conv_vs_content_heads", args, stages=1 + args.seeds, later=MEASURED)
    study.train_cnn()
    groups, heads = [], []
    for number in range(args.seeds):
        for found, of_one in zip((groups, heads), one_training(study, args.seed + number), strict=True):
            found.append(of_one)
    labels = xr.DataArray([args.seed + number for number in range(args.seeds)], dims="training", name="training")
    of_types = xr.concat(groups, labels, join="outer").reindex(ablation=SETS)  # NaN of types that no training has
    tree = xr.DataTree.from_dict({"types": of_types, "heads": xr.concat(heads, labels, join="outer")})
    output = study.output
    tree.to_zarr(output.store, mode="w", consolidated=False)
    draw(tree).savefig(output.figure, dpi=200)
    lines = table(tree)
    output.beside(".txt").write_text(lines + "\n")
    print(lines)
    print(f"wrote {output.store}, {output.figure} and {output.beside('.txt')}")
    print(sentence(tree))
    return check(tree, study.cnn.num_classes)


def one_training(study: Training, seed: int) -> tuple[xr.Dataset, xr.Dataset]:
    """Fine-tune a T-CNN, type its heads, and take them away: by type, and one by one."""
    args = study.args
    store = study.output.beside(f"_{seed}.zarr")
    model, recording = study.tcnn(store, file=f"tcnn_{seed}", title=f"the T-CNN, seed {seed}", seed=seed)
    model.eval()
    types = tcnn_probe.head_types(recording).isel(epoch=-1)
    options = {"severities": args.severities, "epsilon": args.epsilon}
    options |= {"device": args.device, "seed": seed, "reference": None}
    if args.mode == "mean":
        torch.manual_seed(args.seed)
        options["reference"] = [images for images, _ in islice(study.loaders[0], -(-128 // args.batch_size))]

    def right(title: str, sets: Sets, images: int) -> xr.Dataset:
        how = "_".join(f"{getattr(args, name)}" for name in MEASURED).replace(" ", "")
        part = study.output.checkpoints / f"{title}_{seed}_{how}.zarr"
        batches = PixelBatches(study.cnn, study.loaders[1], images)
        return conditions(model=copy.deepcopy(model), sets=sets, batches=batches, part=part, **options)

    sets = type_sets(types) | random_heads(types, PAIR, args.draws, np.random.default_rng(seed))
    with ThreadPoolExecutor(2) as pool:  # a core each
        jobs = (("heads", {NOTHING: None} | single_heads(types), args.head_images), ("types", sets, args.images))
        one_by_one, by_type = pool.map(right, *zip(*jobs, strict=True))
    of_head = recording.isel(epoch=-1)[["gate", "attention_distance"]]
    return by_type.assign(head_type=types), one_by_one.assign(head_type=types, **of_head)


def differences(right: xr.DataArray) -> dict[str, xr.DataArray]:
    """By name, what each type costs more than as many random heads: (training, draw, condition, image)."""
    return {kind: costs(right, kind) - costs(right, f"random for {kind}") for kind in PAIR}


def draw(tree: xr.DataTree) -> Figure:
    """What types cost, by condition; and what each head costs, by its gate."""
    colors = {"convolutional": BLUE, "content": RED, "mixed": "0.6"}
    right = tree["types"].right.load()
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplot_mosaic("AAB")
    shown = [("convolutional", 1.0), ("random for convolutional", 0.35), ("content", 1.0), ("random for content", 0.35)]
    for place, (name, alpha) in enumerate(shown):
        bars(axes["A"], costs(right, name), place, colors[name.removeprefix("random for ")], alpha, name)
    axes["A"].set_xticks(range(right.sizes["condition"]), right.condition.values)
    axes["A"].axhline(0, color="0.3", lw=0.8)
    axes["A"].set_ylabel("accuracy lost (share of images)")
    figure.legend(*axes["A"].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    single(axes["B"], tree["heads"].dataset.load(), colors)
    titles = {"A": "heads of a type taken away; lines: 95 % bootstrap intervals", "B": "one head taken away"}
    for name, panel in axes.items():
        panel.set_title(f"{name}  {titles[name]}", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def bars(panel: Axes, cost: xr.DataArray, place: int, color: str, alpha: float, name: str) -> None:
    """One set of heads, a bar a condition."""
    means = cost.mean(["training", *DRAWN]).values
    bounds = tcnn_probe.bootstrap_interval(cost.mean("training"), DRAWN).values
    x = np.arange(len(means)) + 0.2 * (place - 1.5)
    label = f"{name} heads" if name in PAIR else f"as many as {name.removeprefix('random for ')}, at random"
    panel.bar(x, means, 0.19, color=mpl.colors.to_rgba(color, alpha), label=label)
    panel.errorbar(x, means, np.abs(bounds.T - means), fmt="none", ecolor="0.2", elinewidth=0.9)


def single(panel: Axes, heads: xr.Dataset, colors: dict[str, str]) -> None:
    """Each head by itself: what it costs over all conditions, by its gate."""
    cost = head_costs(heads).drop_sel(condition=WITHIN, errors="ignore").mean(["draw", "condition", "image"])
    for kind, color in colors.items():
        of_kind = (heads.head_type == kind).values.ravel()
        x, y = (values.values.ravel()[of_kind] for values in (heads.gate, cost.transpose(*heads.gate.dims)))
        panel.scatter(x, y, s=14, color=color, label=f"{kind} ({of_kind.sum()})")
    panel.axhline(0, color="0.3", lw=0.8)
    panel.set(xlabel=r"gate $\sigma(\lambda)$", ylabel="accuracy lost, mean of conditions")
    panel.legend(frameon=False, fontsize=8)


def head_costs(heads: xr.Dataset) -> xr.DataArray:
    """What each head costs: (training, layer, head, draw, condition, image)."""
    names = [[f"{layer}:{head}" for head in heads["head"].values] for layer in heads.layer.values]
    labels = xr.DataArray(names, {"layer": heads.layer, "head": heads["head"]}, ("layer", "head"))
    right = heads.right.reindex(ablation=[NOTHING, *labels.values.ravel()])  # NaN of heads that a layer lacks
    cost = right.sel(ablation=NOTHING, drop=True) - right.sel(ablation=labels).drop_vars("ablation")
    return cost.transpose("training", "layer", "head", "draw", "condition", "image")


def table(tree: xr.DataTree) -> str:
    """Accuracy, what types cost, what random heads cost, and the difference with its interval, by condition."""
    right, heads = tree["types"].right.load(), tree["heads"].dataset.load()
    types = tree["types"].head_type.load()
    lines = ["heads by type, of each training:"]
    for training in types.training.values:
        counts = ", ".join(f"{kind} {int((types.sel(training=training) == kind).sum())}" for kind in (*PAIR, "mixed"))
        lines.append(f"  seed {training}: {counts}")
    for kind, difference in differences(right).items():
        lines.append(f"\nwithout the {kind} heads: accuracy lost, with 95 % intervals over draws and images")
        lines.append(f"  {'':<10}{'accuracy':>9}  {'these heads':<25}{'as many at random':<25}{'difference':<25}")
        for condition in right.condition.values:
            whole = float(right.sel(ablation=NOTHING, condition=condition).mean())
            cells = [costs(right, kind), costs(right, f"random for {kind}"), difference]
            words = [interval_in_words(cell.sel(condition=condition)) for cell in cells]
            lines.append(f"  {condition:<10}{whole:>9.3f}  " + "".join(f"{word:<25}" for word in words))
    cost = head_costs(heads)
    lines.append("\nwithout one head: accuracy lost, mean over the heads of a type")
    lines.append(f"  {'':<10}" + "".join(f"{kind:<25}" for kind in PAIR))
    for condition in cost.condition.values:
        means = [cost.sel(condition=condition).where(heads.head_type == kind).mean(["layer", "head"]) for kind in PAIR]
        lines.append(f"  {condition:<10}" + "".join(f"{interval_in_words(mean):<25}" for mean in means))
    return "\n".join(lines)


def interval_in_words(values: xr.DataArray) -> str:
    """A mean and its interval."""
    mean, low, high = mean_and_interval(values)
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" if mean == mean else "none"


def sentence(tree: xr.DataTree) -> str:
    """What the intervals support, and nothing more."""
    right = tree["types"].right.load()
    difference = differences(right)["content"]
    there = difference.notnull().any(["draw", "condition", "image"])
    if not bool(there.any()):
        return "\nNo training had content heads: nothing can be said of them."
    excess = (difference - difference.sel(condition=CLEAN)).drop_sel(condition=CLEAN)
    worth = by_side(difference, "more than", "less than", "not distinguishably more or less than")
    beyond = by_side(excess, "higher than", "lower than", "not distinguishable from")
    own = "; ".join(f"{how} as many random heads on {where}" for how, where in worth)
    against = "; ".join(f"{how} that on clean images on {where}" for how, where in beyond)
    conditions = [str(name) for name in right.condition.values]
    others = [name for name in conditions if beyond_zero(beyond_these_trainings(difference.sel(condition=name)))]
    count = int(there.sum())
    these = f"In these {count} trainings" if count > 1 else "In one training"
    sizes = f"sets of random heads ({right.sizes['draw']} in each) and {right.sizes['image']} images"
    return (
        f"\n{these} of one CNN content heads are worth {own}. Their worth beyond that of "
        f"random heads is {against}. (95 % bootstrap intervals over {sizes}, not corrected for looking at "
        f"{len(conditions)} conditions.) Of other trainings t intervals over these support "
        f"{'a difference on ' + ', '.join(others) if others else 'no difference on any condition'}."
    )


def check(tree: xr.DataTree, classes: int) -> int:
    """Whether the models learned, both types were found, and taking convolutional heads away hurt."""
    right, types = tree["types"].right.load(), tree["types"].head_type.load()
    accuracy = float(right.sel(ablation=NOTHING, condition=CLEAN).mean("image").min())
    seen = accuracy > 2 / classes
    if not seen:
        print(f"check: a T-CNN did NOT learn: accuracy {accuracy:.3f}, expected more than {2 / classes:.3f}")
    for kind in PAIR:
        if not bool((types == kind).any()):
            print(f"check: NO {kind} heads were found in any training")
            seen = False
    mean, low, high = mean_and_interval(
        costs(right, "convolutional").drop_sel(condition=WITHIN, errors="ignore").mean("condition")
    )
    verdict = "hurts" if low > 0 else "does NOT hurt"
    print(
        f"check: taking convolutional heads away {verdict}: {mean:+.3f} [{low:+.3f}, {high:+.3f}] over all conditions"
    )
    return 0 if seen and low > 0 else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add_training(parser, small="600 digits without clutter, 4 epochs, 2 seeds, few images, a minute")
    add = parser.add_argument_group("interventions").add_argument
    add("--seeds", type=int, help="trainings of the T-CNN, from --seed on (default: 3)")
    add("--mode", choices=("mean", "zero"), default="mean", help="what becomes of a head's output (default: mean)")
    add("--draws", type=int, help="random sets of heads for each type (default: 3)")
    add("--images", type=int, help="validation images for types (default: 64; 1000 of --data)")
    add("--head-images", type=int, help="and for single heads (default: 16; 200 of --data)")
    add("--severities", type=int, nargs="+", choices=range(1, 6), default=[1], help="of corruptions (default: 1)")
    add("--epsilon", type=float, default=1 / 255, help="of PGD, in pixels of 0 to 1 (default: 1/255)")
    add_output(parser)
    args = parser.parse_args(arguments)
    settle(parser, args, digits={"epochs": 5}, small={"cnn_epochs": 12})
    defaults = {"seeds": 3, "draws": 3, "images": 64, "head_images": 16}
    if args.small:
        defaults = {"seeds": 2, "draws": 1, "images": 16, "head_images": 2}
    if args.data != "digits":
        defaults = {"seeds": 3, "draws": 3, "images": 1000, "head_images": 200}
    fill_in(args, defaults)
    if min(args.seeds, args.draws) < 1 or min(args.images, args.head_images) < 2 or args.epsilon <= 0:
        parser.error("--seeds and --draws must be at least 1, --images and --head-images 2, --epsilon positive")
    return args


if __name__ == "__main__":
    sys.exit(main())
