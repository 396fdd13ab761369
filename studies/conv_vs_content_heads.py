r"""Convolutional and content heads: whether those
that leave convolution bring robustness (T-CNN paper, Secs. 4, 6).

    python studies/conv_vs_content_heads.py

Takes about 14 minutes on two CPU cores.

What one should see (conv_vs_content_heads.png): without the convolutional heads accuracy falls, but
it stays if these look where they look on average ("static"), nearly by definition of the type. Only
the last sentences that are printed say what the content heads are worth, and what content is worth
to them: more or less than as many random heads, on which images, and whether other trainings would
agree.

How: a small ResNet learns handwritten digits in cluttered scenes. With several seeds its last stage
is reparameterized as gated positional self-attention (GPSA) and fine-tuned. The papers' start, all
gates at 0.73 and one rate for all weights, gives no content heads within so few epochs: where gates
fall, heads look everywhere alike. On the digits the study therefore departs from it: every second
head starts with a gate of 0.05, and queries and keys start five times as large and learn five times
as fast. Heads are then typed by ``tcnn_probe.head_types``: of a "content" head (here with those
called "salient") at least half of the selectivity is content information, so that the image decides
where it looks. The paper guesses that heads which leave convolution bring the robustness. All heads
of a type are ablated at once and, as the control, as many heads drawn at random; and each head by
itself. Their outputs are zeroed; or their attention is replaced by its mean over training images,
so that they look at places and not at content ("static"); or by that of a training image, which has
other content ("shuffled"); or their gates are set to 1, so that only the positional part of
attention remains ("positional"). Accuracy is measured on the same images with and without the
ablation: clean, in the four groups of ImageNet-C's corruptions, on contrast alone (faint images),
and under PGD attacks on the model whose heads are ablated. Content information is compared with
that of the same heads untrained, and of trainings on shuffled labels. A ViT, plain attention on the
ResNet's features, is fine-tuned on the same scenes and recorded for comparison. Intervals over
random draws and images hold for these trainings only; t intervals, which are wide with three
trainings, hold for others. The types may lie in different layers, so the study does not separate
the effect of type from depth.

Writes into results/:
conv_vs_content_heads.png            cost of ablating each type, a row per mode, beside random
                                     heads; and single heads
conv_vs_content_heads_evolution.png  gates and content information of each head by epoch, T-CNN
                                     (first seed) and ViT
conv_vs_content_heads.txt            the table of differences, with 95 % intervals over draws and
                                     images
conv_vs_content_heads.zarr           every answer: xarray.open_datatree
conv_vs_content_heads_*.zarr         the recordings

It ends by checking that the models learned, that both types were found, and that removing
convolutional heads hurt.

On your own model and images:

    python studies/conv_vs_content_heads.py --model resnet50 --pretrained --data path/to/imagenet \
        --img-size 224 --epochs 50 --seeds 3 --device cuda --amp --workers 16 --images 5000 \
        --head-images 500 --out results/imagenet
"""

import argparse
import copy
import sys
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tcnn_probe
from common.data import PixelBatches, with_shuffled_labels
from common.figures import PAIR
from common.head_removal import (
    MODES,
    NOTHING,
    WITHIN,
    HeadSets,
    costs,
    mean_and_interval,
    mean_by_condition,
    random_heads,
    single_heads,
    type_sets,
)
from common.models import small_vit
from common.option_table import CORRUPTIONS_OPTION, severities_option, training_options
from common.options import Option, from_least, need_model, parse_options, positive_number
from common.output import InputError, RunOutput, ended, finish, seeds_of
from common.removal_report import SHOWN, draw, draw_content, gain, sentence, table
from common.training import Study, begin
from common.verdicts import learned
from tcnn_probe import evaluation

