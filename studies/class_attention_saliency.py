"""What a convnet looks at, by attention and by gradients (PatchConvNet paper, Figs. 1 and 2), and which is right.

    python studies/class_attention_saliency.py

Takes about 3 minutes on one CPU core.

What one should see: class attention of the PatchConvNet, on 16 x 16 patches and without any gradient, comes within 4
pixels (one patch) of the digit far more often than chance, and more often than Grad-CAM. Gradients of single pixels
meet the very strokes more often. In the ResNet, whose last feature map has 4 x 4 cells, class attention finds the digit
less often; its accuracy is about the same with the learned pooling as without. studies/README.md has the ranges of
several seeds; the table that is printed has this run's numbers, and the last lines compare class attention with
Grad-CAM, image by image, with intervals. After so short a training the tokens of the classes look at almost the same
places.

How: a small ResNet with average pooling and a small PatchConvNet learn handwritten digits in cluttered scenes. The
ResNet is trained on with a learned pooling in place of its average (``tcnn_model.add_attention_pool``) and, as the
control, as it is; the PatchConvNet is trained on with one token for each class (``tcnn_model.specialize``). Every few
epochs the saliency of each method is compared with where the digit is, and with what the model does when pixels are
removed. Occlusion is coarse here (windows of a quarter of the image), and integrated gradients take 12 steps.

Writes into results/:
class_attention_saliency_maps.png       images, and maps of the models side by side (Fig. 1 of the paper)
class_attention_saliency_classes.png    maps of the three likeliest classes of each image (Fig. 2)
class_attention_saliency.png            faithfulness by epoch and method, with 95 % intervals over images
class_attention_saliency.zarr           the numbers behind it, a group for each model: xarray.open_datatree
class_attention_saliency_*.zarr         what tcnn_probe recorded of each model's pooling, at every epoch

It ends by checking that the models learned, and that the class attention of the PatchConvNet comes near the digit more
often than chance.

On your own model and images: a trained model (maps alone, in a minute or so), or with --epochs one to be
fine-tuned; and of a convnet its trunk once more, frozen, with attention in place of its pooling:

    python studies/class_attention_saliency.py --model deit_small_patch16_224 --pretrained --data path/to/imagenet
    python studies/class_attention_saliency.py --model resnet50 --pretrained --data path/to/imagenet --epochs 10
"""

import argparse
import copy
import sys

import torch
import xarray as xr
from timm.utils import freeze
from torch import nn

