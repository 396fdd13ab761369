"""Studies of one architecture: a small model that is trained on the digits,
or a timm model with its weights.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.data import Loaders, Probed, chance, digits_loaders, probed_images
from common.ending import learned, refused
from common.models import pretrained_model
from common.options import (
    add_machine,
    add_output,
    fill_in,
    from_least,
    image_file,
    parsed,
    positive_number,
)
from common.output import RunOutput
from common.training import warmup
from tcnn_model import EpochResult, finetune
from tcnn_probe.images import as_images

__all__ = ["SingleModel", "begin_single", "parse_single"]


def parse_single(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    study: str,
    *,
    example: str,
    lr: float,
    epochs: int,
    small_epochs: int,
    size: int = 64,
    images: bool = True,
) -> argparse.Namespace:
    """Parse the command line of a study: options for the model,
    its images, the training and the output.

    Args:
        parser: Parser with the study's own options.
        arguments: Arguments of the command line; None for those that the user typed.
        study: Name of the study.
        example: Name of a timm model, for the help.
        lr, epochs: Default peak learning rate and number of epochs for the training of the small
            model.
        small_epochs: Number of epochs with ``--small``.
        size: Default height and width of the scenes.
        images: Whether a trained model needs images of the user.
    """
    add = parser.add_argument_group("model and images").add_argument
    add(
        "--model",
        help=f"timm name of a model with weights, such as {example} (default: a small model is "
        "trained)",
    )
    help_ = "the weights of --model: timm's, or those in FILE; nothing is trained"
    add("--pretrained", nargs="?", const=True, default=False, metavar="FILE", help=help_)
    if images:
        add(
            "--image",
            type=image_file,
            nargs="+",
            metavar="FILE",
            help="images to show --model",
        )
    add(
        # 28 pixels is the size of the digit itself.
        "--img-size",
        type=from_least(28),
        help=f"height and width of the images (default: {size}; with --model, that of its weights)",
    )
    add(
        "--limit",
        type=from_least(40),
        help="number of digits to use, a quarter of them for validation (default: all)",
    )
    add(
        "--clutter",
        type=from_least(0),
        help="fragments of other digits in each scene (default: 0)",
    )
    training = parser.add_argument_group("training on the digits")
    add = training.add_argument
    add("--epochs", type=from_least(2), help=f"epochs of training (default: {epochs})")
    add("--batch-size", type=from_least(1), help="images per step (default: 32)")
    add(
        "--lr",
        type=positive_number,
        default=lr,
        help=f"peak learning rate (default: {lr:g})",
    )
    add_machine(training, small=f"{small_epochs} epochs, seconds", loads=False)
    add_output(parser)
    args = parsed(parser, arguments, study)
    # Maps of random weights show nothing.
    if bool(args.model) != bool(args.pretrained):
        parser.error("--model and --pretrained belong together: no timm model is trained here")
    # The digits have images of their own.
    if images and bool(args.model) != bool(args.image):
        parser.error(
            "--model and --image belong together: a trained model is shown your own images"
        )
    if not args.model:
        defaults = {"img_size": size, "clutter": 0, "batch_size": 32, "epochs": epochs}
        if args.small:
            defaults |= {
                "img_size": 32,
                "limit": 240,
                "batch_size": 16,
                "epochs": small_epochs,
            }
        fill_in(args, defaults)
    return args


@dataclass(frozen=True)
class SingleModel:
    """Model, data and output folder of a study of one architecture.

    Args:
        args: Command line of the study.
        model: Trained model that the user named, or the small model before its training.
        output: Output folder.
        loaders: Training and validation batches of the digits; None for a trained model.
        images: Images of the user, as the trained model takes them, shape (B, C, H, W).
    """

    args: argparse.Namespace
    model: nn.Module
    output: RunOutput
    loaders: Loaders | None = None
    images: Tensor | None = None

    def train(self, model: nn.Module, file: str, title: str) -> Iterator[EpochResult]:
        """Train a model on the digits and yield after each epoch; ``file`` names its checkpoint."""
        assert self.loaders is not None
        args = self.args
        return finetune(
            model.to(args.device),
            *self.loaders,
            epochs=args.epochs,
            warmup_epochs=warmup(args.epochs),
            lr=args.lr,
            seed=args.seed,
            device=args.device,
            amp=args.amp,
            checkpoint=self.output.checkpoints / f"{file}.pt",
            name=title,
        )

    def probed(self, count: int) -> Probed:
        """Return ``count`` validation scenes."""
        assert self.loaders is not None
        return probed_images(self.loaders[1].dataset, count)

    def learned(self, name: str, accuracy: float) -> bool:
        """Return whether a model beats chance on the digits,
        or was not trained here; print a line if it does not.
        """
        if self.loaders is None:
            return True
        dataset = self.loaders[1].dataset
        return learned(name, accuracy, len(dataset), chance(dataset))


def begin_single(
    study: str,
    args: argparse.Namespace,
    small_model: Callable[[int], nn.Module],
    *,
    before: Callable[[nn.Module], Any] = lambda model: None,
) -> SingleModel:
    """Load the model and its images and open the output folder,
    or refuse before anything is trained or written.

    Args:
        study: Name of the study.
        args: Command line of the study, settled.
        small_model: Function that builds the small model for scenes of a height and width.
        before: Function of the model, called before anything is written; its ValueErrors are
            refusals.

    Raises:
        InputError: The model, its images or the output folder cannot be used; the message says why.
    """
    # Initial weights and scenes are drawn from torch's global generator.
    torch.manual_seed(args.seed)
    loaders = images = None
    with refused(ValueError, RuntimeError, OSError):
        if args.model:
            # A trained model is examined as it classifies, in eval mode.
            model = pretrained_model(args).eval()
            images = as_images(args.image, model) if getattr(args, "image", None) else None
        else:
            # More threads speed up so small a model little, and slow it down tenfold on a shared
            # machine.
            torch.set_num_threads(1)
            sizes = {
                "size": args.img_size,
                "batch_size": args.batch_size,
                "clutter": args.clutter,
            }
            loaders = digits_loaders(**sizes, seed=args.seed, limit=args.limit)
            model = small_model(args.img_size)
        before(model)
        output = RunOutput.from_args(args, study)
    return SingleModel(args, model, output, loaders, images)
