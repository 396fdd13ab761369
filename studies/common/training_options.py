"""Command line of the studies that train a CNN and its T-CNN:
options of the recipe, and their defaults.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from common.options import (
    add_data,
    add_machine,
    check_data_options,
    fill_in,
    from_least,
    need_model,
    positive_number,
)

__all__ = ["add_augment", "add_training", "settle", "settle_augment"]

PAPER_BATCH = 1024
"""Batch size for which the paper's learning rates are 1e-4 and 0.1."""


def add_training(parser: argparse.ArgumentParser, *, small: str, models_help: str = "") -> None:
    """Add options for the model, the data and the training.

    Args:
        parser: Parser of the study.
        small: Further changes that ``--small`` makes, for its help.
        models_help: Text on what the study does with several models; empty if it takes one.
    """
    add_data(
        parser,
        model=f"timm name of a CNN (default: a small ResNet built from timm){models_help}",
        pretrained="start from timm's weights, or from those in FILE, instead of training the CNN",
        img_size="height and width of the images (default: 64; 224 for --data)",
        many_models=bool(models_help),
    )
    group = parser.add_argument_group("training")
    add = group.add_argument
    add(
        "--epochs",
        type=from_least(1),
        help="epochs of fine-tuning (default: 6; 50 for --data)",
    )
    add(
        "--cnn-epochs",
        type=from_least(1),
        help="epochs of training the CNN first, unless --pretrained (default: 15; --epochs for "
        "--data)",
    )
    add(
        "--batch-size",
        type=from_least(1),
        help="images per step (default: 32; 256 for --data; the paper's is 1024)",
    )
    add(
        "--lr",
        type=positive_number,
        help="rate of fine-tuning (default: 1e-3; for --data the paper's, 1e-4 for batches of "
        "1024, less for smaller)",
    )
    add(
        "--cnn-lr",
        type=positive_number,
        help="rate of training the CNN (default: 1e-2; for --data 0.1 for batches of 256)",
    )
    qk_lr = (
        "rate of queries and keys (default: --lr; for --data the rate whose sum over all steps "
        "is the paper's, 3.1)"
    )
    add("--qk-lr", type=positive_number, help=qk_lr)
    add(
        "--gating-lr",
        type=positive_number,
        help="rate of the gates (default: 0.1; for --data the paper's, which depends on the batch "
        "as --lr does)",
    )
    add(
        "--gating-min-lr",
        type=positive_number,
        help="final rate of the gates (default: annealed like that of the weights)",
    )
    add_augment(add)
    add(
        "--drop-path",
        type=float,
        help="stochastic depth in fine-tuning (default: the model's own)",
    )
    add_machine(group, small=small)


def add_augment(add: Callable[..., Any]) -> None:
    """Add the option for the augmentation of photographs;
    its default is set in :func:`settle_augment`.
    """
    add(
        "--augment",
        choices=("papers", "light"),
        help="augmentation of --data: papers (default), or light, without mixup, CutMix and "
        "repeated views, for short trainings",
    )


def settle_augment(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse ``--augment`` for the digits, which are not augmented,
    and set its default for photographs.
    """
    if args.data == "digits" and args.augment:
        parser.error("--augment goes with --data: the digits are drawn, not augmented")
    if args.data != "digits":
        fill_in(args, {"augment": "papers"})


def settle(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    *,
    digits: Mapping[str, Any] | None = None,
) -> None:
    """Exit with an error if options do not go together, and set those that the user left out.

    Args:
        parser, args: Parser and command line of the study.
        digits: The study's own defaults for the digits.
    """
    on_digits = args.data == "digits"
    if args.pretrained or not on_digits:
        # The small ResNet is for the digits, and has no pretrained weights.
        need_model(parser, args)
    check_data_options(parser, args)
    settle_augment(parser, args)
    defaults = {
        "img_size": 64,
        "epochs": 6,
        "cnn_epochs": 15,
        "batch_size": 32,
        "clutter": 6,
    }
    defaults |= {"lr": 1e-3, "gating_lr": 0.1, "cnn_lr": 1e-2}
    # Some studies need easier scenes or longer trainings to see what they stand for.
    defaults |= digits or {}
    # Seconds instead of minutes are enough to see that everything works and, in most runs, the
    # effect.
    if args.small:
        defaults |= {
            "img_size": 32,
            "epochs": 4,
            "cnn_epochs": 4,
            "batch_size": 16,
            "limit": 280,
            "clutter": 0,
        }
        # Higher rates make up for fewer steps.
        defaults |= {"lr": 3e-3, "cnn_lr": 2e-2}
    if not on_digits:
        defaults = {"img_size": 224, "epochs": 50, "batch_size": 256}
        # Rates are in proportion to the batch size, so that as many images move the weights as far.
        share = (args.batch_size or defaults["batch_size"]) / PAPER_BATCH
        defaults |= {
            "lr": 1e-4 * share,
            "gating_lr": 0.1 * share,
            # 0.1 for batches of 256, as is usual for ResNets.
            "cnn_lr": 0.4 * share,
        }
    fill_in(args, defaults)
    # With --data the CNN trains for as many epochs as the T-CNN by default.
    if args.cnn_epochs is None:
        args.cnn_epochs = args.epochs