import tcnn_probe
from common.data import (
    Loaders,
    boxed_images,
    chance,
    digits_loaders,
    own_model_and_data,
    probed_images,
)
from common.ending import ended, finish, learned, refused
from common.following import Follower, Run
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
from common.output import RunOutput
from common.saliency_figures import draw_by_class, draw_faithfulness, draw_maps
from common.saliency_report import report
from tcnn_model import AttentionPool2d, add_attention_pool, specialize
from tcnn_probe import evaluation


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 if it saw what it stands for, 3 if not."""
    args = parse(arguments)
    with refused(ValueError, RuntimeError, OSError):
        runs, loaders = plan(args)
        validation = loaders[1].dataset
        if args.boxes:
            probed = boxed_images(args.boxes, validation, runs[0].make({}))
        else:
            probed = probed_images(validation, args.images)
        output = RunOutput.from_args(args, "class_attention_saliency")
    follower = Follower(loaders, probed, output, args)
    models: dict[str, nn.Module] = {}
    found: dict[str, xr.Dataset] = {}
    for number, run in enumerate(runs, 1):
        torch.manual_seed(args.seed)
        models[run.name] = run.make(models).to(args.device)
        scores = follower.follow(
            run, models[run.name], f"{number}/{len(runs)} {run.name}"
        )
        if scores is not None:
            found[run.name] = scores
    tree = xr.DataTree.from_dict(found)
    output.save(tree)

    shown = min(args.show, len(probed.images))
    draw_faithfulness(tree).savefig(output.figure, dpi=200)
    draw_maps(tree, probed, shown).savefig(output.beside("_maps.png"), dpi=200)
    written = [output.store, output.figure, output.beside("_maps.png")]
    for run in runs:
        if (
            run.name in found
            and probed.numbers
            and any(getattr(m, "per_class", False) for m in models[run.name].modules())
        ):
            written.append(output.beside("_classes.png"))
            recording = tcnn_probe.open(output.beside(f"_{run.slug}.zarr"))
            draw_by_class(recording, tree[run.name].dataset, probed, shown).savefig(
                written[-1], dpi=200
            )
    print(report(tree, args.tolerance))
    print("wrote " + ", ".join(map(str, written)))
    trained = (len(validation), chance(validation)) if args.epochs else None
    return finish(check(tree, trained), args.data)


def plan(args: argparse.Namespace) -> tuple[list[Run], Loaders]:
    """What to train, in this order, and on which images."""
    if args.data == "digits":
        size = args.img_size
        torch.set_num_threads(
            1
        )  # more bring it little, and cost it tenfold where the machine is shared
        loaders = digits_loaders(
            size=size,
            batch_size=args.batch_size,
            seed=args.seed,
            limit=args.limit,
            clutter=args.clutter,
        )
        scale = args.epochs / 14
        first, on, last = (max(2, round(n * scale)) for n in (15, 7, 4))
        return [
            Run("ResNet", lambda _: small_resnet(), first, 1e-2, probed=False),
            Run(
                "ResNet, average pooling",
                lambda models: copy.deepcopy(models["ResNet"]),
                on,
                3e-3,
            ),
            Run(
                "ResNet, attention pooling",
                lambda m: add_attention_pool(
                    m["ResNet"], init_values=0.1, input_size=(1, size, size)
                ),
                on,
                3e-3,
            ),
            Run("PatchConvNet", lambda _: small_patchconvnet(), args.epochs, 2e-3),
            Run(
                "PatchConvNet, by class",
                lambda models: specialize(models["PatchConvNet"]),
                last,
                2e-3,
            ),
        ], loaders
    torch.manual_seed(args.seed)  # of new classifiers and pools
    model, loaders = own_model_and_data(args, args.img_size)
    runs = [Run(args.model, lambda _: copy.deepcopy(model), args.epochs, args.lr)]
    if args.epochs:
        pool = next(
            (
                module
                for module in model.modules()
                if isinstance(module, AttentionPool2d)
            ),
            None,
        )
        if pool is None:
            try:
                add_attention_pool(model)
            except ValueError:
                return runs, loaders  # a transformer: its own class token will do
            name = f"{args.model}, attention pooling"
            runs.append(
                Run(
                    name,
                    lambda m: with_attention_pool(m[args.model]),
                    args.epochs,
                    args.lr,
                )
            )
        elif not pool.per_class:
            runs.append(
                Run(
                    f"{args.model}, by class",
                    lambda m: specialize(m[args.model]),
                    args.epochs,
                    args.lr,
                )
            )
    return runs, loaders


def with_attention_pool(trained: nn.Module) -> nn.Module:
    """The network with an attention pool in place of its average; all but that and the classifier stays as it is."""
    pooled = add_attention_pool(trained, init_values=0.1)
    pool = next(
        module for module in pooled.modules() if isinstance(module, AttentionPool2d)
    )
    learning = {pool, pooled.get_classifier()}
    freeze(
        pooled,
        [
            name
            for name, part in pooled.named_children()
            if learning.isdisjoint(part.modules())
        ],
    )
    return pooled


def check(tree: xr.DataTree, trained: tuple[int, float] | None) -> bool:
    """Whether the models learned, and class attention beats chance: where the digit is, or when pixels are removed.

    Args:
        tree: the scores.
        trained: if the models were trained: the number of validation images, and the accuracy of chance.
    """
    seen = True
    for name, node in tree.children.items():
        last = node.dataset.isel(epoch=-1)
        if trained and not learned(name, float(last.top1), *trained):
            seen = False
        if "class_attention" not in last["attribution"] or not (
            name == "PatchConvNet" or len(tree.children) == 1
        ):
            continue
        measure = "pointing_game" if "pointing_game" in last else "insertion_auc"
        values = last[measure].sel(attribution="class_attention") - last[measure].sel(
            attribution="chance"
        )
        low, high = evaluation.mean_interval(values).values
        verdict = "above" if low > 0 else "NOT above"
        print(
            f"check: {measure} of {name}'s class attention {verdict} chance, by {low:.2f} to {high:.2f}"
        )
        seen = seen and low > 0
    return seen


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add_data(
        parser,
        model="timm name of a model (default: small ones, for the digits)",
        pretrained="timm's weights, or those in FILE",
        img_size="height and width of the images of --data (default: the model's own)",
    )
    training = parser.add_argument_group("training")
    add = training.add_argument
    epochs = "of the PatchConvNet, others in proportion (default: 14); of fine-tuning on --data (default: 0)"
    add("--epochs", type=from_least(0), help=epochs)
    add("--batch-size", type=from_least(1), help="images per step (default: 32)")
    add(
        "--lr",
        type=positive_number,
        default=1e-4,
        help="of fine-tuning on --data (default: 1e-4)",
    )
    add_machine(training, small="6 epochs, 20 seconds")
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
        help="of these, how many are drawn and recorded (default: 5)",
    )
    add(
        "--every",
        type=from_least(1),
        help="epochs from one look to the next; the first and the last are looked at (default: 5)",
    )
    add(
        "--steps",
        type=from_least(1),
        help="of deletion and insertion, and of integrated gradients (default: 12)",
    )
    add(
        "--tolerance",
        type=positive_number,
        default=4.0,
        help="of the pointing game, in pixels (default: 4)",
    )

    add_output(parser)
    args = parsed(parser, arguments, "class_attention_saliency")

    digits = args.data == "digits"
    if digits == bool(args.model) or (digits and args.pretrained):
        parser.error(
            "--data and --model belong together, and --pretrained goes with them; without, it is the digits"
        )
    if digits and args.boxes:
        parser.error("--boxes is for photographs: --data and --model")
    check_data_options(parser, args)
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
        defaults = {"batch_size": 32, "epochs": 0, "images": 32, "every": 5}
    fill_in(args, defaults)
    fill_in(args, {"show": 5, "steps": 12})
    if digits and not args.epochs:
        parser.error("--epochs 0 is for a trained model: --model and --pretrained")
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
