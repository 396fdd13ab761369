"""The part of the command line that the studies share."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["FEW_CORRUPTIONS", "add_data", "add_machine", "add_output", "fill_in", "study_parser"]

FEW_CORRUPTIONS = ["shot_noise", "defocus_blur", "fog", "contrast"]
"""One of each group: for ``--small``."""


def study_parser(document: str | None) -> argparse.ArgumentParser:
    """A parser that shows the study's own docstring."""
    description, _, rest = (document or "").partition("\n\n")
    return argparse.ArgumentParser(description=description, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)


def add_data(parser: argparse.ArgumentParser, *, model: str, pretrained: str, img_size: str) -> None:
    """Options for the model and the images; the arguments are the help texts that differ between studies."""
    add = parser.add_argument_group("model and data").add_argument
    add("--model", help=model)
    add("--pretrained", nargs="?", const=True, default=False, metavar="FILE", help=pretrained)
    add("--data", default="digits", help="folder with train/ and val/, or a timm dataset name (default: digits)")
    add("--num-classes", type=int, help="classes in --data (default: the model's own)")
    add("--img-size", type=int, help=img_size)
    add("--limit", type=int, help="use only so many digits")
    add("--clutter", type=int, help="fragments of other digits in each scene (default: 6)")


def add_machine(group: Any, *, small: str) -> None:
    """Options for where and how it runs; ``small`` says what ``--small`` changes."""
    add = group.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: cuda if there is one)")
    add("--amp", action="store_true", help="train in bfloat16 autocast")
    add("--workers", type=int, default=4, help="processes that load --data (default: 4)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--small", action="store_true", help=f"a quick look: 32 x 32 pixels, few digits, no clutter, {small}")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Options for the output folder, and for a run that is there already."""
    parser.add_argument_group("output").add_argument("--out", default="results", help="folder (default: results)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="continue the run in --out")
    either.add_argument("--overwrite", action="store_true", help="delete the run in --out first")


def fill_in(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Set the options that the user did not give."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
