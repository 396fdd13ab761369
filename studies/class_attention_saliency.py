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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xarray as xr
from timm.utils import freeze
from torch import nn

import tcnn_probe
from common.data import Loaders, boxed_images, own_model_and_data, probed_images
from common.models import small_patchconvnet, small_resnet
from common.option_table import (
    AUGMENT_OPTION,
    SEED_OPTION,
    changed,
    device_option,
    machine_options,
    model_options,
    small_option,
)
from common.options import Option, from_least, parse_options, positive_number
from common.output import InputError, RunOutput, ended, finish, refused
from common.saliency_report import (
    draw_by_class,
    draw_faithfulness,
    draw_maps,
    report,
    several_heads,
)
from common.saliency_scores import logits, score, usable_methods
from common.training import Study, small_loaders
from common.verdicts import learned
from tcnn_model import (
    AttentionPool2d,
    EpochResult,
    add_attention_pool,
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
    def recipe(self) -> dict[str, Any]:
        """Changes of the recipe of the command line."""
        return {"epochs": self.epochs, "lr": self.lr}

    @property
    def slug(self) -> str:
        """Name for files."""
        return self.name.lower().replace(",", "").replace(" ", "_").replace("/", "_")


@dataclass(frozen=True)
class SaliencyStudy(Study):
    """Study whose models are trained, or explained as they are if their run has no epochs.

    Args:
        probed: Images to explain.
    """

    probed: Any = None

    def _train(
        self, model: nn.Module, file: str, title: str, *, epochs: int, **recipe: Any
    ) -> Iterator[EpochResult]:
        if epochs:
            yield from super()._train(model, file, title, epochs=epochs, **recipe)
            return
        # The model is in eval mode, in which a recorder takes forward passes as validation.
        answers = logits(model.eval(), self.probed, self.args)
        loss = float(F.cross_entropy(answers, self.probed.labels))
        top1 = float((answers.argmax(1) == self.probed.labels).float().mean())
        yield EpochResult(0, math.nan, math.nan, loss, top1, math.nan)


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load models and data, and the images to explain.
    runs, study = begin(args)

    # Train each model, record its class attention, and score saliency by every method.
    models: dict[str, nn.Module] = {}
    scores: dict[str, xr.Dataset] = {}
    for run in runs:
        torch.manual_seed(args.seed)
        model = models[run.name] = run.make(models).to(args.device)
        if run.probed:
            scores[run.name] = train_and_score(study, run, model)
        else:
            study.finetune(model, run.slug, run.name, **run.recipe)
    tree = xr.DataTree.from_dict(scores)

    study.output.save(tree)
    # Photographs of --boxes are not validation images, so nothing is recorded of them.
    by_class = [run for run in runs if run.name in scores and attends_by_class(models[run.name])]
    files = draw_images(study, tree, by_class if study.probed.numbers else [])
    study.output.show(draw_faithfulness(tree), report(tree, args.tolerance), files=files)
    trained = (len(study.validation), study.chance) if args.epochs else None
    return finish(check(tree, trained), args)


def begin(args: argparse.Namespace) -> tuple[list[Run], SaliencyStudy]:
    """Return the runs and the study, or refuse before anything is trained or written."""
    with refused(ValueError, RuntimeError, OSError):
        runs, loaders = plan(args)
        validation = loaders[1].dataset
        if args.boxes:
            probed = boxed_images(args.boxes, validation, runs[0].make({}))
        else:
            probed = probed_images(validation, args.images)
        output = RunOutput.from_args(args, "class_attention_saliency")
    return runs, SaliencyStudy(args, None, output, loaders, probed=probed)


def draw_images(study: SaliencyStudy, tree: xr.DataTree, by_class: list[Run]) -> list[Path]:
    """Draw the maps of all models, and those of the classes of some; return the files."""
    output, probed = study.output, study.probed
    count = min(study.args.show, len(probed.images))
    files = [output.beside("_maps.png")]
    draw_maps(tree, probed, count).savefig(files[0], dpi=200)
    for run in by_class:
        files.append(output.beside("_classes.png"))
        recording = tcnn_probe.open(output.beside(f"_{run.slug}.zarr"))
        figure = draw_by_class(recording, tree[run.name].dataset, probed, count)
        figure.savefig(files[-1], dpi=200)
    return files


def train_and_score(study: SaliencyStudy, run: Run, model: nn.Module) -> xr.Dataset:
    """Record class attention while a model trains;
    return the scores of some epochs, (epoch, attribution, image).
    """
    args, probed = study.args, study.probed
    # Heads are compared by their attention alone: gradients would take most of the time.
    compared = ["class_attention"] if args.heads else None
    methods = compared or usable_methods(model, probed.images[:1])
    by_epoch = []

    def score_epoch(result: EpochResult) -> None:
        # Saliency takes longer than an epoch, so not every epoch is scored.
        if result.epoch % args.every == 0 or result.epoch == run.epochs:
            part = f"{run.slug}-{result.epoch:04d}"
            by_epoch.append(study.output.once(part, lambda: scores_of(result)))

    def scores_of(result: EpochResult) -> xr.Dataset:
        scores = score(model, methods, probed, args).assign(top1=result.top1)
        return scores.expand_dims(epoch=[result.epoch])

    if "class_attention" in methods:
        # Maps are kept of validation images, or of the probed images if the model is not trained.
        numbers = probed.numbers if run.epochs else list(range(len(probed.images)))
        study.record(
            model,
            study.output.beside(f"_{run.slug}.zarr"),
            run.slug,
            run.name,
            images=numbers[: args.show],
            after_epoch=score_epoch,
            **run.recipe,
        )
    else:
        study.finetune(model, run.slug, run.name, after_epoch=score_epoch, **run.recipe)
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
    size = args.img_size
    loaders = small_loaders(args)
    # The ResNet learns before it is pooled in two ways; the PatchConvNet, before its classes get
    # tokens of their own.
    scale = args.epochs / 14
    before, pooling, by_class = (max(2, round(n * scale)) for n in (15, 7, 4))
    pool = {"init_values": 0.1, "input_size": (1, size, size)}
    resnet = Run("ResNet", lambda _: small_resnet(), before, 1e-2, probed=False)
    averaged = Run(
        "ResNet, average pooling", lambda models: copy.deepcopy(models["ResNet"]), pooling, 3e-3
    )
    attentive = Run(
        "ResNet, attention pooling",
        lambda models: add_attention_pool(models["ResNet"], **pool),
        pooling,
        3e-3,
    )
    patchconvnet = Run("PatchConvNet", lambda _: small_patchconvnet(), args.epochs, 2e-3)
    by_class_tokens = Run(
        "PatchConvNet, by class", lambda models: specialize(models["PatchConvNet"]), by_class, 2e-3
    )
    if args.heads:
        # The option compares these two models alone.
        multiple = replace(
            patchconvnet,
            name=several_heads(args.heads),
            make=lambda _: small_patchconvnet(args.heads),
        )
        return [patchconvnet, multiple], loaders
    return [resnet, averaged, attentive, patchconvnet, by_class_tokens], loaders


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
    size = Option(
        "--img-size",
        "height and width of the images (default: 64; the model's own for --data)",
        from_least(1),
        64,
        small=32,
        data=None,
    )
    models = model_options(
        "timm name of a model (default: small ones, for the digits)",
        "timm's weights, or those in FILE",
        size,
    )
    training = [
        Option(
            "--epochs",
            "epochs of the PatchConvNet, others in proportion (default: 14); of fine-tuning on "
            "--data (default: 0)",
            from_least(0),
            14,
            small=2,
            data=0,
        ),
        Option("--batch-size", "images per step", from_least(1), 32, small=16, data=32),
        Option("--lr", "peak learning rate of fine-tuning on --data", positive_number, 1e-4),
        AUGMENT_OPTION,
        device_option(),
        *machine_options(),
        SEED_OPTION,
        small_option("few small images without clutter, 2 epochs", only="digits"),
        Option(
            "--heads",
            "heads of the pooling of a PatchConvNet that is compared with one of a single head; no "
            "other models",
            int,
            only="digits",
            choices=(2, 4, 8, 16),
        ),
    ]
    saliency = [
        Option(
            "--images",
            "validation images to explain, spread evenly",
            from_least(1),
            48,
            small=4,
            data=32,
        ),
        Option(
            "--boxes",
            "photographs to explain instead: lines of file,left,top,right,bottom, a box around the "
            "object (pointing game)",
            only="data",
        ),
        Option("--show", "number of these that are drawn and recorded", from_least(1), 5, small=2),
        Option(
            "--every",
            "epochs from one scoring of saliency to the next; the first and the last are scored "
            "(default: 5)",
            from_least(1),
            5,
        ),
        Option(
            "--steps",
            "steps of deletion, insertion and integrated gradients",
            from_least(1),
            12,
            small=2,
        ),
        Option("--tolerance", "tolerance of the pointing game, in pixels", positive_number, 4.0),
    ]
    groups = {**changed(models, limit=(None, 80)), "training": training, "saliency": saliency}
    args = parse_options(__doc__, "class_attention_saliency", arguments, groups, data_with_model)
    if args.data == "digits" and not args.epochs:
        raise InputError("--epochs 0 is for a trained model: --model and --pretrained")
    return args


def data_with_model(args: argparse.Namespace) -> None:
    """Refuse images without a model, and the reverse: the digits have small models of their own."""
    digits = args.data == "digits"
    if digits == bool(args.model) or (digits and args.pretrained):
        raise InputError(
            "--data and --model belong together, and --pretrained goes with them; without them the "
            "digits are used"
        )


if __name__ == "__main__":
    sys.exit(ended(main))
