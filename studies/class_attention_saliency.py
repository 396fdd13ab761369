r"""Saliency of a convnet by attention and by gradients,
and which is right (PatchConvNet paper, Figs. 1 and 2).

    python studies/class_attention_saliency.py

Takes about 3 minutes on one CPU core.

What one should see: class attention of the PatchConvNet, on 16 x 16 patches and without any
gradient, comes within 4 pixels (one patch) of the digit far more often than chance, and more often
than Grad-CAM. Gradients of single pixels fall on the strokes themselves more often. In the ResNet,
with 4 x 4 cells in its last map, attention finds the digit less often; its accuracy is about the
same with the learned pooling as without. studies/pages/class_attention_saliency.md has the ranges
of several seeds; the table that is printed has this run's numbers, and the last lines compare class
attention with Grad-CAM, image by image, with intervals. After so short a training the tokens of the
classes look at almost the same places.

How: a small ResNet with average pooling and a small PatchConvNet learn handwritten digits in
cluttered scenes. The ResNet is trained further with a learned pooling in place of its average
(``tcnn_model.add_attention_pool``) and, as the control, unchanged; the PatchConvNet is trained
further with one token for each class (``tcnn_model.specialize``). Every few epochs the saliency of
each method is compared with the place of the digit, and with the response of the model when pixels
are removed. Occlusion is coarse here (windows of a quarter of the image), and integrated gradients
take 12 steps.

Writes into results/:
class_attention_saliency_maps.png       images, and maps of the models side by side (Fig. 1 of the
                                        paper)
class_attention_saliency_classes.png    maps of the three most probable classes of each image (Fig.
                                        2)
class_attention_saliency.png            faithfulness by epoch and method, with 95 % intervals over
                                        images
class_attention_saliency.zarr           the numbers behind it, a group for each model:
                                        xarray.open_datatree
class_attention_saliency_*.zarr         what tcnn_probe recorded of each model's pooling, at every
                                        epoch

With --heads 4 the models are two PatchConvNets, whose poolings have one head and four (Table 5 of
the paper), and the last lines say whether the map of one head is a better explanation than the mean
of four.

It ends by checking that the models learned, and that the class attention of the PatchConvNet comes
near the digit more often than chance.

On your own model and images: a trained model is explained as it is (in a minute or so), or with
--epochs fine-tuned first; on the frozen trunk of a convnet, attention is then trained in place of
the pooling:

    python studies/class_attention_saliency.py --model deit_small_patch16_224 --pretrained \
        --data path/to/imagenet
    python studies/class_attention_saliency.py --model resnet50 --pretrained \
        --data path/to/imagenet --epochs 10
"""

import argparse
import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import xarray as xr
from timm.utils import freeze
from torch import nn

import tcnn_probe
from common.data import (
    Loaders,
    Probed,
    boxed_images,
    chance,
    digits_loaders,
    own_model_and_data,
    probed_images,
)
from common.ending import ended, finish, learned, refused
from common.models import small_patchconvnet, small_resnet
from common.options import (
    add_data,
    add_machine,
    add_output,
    check_data_options,
    fill_in,
    from_least,
    parsed,
    positive_number,
    study_parser,
)
from common.output import RunOutput, write_whole
from common.saliency_figures import draw_by_class, draw_faithfulness, draw_maps
from common.saliency_report import report, several_heads
from common.saliency_scores import logits, score, usable_methods
from common.training import warmup
from common.training_options import add_augment, settle_augment
from tcnn_model import (
    AttentionPool2d,
    EpochResult,
    add_attention_pool,
    finetune,
    specialize,
)
from tcnn_probe import evaluation

