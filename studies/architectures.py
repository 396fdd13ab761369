r"""Gain and cost of attention in several architectures (T-CNN paper, Table 5 and Fig. 2).

    python studies/architectures.py

Takes about 8 minutes on one CPU core.

What one should see (architectures.png): every CNN can be made a T-CNN and fine-tuned with one
recipe. The paper's gains over the CNN are the sum of three effects: longer training, the last
stage's doubled grid, and attention. The two controls tell them apart: the CNN that is trained
further, and the CNN whose last stage has lost its stride (``unstride``) but has no attention.

How: for each architecture a CNN is trained, and then fine-tuned for as long in three ways. On the
digits these are small versions of the papers' architectures: ResNet, ResNet-D (pools in its
shortcuts) and ResNet-RS (squeeze and excitation too).

Writes into results/:
architectures.png    A gain in accuracy over the CNN, by architecture, with standard errors over
                     images (too wide, since all models see the same images), B gain and time of a
                     training step, relative to the CNN
architectures.zarr   accuracy, parameters, multiply-adds, memory and speed, by (architecture,
                     model): xarray.open_zarr

It ends by checking that all models learned, and that T-CNNs need more multiply-adds than their
CNNs.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/architectures.py --models resnet50d resnet101d resnetrs50 resnetrs101 \
        --pretrained --data path/to/imagenet --img-size 224 --epochs 50 --batch-size 1024 \
        --drop-path 0.1 --device cuda --amp --workers 16 --out results/imagenet
"""

import argparse
import copy
import sys

import matplotlib as mpl
import torch
import xarray as xr
from matplotlib.figure import Figure

from common.figures import STYLE, add_letters
from common.models import SMALL_RESNETS
from common.option_table import training_options
from common.options import Option, need_model, parse_options
from common.output import InputError, ended, finish
from common.training import Study, begin
from common.verdicts import all_learned
from tcnn_model import reparameterize, unstride
from tcnn_probe import evaluation
from tcnn_probe.plot import OKABE_ITO

CNN, CONTROL, UNSTRIDED, TCNN = (
    "CNN",
    "CNN, fine-tuned",
    "un-strided, fine-tuned",
    "T-CNN, fine-tuned",
)
COLORS = {
    CONTROL: "0.6",
    UNSTRIDED: OKABE_ITO["sky blue"],
    TCNN: OKABE_ITO["vermillion"],
}


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load all CNNs first, so that one that cannot be used is refused before hours of training.
    first_args, *further_args = (args_of(name, args) for name in args.models)
    first = begin("architectures", first_args)
    studies = [first, *(first.with_cnn(further) for further in further_args)]

    # Train each CNN, fine-tune it in three ways, and measure the cost of the models.
    by_architecture = [
        measure(study, name) for study, name in zip(studies, args.models, strict=True)
    ]
    scores = xr.concat(by_architecture, "architecture")
    # All architectures are validated on the same images.
    scores["images"] = len(first.validation)

    first.output.save(scores)
    first.output.show(draw(scores), table(scores))
    return finish(check(scores, first.chance), args)


def args_of(name: str, args: argparse.Namespace) -> argparse.Namespace:
    """Return the command line for one architecture:
    a small one for the digits, or one of timm's.
    """
    is_small = name in SMALL_RESNETS and args.data == "digits"
    option = "small_resnet" if is_small else "model"
    return argparse.Namespace(**{**vars(args), option: name})


