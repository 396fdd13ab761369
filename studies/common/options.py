"""Command lines of the studies: an option with its defaults, and how options are parsed."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.output import InputError, has_own_images, saved_options
from tcnn_model.pictures import read_picture

__all__ = [
    "Option",
    "check_single",
    "digits_alone",
    "from_least",
    "image_file",
    "need_model",
    "parse_options",
    "positive_number",
]

_AS_DEFAULT: Any = object()

Groups = Mapping[str, Iterable["Option"]]


@dataclass(frozen=True)
class Option:
    """An option of a command line.

    Args:
        flag: Name, such as ``--seeds``.
        help: Text for ``--help``, to which a default is added that it does not mention.
        type: Function of a word that returns the value; bool for an option without a value.
        default: Value of an option that is left out, or a function of the command line so far. A
            list is the default of an option with several values.
        small: Default with ``--small``.
        data: Default with the user's own images.
        only: "digits" or "data", if the option is for these images alone.
        choices: Values that are allowed.
        nargs: Number of values, as for ``argparse``. With "?" an option without a value is True;
            with "append" it may be repeated.
    """

    flag: str
    help: str = ""
    type: Any = str
    default: Any = None
    small: Any = _AS_DEFAULT
    data: Any = _AS_DEFAULT
    only: str = ""
    choices: Any = None
    nargs: str | None = None

    @property
    def name(self) -> str:
        """Name in the parsed command line."""
        return self.flag[2:].replace("-", "_")

    def add_to(self, group: Any) -> None:
        """Add the option to a group of ``argparse``."""
        words, default = self.help, self.default
        if self.type is bool:
            group.add_argument(self.flag, action="store_true", help=words)
            return
        if self.nargs == "append":
            group.add_argument(self.flag, type=self.type, action="append", default=[], help=words)
            return
        settings = {"type": self.type, "choices": self.choices, "nargs": self.nargs}
        if self.nargs == "?":
            settings["const"] = True
        if isinstance(default, list):
            settings["nargs"] = "+"
        if len(self.choices or ()) > 8:
            settings["metavar"] = "NAME"
        is_stated = "default" in words or default is None or default is False
        if not is_stated and not callable(default):
            words += f" (default: {_in_words(default)}"
            has_other = self.data not in (_AS_DEFAULT, None) and not callable(self.data)
            words += f"; {_in_words(self.data)} for --data)" if has_other else ")"
        # Other defaults depend on the rest of the command line.
        if self.small is self.data is _AS_DEFAULT and not callable(default):
            settings["default"] = default
        group.add_argument(self.flag, help=words, **settings)

    def default_for(self, args: argparse.Namespace) -> Any:
        """Return the value, or function, for an option that is left out."""
        if has_own_images(args) and self.data is not _AS_DEFAULT:
            return self.data
        is_small = getattr(args, "small", False) and self.small is not _AS_DEFAULT
        return self.small if is_small else self.default


def _in_words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def parse_options(
    document: str | None,
    study: str,
    arguments: Sequence[str] | None,
    groups: Groups,
    check: Callable[[argparse.Namespace], None] = lambda args: None,
) -> argparse.Namespace:
    """Parse the command line of a study.

    Options that are left out have their defaults; with ``--resume``, the values of the run that is
    continued.

    Args:
        document: Docstring of the study, shown by ``--help``.
        study: Name of the study.
        arguments: Arguments of the command line; None for those that the user typed.
        groups: Options by the title of their group; those of the output are added.
        check: Function that may change what the user typed, before the defaults are set.

    Raises:
        InputError: Options do not go together.
    """
    # The first line names the study; the rest says what one should see.
    description, _, rest = (document or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        # argparse's own usage would list some thirty options and hide the message of an error.
        usage="%(prog)s [options]; --help lists them",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    options = [option for group in groups.values() for option in group]
    for title, group in groups.items():
        argument_group = parser.add_argument_group(title)
        for option in group:
            option.add_to(argument_group)
    add_output(parser)
    args = parser.parse_args(arguments)
    if args.resume:
        saved = saved_options(args.out, study)
        # This is not an error, so that one command line serves a job that may be killed at any
        # time.
        if not saved:
            print(f"there is no run of {study} in {args.out} yet: starting a new one")
        # An older run may have options that no longer exist.
        parser.set_defaults(**{name: value for name, value in saved.items() if name in args})
        args = parser.parse_args(arguments)
    check(args)
    check_images(args, options)
    defaults = {option.name: option.default_for(args) for option in options}
    # Values that follow from others are set after these.
    for name, value in sorted(defaults.items(), key=lambda pair: callable(pair[1])):
        if getattr(args, name) is None:
            setattr(args, name, value(args) if callable(value) else value)
    return args


def check_images(args: argparse.Namespace, options: Iterable[Option]) -> None:
    """Refuse options for the digits together with the user's own images, and the reverse."""
    # Ignored options would look as if they had an effect.
    needed = "data" if has_own_images(args) else "digits"
    flags = [
        option.flag
        for option in options
        if option.only not in ("", needed) and getattr(args, option.name) not in (None, False, [])
    ]
    if flags and needed == "data":
        raise InputError(
            f"{', '.join(flags)}: for the digits; with --data, --limit and --epochs make a run "
            "short"
        )
    if flags:
        raise InputError(f"{', '.join(flags)} goes with --data, and not with the digits")


def need_model(args: argparse.Namespace) -> None:
    """Refuse pretrained weights, or the user's own images, without the name of a model."""
    if args.model is None and (has_own_images(args) or getattr(args, "pretrained", False)):
        raise InputError(
            "--pretrained and --data need --model, the name of a timm CNN such as resnet50"
        )


def digits_alone(elsewhere: str) -> Callable[[argparse.Namespace], None]:
    """Return a check that refuses other images and weights: masks of strokes are known for the
    digits alone, and no pretrained weights are made for these.
    """

    def check(args: argparse.Namespace) -> None:
        if args.data != "digits" or args.pretrained:
            raise InputError(
                "--data, --pretrained: the masks are those of the digits, which a CNN has to "
                f"learn; {elsewhere}"
            )

    return check


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


def torch_device(text: str) -> str:
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


def check_single(args: argparse.Namespace) -> None:
    """Refuse a model without weights or images, or the reverse, in a study of one architecture."""
    # Maps of random weights show nothing.
    if bool(args.model) != bool(args.pretrained):
        raise InputError("--model and --pretrained belong together: no timm model is trained here")
    # The digits have images of their own.
    if "image" in args and bool(args.model) != bool(args.image):
        raise InputError(
            "--model and --image belong together: a trained model is shown your own images"
        )