Models = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Run:
    """Model and its training; ``make`` builds the model from those that were trained before."""

    name: str
    make: Callable[[Models], nn.Module]
    epochs: int
    lr: float = 0.0
    probed: bool = True

    @property
    def slug(self) -> str:
        """Name for files."""
        return self.name.lower().replace(",", "").replace(" ", "_").replace("/", "_")


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return 0 if its checks hold or the images are your own, else 3."""
    args = parse(arguments)

    # Load models and data, and the images to explain.
    with refused(ValueError, RuntimeError, OSError):
        runs, loaders = plan(args)
        validation = loaders[1].dataset
        if args.boxes:
            probed = boxed_images(args.boxes, validation, runs[0].make({}))
        else:
            probed = probed_images(validation, args.images)
        output = RunOutput.from_args(args, "class_attention_saliency")

    # Train each model, record its class attention, and score saliency by every method.
    models: dict[str, nn.Module] = {}
    scores: dict[str, xr.Dataset] = {}
    for number, run in enumerate(runs, 1):
        torch.manual_seed(args.seed)
        model = models[run.name] = run.make(models).to(args.device)
        title = f"{number}/{len(runs)} {run.name}"
        results = train(run, model, title, loaders, probed, output, args)
        if run.probed:
            scores[run.name] = record(run, model, results, probed, output, args)
        else:
            list(results)  # train to the end
    tree = xr.DataTree.from_dict(scores)
    output.save(tree)

    shown = min(args.show, len(probed.images))
    draw_faithfulness(tree).savefig(output.figure, dpi=200)
    draw_maps(tree, probed, shown).savefig(output.beside("_maps.png"), dpi=200)
    files = [output.store, output.figure, output.beside("_maps.png")]
    for run in runs:
        # Photographs of --boxes are not validation images, so nothing is recorded of them.
        if run.probed and probed.numbers and attends_by_class(models[run.name]):
            files.append(output.beside("_classes.png"))
            recording = tcnn_probe.open(output.beside(f"_{run.slug}.zarr"))
            figure = draw_by_class(recording, scores[run.name], probed, shown)
            figure.savefig(files[-1], dpi=200)
    print(report(tree, args.tolerance))
    print("wrote " + ", ".join(map(str, files)))
    trained = (len(validation), chance(validation)) if args.epochs else None
    return finish(check(tree, trained), args.data)


def train(
    run: Run,
    model: nn.Module,
    title: str,
    loaders: Loaders,
    probed: Probed,
    output: RunOutput,
    args: argparse.Namespace,
) -> Iterator[EpochResult]:
    """Train the model and yield after each epoch;
    without epochs, evaluate it on the probed images as it is.
    """
    if run.epochs:
        with refused(ValueError):
            yield from finetune(
                model,
                *loaders,
                epochs=run.epochs,
                lr=run.lr,
                warmup_epochs=warmup(run.epochs),
                checkpoint=output.checkpoints / f"{run.slug}.pt",
                device=args.device,
                amp=args.amp,
                seed=args.seed,
                name=title,
            )
        return
    # The model is in eval mode, in which a recorder takes forward passes as validation.
    answers = logits(model.eval(), probed, args)
    loss = float(F.cross_entropy(answers, probed.labels))
    top1 = float((answers.argmax(1) == probed.labels).float().mean())
    yield EpochResult(0, math.nan, math.nan, loss, top1, math.nan)


def record(
    run: Run,
    model: nn.Module,
    results: Iterator[EpochResult],
    probed: Probed,
    output: RunOutput,
    args: argparse.Namespace,
) -> xr.Dataset:
    """Record class attention while a model trains;
    return the scores of some epochs, (epoch, attribution, image).
    """
    # Heads are compared by their attention alone: gradients would take most of the time.
    compared = ["class_attention"] if args.heads else None
    methods = compared or usable_methods(model, probed.images[:1])
    # Maps are kept of validation images, or of the probed images if the model is not trained.
    numbers = probed.numbers if run.epochs else list(range(len(probed.images)))
    recording: Any = nullcontext()
    if "class_attention" in methods:
        store = output.beside(f"_{run.slug}.zarr")
        recording = tcnn_probe.record(model, store, images=numbers[: args.show])
    by_epoch = []
    with recording as recorder:
        for result in results:
            if recorder is not None:
                # A resumed run has marked its first epochs already.
                recorder.mark(if_marked="skip", **asdict(result))
            # Saliency takes longer than an epoch, so not every epoch is scored.
            if result.epoch % args.every == 0 or result.epoch == run.epochs:
                part = output.checkpoints / f"{run.slug}-{result.epoch:04d}.zarr"
                if not part.exists():
                    scores = score(model, methods, probed, args)
                    scores["top1"] = result.top1
                    write_whole(scores.expand_dims(epoch=[result.epoch]), part)
                by_epoch.append(xr.open_zarr(part, consolidated=False).load())
    return xr.concat(by_epoch, "epoch", data_vars="all", combine_attrs="override")


def attends_by_class(model: nn.Module) -> bool:
    """Return whether the model has a class token for each class."""
    return any(getattr(module, "per_class", False) for module in model.modules())


def plan(args: argparse.Namespace) -> tuple[list[Run], Loaders]:
    """Return the runs in the order of their training, and the images for them."""
    if args.data == "digits":
        return plan_digits(args)
    torch.manual_seed(args.seed)  # for new classifiers and pools
    model, loaders = own_model_and_data(args, args.img_size)
    name = args.model
    recipe = {"epochs": args.epochs, "lr": args.lr}
    runs = [Run(name, lambda _: copy.deepcopy(model), **recipe)]
    if not args.epochs:
        return runs, loaders
    pools = [part for part in model.modules() if isinstance(part, AttentionPool2d)]
    if not pools:
        try:
            add_attention_pool(model)
        except ValueError:
            return runs, loaders  # a transformer has a class token of its own

        def pooled(models: Models) -> nn.Module:
            return with_attention_pool(models[name])

        runs.append(Run(f"{name}, attention pooling", pooled, **recipe))
    elif not pools[0].per_class:

        def by_class(models: Models) -> nn.Module:
            return specialize(models[name])

        runs.append(Run(f"{name}, by class", by_class, **recipe))
    return runs, loaders


def plan_digits(args: argparse.Namespace) -> tuple[list[Run], Loaders]:
    """Return the runs of small models on the digits;
    their lengths are in proportion to ``--epochs``.
    """
    # More threads speed up so small a model little, and slow it down tenfold on a shared machine.
    torch.set_num_threads(1)
    size = args.img_size
    loaders = digits_loaders(
        size=size,
        batch_size=args.batch_size,
        seed=args.seed,
        limit=args.limit,
        clutter=args.clutter,
    )
    # The ResNet learns before it is pooled in two ways; the PatchConvNet, before its classes get
    # tokens of their own.
    scale = args.epochs / 14
    before, pooling, by_class = (max(2, round(n * scale)) for n in (15, 7, 4))
    pool = {"init_values": 0.1, "input_size": (1, size, size)}
    runs = [
        Run("ResNet", lambda _: small_resnet(), before, 1e-2, probed=False),
        Run(
            "ResNet, average pooling",
            lambda models: copy.deepcopy(models["ResNet"]),
            pooling,
            3e-3,
        ),
        Run(
            "ResNet, attention pooling",
            lambda models: add_attention_pool(models["ResNet"], **pool),
            pooling,
            3e-3,
        ),
        Run("PatchConvNet", lambda _: small_patchconvnet(), args.epochs, 2e-3),
        Run(
            "PatchConvNet, by class",
            lambda models: specialize(models["PatchConvNet"]),
            by_class,
            2e-3,
        ),
    ]
    if args.heads:

        def with_heads(_: Models) -> nn.Module:
            return small_patchconvnet(args.heads)

        name = several_heads(args.heads)
        # The option compares these two models alone.
        patchconvnet = next(run for run in runs if run.name == "PatchConvNet")
        return [
            patchconvnet,
            replace(patchconvnet, name=name, make=with_heads),
        ], loaders
    return runs, loaders


def with_attention_pool(model: nn.Module) -> nn.Module:
    """Return the network with an attention pool in place of its average;
    only the pool and classifier are trained.
    """
    pooled = add_attention_pool(model, init_values=0.1)
    (pool,) = (part for part in pooled.modules() if isinstance(part, AttentionPool2d))
    trained = {pool, pooled.get_classifier()}
    frozen = [name for name, part in pooled.named_children() if trained.isdisjoint(part.modules())]
    freeze(pooled, frozen)
    return pooled


def check(tree: xr.DataTree, trained: tuple[int, float] | None) -> bool:
    """Return whether the models learned, and class attention beats chance:
    on the digit, or when pixels are removed.

    Args:
        tree: Scores of each model.
        trained: Number of validation images and accuracy of chance, if the models were trained;
            else None.
    """
    passed = True
    for name, node in tree.children.items():
        last = node.dataset.isel(epoch=-1)
        if trained and not learned(name, float(last.top1), *trained):
            passed = False
        # Of several models only the PatchConvNet is judged, which has class attention of its own.
        is_judged = name == "PatchConvNet" or len(tree.children) == 1
        if "class_attention" not in last["attribution"] or not is_judged:
            continue
        # Without masks there is no place to point at.
        measure = "pointing_game" if "pointing_game" in last else "insertion_auc"
        values = last[measure]
        gain = values.sel(attribution="class_attention") - values.sel(attribution="chance")
        low, high = evaluation.mean_interval(gain).values
        verdict = "above" if low > 0 else "NOT above"
        print(
            f"check: {measure} of {name}'s class attention {verdict} chance, by {low:.2f} to "
            f"{high:.2f}"
        )
        passed = passed and low > 0
    return passed


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add_data(
        parser,
        model="timm name of a model (default: small ones, for the digits)",
        pretrained="timm's weights, or those in FILE",
        img_size="height and width of the images of --data (default: the model's own)",
    )
    training = parser.add_argument_group("training")
    add = training.add_argument
    epochs = (
        "epochs of the PatchConvNet, others in proportion (default: 14); of fine-tuning on "
        "--data (default: 0)"
    )
    add("--epochs", type=from_least(0), help=epochs)
    add("--batch-size", type=from_least(1), help="images per step (default: 32)")
    add(
        "--lr",
        type=positive_number,
        default=1e-4,
        help="peak learning rate of fine-tuning on --data (default: 1e-4)",
    )
    add_augment(add)
    add_machine(training, small="6 epochs, 20 seconds")
    add(
        "--heads",
        type=int,
        choices=(2, 4, 8, 16),
        help="heads of the pooling of a PatchConvNet that is compared with one of a single head; "
        "no other models",
    )
    add = parser.add_argument_group("saliency").add_argument
    add(
        "--images",
        type=from_least(1),
        help="validation images to explain, spread evenly (default: 48; 32 of --data)",
    )
    boxes = (
        "photographs to explain instead: lines of file,left,top,right,bottom, "
        "a box around the object (pointing game)"
    )
    add("--boxes", metavar="FILE", help=boxes)
    add(
        "--show",
        type=from_least(1),
        help="number of these that are drawn and recorded (default: 5)",
    )
    add(
        "--every",
        type=from_least(1),
        help="epochs from one scoring of saliency to the next; the first and the last are scored "
        "(default: 5)",
    )
    add(
        "--steps",
        type=from_least(1),
        help="steps of deletion, insertion and integrated gradients (default: 12)",
    )
    add(
        "--tolerance",
        type=positive_number,
        default=4.0,
        help="tolerance of the pointing game, in pixels (default: 4)",
    )

    add_output(parser)
    args = parsed(parser, arguments, "class_attention_saliency")

    digits = args.data == "digits"
    # The digits have small models of their own.
    if digits == bool(args.model) or (digits and args.pretrained):
        parser.error(
            "--data and --model belong together, and --pretrained goes with them; without them the "
            "digits are used"
        )
    if args.heads and not digits:
        parser.error("--heads is for the small PatchConvNet of the digits")
    if digits and args.boxes:
        parser.error("--boxes is for photographs: --data and --model")
    check_data_options(parser, args)
    settle_augment(parser, args)
    defaults = {
        "img_size": 64,
        "batch_size": 32,
        "epochs": 14,
        "clutter": 6,
        "images": 48,
        "every": 5,
    }
    if args.small:
        defaults |= {
            "img_size": 32,
            "limit": 400,
            "clutter": 0,
            "batch_size": 16,
            "epochs": 6,
            "every": 6,
        }
        defaults |= {"images": 8, "show": 2, "steps": 2}
    if not digits:
        # A trained model is explained as it is.
        defaults = {"batch_size": 32, "epochs": 0, "images": 32, "every": 5}
    fill_in(args, defaults)
    fill_in(args, {"show": 5, "steps": 12})
    if digits and not args.epochs:
        parser.error("--epochs 0 is for a trained model: --model and --pretrained")
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
