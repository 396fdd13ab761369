"""Options that the studies share."""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from common.output import saved_options
from tcnn_model.pictures import read_picture
from tcnn_probe import evaluation

__all__ = [
    "FEW_CORRUPTIONS",
    "add_corruptions",
    "add_data",
    "add_device",
    "add_machine",
    "add_output",
    "add_seed",
    "check_data_options",
    "fill_in",
    "from_least",
    "image_file",
    "need_model",
    "parsed",
    "positive_number",
    "study_parser",
]

FEW_CORRUPTIONS = ["shot_noise", "defocus_blur", "fog", "contrast"]
"""One corruption of each group, for ``--small``."""


def study_parser(document: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the study's own docstring."""
    # The first line names the study; the rest says what one should see.
    description, _, rest = (document or "").partition("\n\n")
    # argparse's own usage would list some thirty options and hide the message of an error.
    usage = "%(prog)s [options]; --help lists them"
    return argparse.ArgumentParser(
        usage=usage,
        description=description,
        epilog=rest,
        formatter_class=argparse.RawTextHelpFormatter,
    )


def add_data(
    parser: argparse.ArgumentParser,
    *,
    model: str,
    pretrained: str,
    img_size: str,
    many_models: bool = False,
) -> None:
    """Add options for one or several models and the images;
    texts are the help that differs between studies.
    """
    add = parser.add_argument_group("model and data").add_argument
    add("--model", nargs="+" if many_models else None, help=model)
    # A flag without a value means timm's own weights.
    number: dict[str, Any] = {"nargs": "*"} if many_models else {"nargs": "?", "const": True}
    add("--pretrained", **number, default=False, metavar="FILE", help=pretrained)
    add(
        "--data",
        default="digits",
        help="folder with train/ and val/, and in each a folder for every class (default: digits)",
    )
    add(
        "--num-classes",
        type=from_least(2),
        help="number of classes (default: that of the folders in --data)",
    )
    add("--img-size", type=from_least(1), help=img_size)
    add(
        "--limit",
        type=from_least(4),
        help="number of images to use, a quarter of them for validation (default: all)",
    )
    add(
        "--clutter",
        type=from_least(0),
        help="fragments of other digits in each scene (default: 6)",
    )


def add_corruptions(add: Callable[..., Any], *, severities: str) -> None:
    """Add options for ImageNet-C's corruptions;
    ``severities`` is the study's default, for the help.
    """
    add(
        "--corruptions",
        nargs="+",
        choices=evaluation.CORRUPTIONS,
        metavar="NAME",
        help="corruptions of ImageNet-C (default: all 15)",
    )
    add(
        "--severities",
        type=int,
        nargs="+",
        choices=range(1, 6),
        help=f"severities of the corruptions (default: {severities})",
    )


def add_machine(group: Any, *, small: str, loads: bool = True) -> None:
    """Add options for the device, the precision, loading processes, the seed and ``--small``.

    Args:
        group: Group of options.
        small: Changes that ``--small`` makes, for its help.
        loads: Whether the study can read images from disk, and so has ``--workers``.
    """
    add_device(group)
    add = group.add_argument
    add("--amp", action="store_true", help="train in bfloat16 autocast")
    if loads:
        # More than four processes are seldom faster, and each takes memory.
        cores = min(4, os.cpu_count() or 1)
        add(
            "--workers",
            type=from_least(0),
            default=cores,
            help="processes that load --data (default: one for each core, 4 at most)",
        )
    add_seed(group, small=f"few small images without clutter, {small}")


def add_device(group: Any) -> None:
    """Add the option for the device."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    group.add_argument(
        "--device",
        type=device,
        default=default,
        help="device of torch (default: cuda if there is one)",
    )


def add_seed(group: Any, *, small: str) -> None:
    """Add options for the seed and for a quick look; ``small`` lists what ``--small`` changes."""
    add = group.add_argument
    add("--seed", type=from_least(0), default=0, help="random seed (default: 0)")
    add(
        "--small",
        action="store_true",
        help=f"a quick look: {small}",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add options for the output folder, and for a run that it already holds."""
    parser.add_argument_group("output").add_argument(
        "--out", default="results", help="output folder (default: results)"
    )
    exclusive = parser.add_mutually_exclusive_group()
    exclusive.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out, with its options",
    )
    exclusive.add_argument("--overwrite", action="store_true", help="delete the run in --out first")


def fill_in(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Set the options that the user left out."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def parsed(
    parser: argparse.ArgumentParser, arguments: list[str] | None, study: str
) -> argparse.Namespace:
    """Parse the command line; with ``--resume``,
    options that are left out take their values from the run.
    """
    args = parser.parse_args(arguments)
    if args.resume:
        saved = saved_options(args.out, study)
        # This is not an error, so that one command line serves a job that may be killed at any
        # time.
        if not saved:
            print(f"there is no run of {study} in {args.out} yet: starting a new one")
        parser.set_defaults(
            # An older run may have options that no longer exist.
            **{name: value for name, value in saved.items() if name in args}
        )
        args = parser.parse_args(arguments)
    return args


def check_data_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options for the digits together with the user's own images, and the reverse."""
    # Ignored options would look as if they had an effect.
    if args.data != "digits" and (args.small or args.clutter is not None):
        parser.error(
            "--small and --clutter are for the digits; with --data, --limit and --epochs make a "
            "run short"
        )
    if args.data == "digits" and args.num_classes is not None:
        parser.error("--num-classes goes with --data: there are ten digits")


def need_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with an error for pretrained weights,
    or the user's own images, without the name of a model.
    """
    if args.model is None:
        parser.error(
            "--pretrained and --data need --model, the name of a timm CNN such as resnet50"
        )


def from_least(minimum: int) -> Callable[[str], int]:
    """Return the type of an option that takes integers of at least a minimum."""

    def integer(text: str) -> int:
        if (number := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"expected an integer from {minimum}, got {text}")
        return number

    return integer


def positive_number(text: str) -> float:
    """Parse a number above zero."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


def device(text: str) -> str:
    """Parse the name of a device that torch can use here."""
    try:
        # torch checks a name only when it puts a tensor there.
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(
            f"no device {text!r} here: {str(error).partition('.')[0][:90]}"
        ) from None
    return text


def image_file(name: str) -> str:
    """Parse the name of a file that can be read as an image."""
    try:
        read_picture(name)
    except (OSError, SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"no image: {error}") from None
    return name