def measure(study: Study, name: str) -> xr.Dataset:
    """Return accuracy and cost of the CNN and
    of the three models fine-tuned from it, (architecture, model).
    """
    slug = name.lower().replace(" ", "-")
    cnn = study.model
    study.train_cnn(f"cnn={slug}", f"training the {name}")

    # They show the effect of longer training, that of the finer grid besides, and that of attention
    # besides.
    torch.manual_seed(study.args.seed)
    models = {
        CNN: cnn,
        CONTROL: copy.deepcopy(cnn),
        UNSTRIDED: unstride(cnn),
        TCNN: reparameterize(cnn),
    }
    runs = [
        study.finetune(models[model], f"{file}={slug}", f"{name}: {model}")
        for model, file in ((CONTROL, "control"), (UNSTRIDED, "unstrided"), (TCNN, "tcnn"))
    ]
    image, _ = study.validation[0]
    scores = evaluation.cost(
        models,
        # Costs depend on the size of the images.
        tuple(image.shape),
        batch_size=study.args.batch_size,
        training=True,
        progress=False,
    )
    # At epoch 0 the control is the CNN.
    scores["top1"] = "model", [runs[0][0].top1, *(results[-1].top1 for results in runs)]
    return scores.expand_dims(architecture=[name])


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset) -> Figure:
    """Draw gains by architecture, and gains against time."""
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    a, b = figure.subplots(1, 2)
    gains, slowdown = relative(scores)
    variance = scores.top1 * (1 - scores.top1) / float(scores.images)
    # This is the error for two sets of images, and too wide, since both models see the same images.
    error = (variance + variance.sel(model=CNN)) ** 0.5
    for place, (arm, color) in enumerate(COLORS.items()):
        x = [row + 0.26 * (place - 1) for row in range(scores.sizes["architecture"])]
        a.bar(
            x,
            gains.sel(model=arm),
            0.24,
            yerr=error.sel(model=arm),
            color=color,
            label=arm,
            error_kw={"lw": 0.8},
        )
        for row, name in enumerate(scores.architecture.values):
            at = {"model": arm, "architecture": name}
            b.scatter(
                slowdown.sel(at),
                gains.sel(at),
                color=color,
                s=36,
                marker="osD^v"[row % 5],
            )
    for row, name in enumerate(scores.architecture.values):
        b.scatter([], [], color="0.4", marker="osD^v"[row % 5], label=name)
    a.set_xticks(range(scores.sizes["architecture"]), scores.architecture.values)
    a.set(ylabel="gain in validation accuracy over the CNN", title="gain")
    b.set(
        xlabel="time of a training step (of the CNN's)",
        ylabel="gain over the CNN",
        title="gain and time",
    )
    a.legend(
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
        fontsize=8,
        handlelength=1,
    )
    b.legend()
    for panel in (a, b):
        panel.axhline(0, color="0.8", lw=1, zorder=0)
    add_letters([a, b])
    return figure


def relative(scores: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Return gain in accuracy over the CNN that the fine-tuning began with,
    and time of a step relative to it.
    """
    speed = scores.training_images_per_second
    return scores.top1 - scores.top1.sel(model=CNN), speed.sel(model=CNN) / speed


def table(scores: xr.Dataset) -> str:
    """Return Table 5 of the paper, with the controls and their costs."""
    gains, slowdown = relative(scores)
    # Standard error of a share, which is largest at 1/2.
    error = (0.25 / int(scores.images)) ** 0.5
    lines = [
        f"\naccuracy on {int(scores.images)} validation images (one seed; a standard error is at "
        f"most {error:.3f})"
    ]
    columns = {
        "top-1": scores.top1,
        "gain": gains,
        "parameters (M)": scores.parameters / 1e6,
    }
    columns |= {
        "multiply-adds (M)": scores.multiply_adds / 1e6,
        "step (of the CNN's)": slowdown,
    }
    width = max(len(name) for name in scores.architecture.values) + 2
    lines.append(" " * (width + 24) + "".join(f"{title:>21}" for title in columns))
    for name in scores.architecture.values:
        for arm in scores.model.values:
            cells = "".join(
                f"{float(values.sel(architecture=name, model=arm)):>21.3f}"
                for values in columns.values()
            )
            lines.append(f"{name:<{width}}{arm:<24}{cells}")
    return "\n".join(lines)


def check(scores: xr.Dataset, chance: float) -> bool:
    """Return whether all models learned, and the T-CNNs need more multiply-adds than their CNNs."""
    lowest = scores.top1.min("architecture")
    ends = zip(lowest.model.values, lowest.values, strict=True)
    have_learned = all_learned(ends, int(scores.images), chance)
    ratio = scores.multiply_adds.sel(model=TCNN) / scores.multiply_adds.sel(model=CNN)
    needs_more = bool((ratio > 1).all())
    verdict = "more" if needs_more else "NOT more"
    times = ", ".join(f"{value:.2f}" for value in ratio.values)
    print(f"check: T-CNNs need {verdict} multiply-adds than their CNNs: {times} times")
    return have_learned and needs_more


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    small = list(SMALL_RESNETS)
    models = Option(
        "--models",
        f"timm names of CNNs (default: {', '.join(small)}, small, for the digits)",
        default=small,
        small=small[2:],
    )
    groups = {
        **training_options(
            "1 architecture, 1 epoch", limit=(None, 120), epochs=(6, 1), cnn_epochs=(15, 1)
        ),
        "architectures": [models],
    }
    return parse_options(__doc__, "architectures", arguments, groups, models_not_model)


def models_not_model(args: argparse.Namespace) -> None:
    """Refuse ``--model``, in whose place ``--models`` stands here."""
    if args.model is not None:
        raise InputError(
            "--model: here --models takes one or more names, such as --models resnet50d resnetrs50"
        )
    if args.models is None:
        need_model(args)


if __name__ == "__main__":
    sys.exit(ended(main))
