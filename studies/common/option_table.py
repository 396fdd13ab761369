"""The table of the options that studies share; each study adds its own."""

import argparse
import os
from dataclasses import replace
from typing import Any

import torch

from common.options import Groups, Option, from_least, image_file, positive_number, torch_device
from tcnn_probe import evaluation

__all__ = [
    "AUGMENT_OPTION",
    "CORRUPTIONS_OPTION",
    "FEW_CORRUPTIONS",
    "LIMIT_OPTION",
    "SEED_OPTION",
    "changed",
    "device_option",
    "image_set_options",
    "machine_options",
    "model_options",
    "severities_option",
    "single_model_options",
    "small_option",
    "training_options",
]

PAPER_BATCH = 1024
"""Batch size for which the paper's learning rates are 1e-4 and 0.1."""


def device_option() -> Option:
    """Return the option for the device of torch."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    return Option("--device", "device of torch (default: cuda if there is one)", torch_device, best)


SEED_OPTION = Option("--seed", "random seed", from_least(0), 0)

# An epoch needs a full batch of common.stepwise.
LIMIT_OPTION = Option(
    "--limit", "number of digits to train on (default: all)", from_least(48), small=240
)


def small_option(changes: str, only: str = "") -> Option:
    """Return the option for a quick look; ``changes`` are what it changes."""
    return Option("--small", f"a quick look: {changes}", bool, only=only)


def machine_options(*, loads: bool = True) -> list[Option]:
    """Return the option for the precision and, if images are loaded, for loading processes."""
    amp = Option("--amp", "train in bfloat16 autocast", bool)
    # More than four processes are seldom faster, and each takes memory.
    cores = min(4, os.cpu_count() or 1)
    words = "processes that load --data (default: one for each core, 4 at most)"
    return [amp, *([Option("--workers", words, from_least(0), cores)] if loads else [])]


def model_options(model: str, pretrained: str, size: Option) -> Groups:
    """Return options for a model and the images.

    Args:
        model, pretrained: Help for the options of the model and of its weights.
        size: Option for the size of the images.
    """
    return {
        "model and data": [
            Option("--model", model),
            # A flag without a value means timm's own weights.
            Option("--pretrained", pretrained, default=False, nargs="?"),
            Option(
                "--data",
                "folder with train/ and val/, and in each a folder for every class",
                default="digits",
            ),
            Option(
                "--num-classes",
                "number of classes (default: that of the folders in --data)",
                from_least(2),
                only="data",
            ),
            size,
            Option(
                "--limit",
                "number of images to use, a quarter of them for validation (default: all)",
                from_least(4),
                # The 32 for validation are one batch.
                small=128,
                data=None,
            ),
            Option(
                "--clutter",
                "fragments of other digits in each scene",
                from_least(0),
                6,
                small=0,
                data=None,
                only="digits",
            ),
        ]
    }


AUGMENT_OPTION = Option(
    "--augment",
    "augmentation of --data: papers (default), or light, without mixup, CutMix and repeated views, "
    "for short trainings",
    data="papers",
    only="data",
    choices=("papers", "light"),
)


def _share(args: argparse.Namespace) -> float:
    # Rates are in proportion to the batch size, so that as many images move the weights as far.
    return args.batch_size / PAPER_BATCH


def training_options(small_form: str, **defaults: Any) -> dict[str, list[Option]]:
    """Return the options of the studies that train a CNN and its T-CNN.

    The small form has higher rates, which make up for fewer steps.

    Args:
        small_form: Changes that ``--small`` makes, for its help.
        **defaults: The study's own defaults for the digits by name, or pairs of these and those of
            the small form.
    """
    size = Option(
        "--img-size", "height and width of the images", from_least(1), 64, small=32, data=224
    )
    groups = model_options(
        "timm name of a CNN (default: a small ResNet built from timm)",
        "start from timm's weights, or from those in FILE, instead of training the CNN",
        size,
    )
    recipe = [
        Option("--epochs", "epochs of fine-tuning", from_least(1), 6, 2, 50),
        Option(
            "--cnn-epochs",
            "epochs of training the CNN first, unless --pretrained (default: 15; --epochs for "
            "--data)",
            from_least(1),
            15,
            2,
            lambda args: args.epochs,
        ),
        Option(
            "--batch-size",
            "images per step (default: 32; 256 for --data; the paper's is 1024)",
            from_least(1),
            32,
            16,
            256,
        ),
        Option(
            "--lr",
            "rate of fine-tuning (default: 1e-3; for --data the paper's, 1e-4 for batches of 1024, "
            "less for smaller)",
            positive_number,
            1e-3,
            3e-3,
            lambda args: 1e-4 * _share(args),
        ),
        Option(
            "--cnn-lr",
            "rate of training the CNN (default: 1e-2; for --data 0.1 for batches of 256)",
            positive_number,
            1e-2,
            2e-2,
            lambda args: 0.4 * _share(args),
        ),
        Option(
            "--qk-lr",
            "rate of queries and keys (default: --lr; for --data the rate whose sum over all steps "
            "is the paper's, 3.1)",
            positive_number,
            data=None,
        ),
        Option(
            "--gating-lr",
            "rate of the gates (default: 0.1; for --data the paper's, which depends on the batch "
            "as --lr does)",
            positive_number,
            0.1,
            data=lambda args: 0.1 * _share(args),
        ),
        Option(
            "--gating-min-lr",
            "final rate of the gates (default: annealed like that of the weights)",
            positive_number,
        ),
        AUGMENT_OPTION,
        Option("--drop-path", "stochastic depth in fine-tuning (default: the model's own)", float),
        device_option(),
        *machine_options(),
        SEED_OPTION,
        small_option(f"few small images without clutter, {small_form}", only="digits"),
    ]
    return changed({**groups, "training": recipe}, **defaults)


def changed(groups: Groups, **defaults: Any) -> dict[str, list[Option]]:
    """Return the options with other defaults for the digits, by name;
    a pair is a default and that of the small form.
    """
    return {
        title: [_changed(option, defaults.get(option.name)) for option in options]
        for title, options in groups.items()
    }


def _changed(option: Option, value: Any) -> Option:
    if isinstance(value, tuple):
        return replace(option, default=value[0], small=value[1])
    return option if value is None else replace(option, default=value)


FEW_CORRUPTIONS = ["shot_noise", "defocus_blur", "fog", "contrast"]
"""One corruption of each group, for ``--small``."""

CORRUPTIONS_OPTION = Option(
    "--corruptions",
    "corruptions of ImageNet-C (default: all 15)",
    nargs="+",
    choices=evaluation.CORRUPTIONS,
)


def severities_option(default: list[int], small: list[int] | None = None) -> Option:
    """Return the option for the severities of corruptions."""
    words = "severities of the corruptions"
    return Option("--severities", words, int, default, small=small or default, choices=range(1, 6))


def image_set_options(small: int | None = None) -> list[Option]:
    """Return options for digits, or small photographs of one size, to train from scratch.

    Args:
        small: Number of images in the small form; None for all.
    """
    words = "folder with train/ and val/, each with a folder per class, of small images of one size"
    return [
        Option("--data", words, default="digits"),
        Option(
            "--limit",
            "number of images to use, a quarter of them for validation (default: all)",
            from_least(40),
            small=small,
        ),
        device_option(),
    ]


def single_model_options(
    example: str, lr: float, epochs: tuple[int, int], *, size: int = 64, shown: bool = True
) -> Groups:
    """Return the options of a study of one architecture.

    Args:
        example: Name of a timm model, for the help.
        lr: Default peak learning rate for the training of the small model.
        epochs: Default number of epochs, and that of the small form.
        size: Default height and width of the scenes.
        shown: Whether a trained model needs images of the user.
    """
    image = Option(
        "--image",
        "images to show --model",
        image_file,
        nargs="+",
    )
    return {
        "model and images": [
            Option(
                "--model",
                f"timm name of a model with weights, such as {example} (default: a small model is "
                "trained)",
            ),
            Option(
                "--pretrained",
                "the weights of --model: timm's, or those in FILE; nothing is trained",
                default=False,
                nargs="?",
            ),
            *([image] if shown else []),
            Option(
                "--img-size",
                f"height and width (default: {size}; with --model, that of its weights)",
                # 28 pixels is the size of the digit itself.
                from_least(28),
                size,
                small=32,
                data=None,
            ),
            Option(
                "--limit",
                "number of digits to use, a quarter of them for validation (default: all)",
                from_least(40),
                small=240,
                data=None,
            ),
            Option(
                "--clutter",
                "fragments of other digits in each scene",
                from_least(0),
                0,
                data=None,
            ),
        ],
        "training on the digits": [
            Option("--epochs", "epochs of training", from_least(2), *epochs, data=None),
            Option("--batch-size", "images per step", from_least(1), 32, small=16, data=None),
            Option("--lr", "peak learning rate", positive_number, lr),
            device_option(),
            *machine_options(loads=False),
            SEED_OPTION,
            small_option(f"few small images, {epochs[1]} epochs, seconds"),
        ],
    }