SETS = [NOTHING, *PAIR, *(f"random for {kind}" for kind in PAIR)]
# Options that do not affect training, and so may change when a run is resumed.
MEASURED = (
    "modes",
    "draws",
    "images",
    "head_images",
    "corruptions",
    "severities",
    "epsilon",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, and train the CNN.
    study = begin("conv_vs_content_heads", args, later=MEASURED)
    study.train_cnn()

    # With each seed: convert and fine-tune it, record and type its heads, ablate them by type and
    # one by one.
    parts = measure_trainings(study)
    # The controls of content information: permuted labels, which no image tells, and plain
    # attention.
    if args.data == "digits" and not args.small:
        shuffled = [typed(record_shuffled(study, seed)) for seed in seeds_of(args)]
        parts["shuffled_labels"] = xr.concat(shuffled, parts["types"].training)
    if args.data == "digits" and args.model is None:
        torch.manual_seed(args.seed)
        vit = small_vit(study.model, args.img_size)
        store = study.output.beside("_vit.zarr")
        parts["vit"] = typed(study.record(vit, store, "vit", "a vision transformer"))

    tree = xr.DataTree.from_dict(parts)
    report(study.output, tree)
    return finish(check(tree, study.chance), args)


def measure_trainings(study: Study) -> dict[str, xr.Dataset]:
    """Return right answers without heads of each type and without single heads, and content
    information, by training.
    """
    by_type, by_head, contents = [], [], []
    for seed in seeds_of(study.args):
        tcnn, recording = record_tcnn(study, seed)
        content = typed(recording)
        of_types, of_heads = ablate(study, tcnn.eval(), content.head_type, seed)
        last = recording.isel(epoch=-1, drop=True)
        by_type.append(of_types.assign(top1=last.top1, top1_images=last.images.max()))
        by_head.append(of_heads.assign(last[["gate", "attention_distance"]]))
        contents.append(content)
    trainings = xr.DataArray(list(seeds_of(study.args)), dims="training", name="training")
    types = xr.concat(by_type, trainings, join="outer")
    return {
        "types": types.reindex(ablation=SETS),  # NaN for types that no training has
        "heads": xr.concat(by_head, trainings, join="outer"),
        "content": xr.concat(contents, trainings),
    }


def record_tcnn(study: Study, seed: int, labels: str = "") -> tuple[nn.Module, xr.Dataset]:
    """Convert the CNN and fine-tune it, with every head recorded.

    Args:
        study: CNN, data and recipe.
        seed: Seed of the new queries and keys, and of the training.
        labels: Suffix of files that tells these labels from the true ones.
    """
    name, gates = f"{labels}_{seed}", study.args.gating
    start = {
        "gating": gates if len(gates) > 1 else gates[0],
        "qk_scale": study.args.qk_scale,
    }
    title = f"the T-CNN,{labels.replace('_', ' ')} seed {seed}"
    store = study.output.beside(f"{name}.zarr")
    return study.record_tcnn(store, f"tcnn{name}", title, seed=seed, start=start)


def record_shuffled(study: Study, seed: int) -> xr.Dataset:
    """Fine-tune the T-CNN on permuted labels, from which no head can learn what is in an image."""
    train, validation = study.loaders
    loaders = with_shuffled_labels(train, seed), validation
    return record_tcnn(replace(study, loaders=loaders), seed, "_shuffled_labels")[1]


def typed(recording: xr.Dataset) -> xr.Dataset:
    """Return gates and content information by epoch,
    (epoch, layer, head), with each head's type at the end.
    """
    types = tcnn_probe.head_types(recording).isel(epoch=-1, drop=True)
    # Both kinds of content are ablated together: heads of either look where the image decides.
    types = types.where(types != "salient", "content")
    # A ViT has no gates.
    shown = recording[[name for name in SHOWN if name in recording]]
    return shown.assign(head_type=types)


def ablate(
    study: Study, tcnn: nn.Module, types: xr.DataArray, seed: int
) -> tuple[xr.Dataset, xr.Dataset]:
    """Measure the T-CNN's right answers without the heads of each type,
    in each mode, and without each single head.

    Args:
        study: Data, command line and output folder.
        tcnn: Model in eval mode, which is left unchanged.
        types: Type of each head, (layer, head).
        seed: Seed of the random heads, of corruptions and of attacks.

    Returns:
        ``right`` (mode, ablation, draw, condition, image), the share of right answers over
        corruptions and severities, and the same of single heads without ``mode``.
    """
    args = study.args
    reference = reference_images(study)
    # The name of saved answers depends on the options that affect them, so that other options are
    # measured anew.
    options = repr([getattr(args, name) for name in MEASURED[1:]])
    checksum = zlib.crc32(options.encode())

    def answers(sets: HeadSets, images: int, mode: str) -> xr.Dataset:
        model = copy.deepcopy(tcnn)  # each thread ablates its own copy
        ablated = {name: without(model, heads, mode, reference) for name, heads in sets.items()}
        batches = PixelBatches(study.model, study.loaders[1], images)
        pgd = {
            "epsilon": args.epsilon,
            "step": args.epsilon / 2,
            "steps": 2 if args.small else 5,
        }
        results = evaluation.robustness(
            ablated,
            batches,
            corruptions=args.corruptions,
            severities=args.severities,
            attacks={"pgd": pgd},
            seeds=(seed,),
            normalization=batches.normalization,
            device=args.device,
        )
        return mean_by_condition(results)

    def measure(title: str, sets: HeadSets, images: int, mode: str) -> xr.Dataset:
        name = f"{title}_{mode}_{seed}_{checksum:08x}"
        return study.output.once(name, lambda: answers(sets, images, mode))

    random = np.random.default_rng(seed)
    sets = type_sets(types) | random_heads(types, args.draws, random)
    singles: HeadSets = {NOTHING: None} | single_heads(types)
    jobs = [("heads", singles, args.head_images, args.modes[0])]
    jobs += [("types", sets, args.images, mode) for mode in args.modes]
    with ThreadPoolExecutor(2) as pool:  # one thread for each core
        by_head, *by_mode = pool.map(measure, *zip(*jobs, strict=True))
    modes = xr.Variable("mode", np.array(args.modes, object))
    by_type = xr.concat(by_mode, modes)
    return by_type.assign(head_type=types), by_head.assign(head_type=types)


def reference_images(study: Study) -> list[Tensor]:
    """Return batches of training images, over which attention is averaged:
    the same for all seeds.
    """
    torch.manual_seed(study.args.seed)
    images = 32 if study.args.small else 128
    batches = -(-images // study.args.batch_size)
    train = study.loaders[0]
    # A separate loader is used: that of the training mixes photographs, and shows the same ones
    # several times.
    loader = DataLoader(
        train.dataset,
        train.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=train.num_workers,
    )
    return [images for images, _ in islice(loader, batches)]


def without(
    model: nn.Module,
    heads: xr.DataArray | None,
    mode: str,
    reference: Sequence[Tensor] = (),
) -> Callable[[Tensor], Tensor]:
    """Return the model with some of its heads ablated, as a function of images.

    Args:
        model: Model, which is restored after each call.
        heads: Booleans (layer, head), True for heads to ablate; None for none.
        mode: Mode of :func:`tcnn_probe.ablate`.
        reference: Batches of images, as the model takes them, over which means are taken; in the
            mode "shuffled" the attention of the first batch is given to other images.
    """
    if heads is None or not heads.any():
        return model
    images = {"mean": reference, "static": reference, "shuffled": reference[:1]}
    ablation = tcnn_probe.ablate(model, heads, mode, images=images.get(mode))  # type: ignore[arg-type]
    ablation.remove()  # it is entered for each call, since other sets of heads share the model

    def classify(images: Tensor) -> Tensor:
        with ablation:
            return model(images)

    return classify


def report(output: RunOutput, tree: xr.DataTree) -> None:
    """Write the numbers, the figures and the table, and print what they support."""
    output.save(tree)
    content = tree["content"].dataset
    evolution = {"T-CNN": content.isel(training=0)}
    if "vit" in tree:
        evolution["ViT"] = tree["vit"].dataset
    files = [output.beside("_evolution.png"), output.beside(".txt")]
    draw_content(evolution).savefig(files[0], dpi=200)
    shuffled = tree["shuffled_labels"].dataset if "shuffled_labels" in tree else None
    lines = f"{table(tree)}\n\n{gain(content, shuffled)}"
    files[1].write_text(lines + "\n")
    output.show(draw(tree), lines, files=files)
    print(sentence(tree))


def check(tree: xr.DataTree, chance: float) -> bool:
    """Return whether the models learned, both types were found
    and removing the convolutional heads hurt.
    """
    by_type = tree["types"].dataset.load()
    right, types = by_type.right.isel(mode=0), by_type.head_type
    worst = float(by_type.top1.min())
    images = int(by_type.top1_images.min())
    passed = learned("a T-CNN", worst, images, chance)
    for kind in PAIR:
        if not bool((types == kind).any()):
            print(f"check: NO {kind} heads were found in any training")
            passed = False
    by_condition = costs(right, "convolutional").drop_sel(condition=WITHIN, errors="ignore")
    mean, low, high = mean_and_interval(by_condition.mean("condition"))
    verdict = "hurts" if low > 0 else "does NOT hurt"
    removing = f"{MODES[str(right.mode.values)]} the convolutional heads"
    print(f"check: {removing} {verdict}: {mean:+.3f} [{low:+.3f}, {high:+.3f}] over all conditions")
    return passed and low > 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    interventions = [
        Option("--seeds", "trainings of the T-CNN, from --seed on", from_least(1), 3, small=1),
        # High and low gates in turn, so that heads attend to content within six epochs, and others
        # convolve; with --data the paper's start.
        Option(
            "--gating",
            "initial lambda of the gates, one number or one for each head (default: 1 and -3 in "
            "turn; 1 with --data)",
            float,
            [*[1.0, -3.0] * 4, 1.0],
            small=[*[3.0, -3.0] * 4, 3.0],
            data=[1.0],
        ),
        Option(
            "--qk-scale",
            "initial scale of queries and keys",
            positive_number,
            5.0,
            small=20.0,
            data=1.0,
        ),
        Option(
            "--modes",
            "modes of tcnn_probe.ablate, the first for single heads too",
            default=["zero", "static", "shuffled", "positional"],
            small=["zero", "static"],
            choices=MODES,
        ),
        Option("--draws", "random sets of heads for each type", from_least(1), 3, small=2),
        Option("--images", "validation images for types", from_least(2), 64, small=8, data=1000),
        Option(
            "--head-images",
            "validation images for single heads",
            from_least(2),
            16,
            small=2,
            data=200,
        ),
        replace(CORRUPTIONS_OPTION, small=["contrast"]),
        severities_option([1]),
        Option(
            "--epsilon",
            "size of PGD's perturbations, for pixels in [0, 1] (default: 1/255)",
            positive_number,
            1 / 255,
        ),
    ]
    small = "1 seed, 1 epoch, 2 modes, 1 corruption, few images, heads peaked from the start"
    groups = {
        # The rate of queries and keys is five times that of the other weights.
        **training_options(small, epochs=(6, 1), qk_lr=5e-3),
        "interventions": interventions,
    }
    args = parse_options(__doc__, "conv_vs_content_heads", arguments, groups, need_model)
    if args.modes[0] not in ("zero", "mean"):
        raise InputError("the first of --modes removes heads: zero or mean")
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
