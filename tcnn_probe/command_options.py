"""The commands of ``tcnn-probe`` and their options."""

import argparse
from typing import Any

import tcnn_probe

__all__ = ["create_parser"]

_RECORDING = "path or URL of a recording"


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of ``tcnn-probe``, which stores the name of the command as ``command``."""
    parser = argparse.ArgumentParser(
        prog="tcnn-probe", description="Inspect recordings and attention."
    )
    parser.add_argument("--version", action="version", version=tcnn_probe.__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    look = _add_command(
        commands,
        "look",
        "look at photographs with a pretrained model, and write what its heads do as one page",
    )
    _add_look_options(look)

    show = _add_command(
        commands,
        "show",
        "show layers, marks, the last mark's numbers, types of heads, and what is missing",
    )
    show.add_argument("store", help=_RECORDING)

    health = _add_command(
        commands,
        "health",
        "list signs of illness, worst first; exit with 1 if there are alarms",
    )
    health.add_argument("store", help=_RECORDING)
    health.add_argument(
        "--limit",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="limit that replaces the default, such as --limit max_logit 200",
    )

    compare = _add_command(
        commands,
        "compare",
        "compare the numbers of two recordings at their last common mark",
    )
    compare.add_argument("stores", nargs=2, metavar="store", help=_RECORDING)

    plot = _add_command(
        commands,
        "plot",
        "draw a variable over the marks, or at a single mark against depth",
    )
    plot.add_argument("store", help=_RECORDING)
    plot.add_argument(
        "variable",
        help="name of the variable, such as entropy; anatomy for the parts of each head, or "
        "offset_kernel",
    )
    _add_output(plot, "file of the figure, such as entropy.png")
    plot.add_argument("--layers", default="*", metavar="GLOB", help="layers to draw (default: all)")

    report = _add_command(
        commands,
        "report",
        "write up to four recordings as one page for a browser",
    )
    _add_report_options(report)

    maps = _add_command(commands, "maps", "draw the attention of a timm model's heads in a picture")
    _add_map_options(maps)

    _add_command(commands, "info", "show versions, device and threads, for a report of a bug")
    return parser


def _add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command with the same description
    in the list of commands and in the command's own help.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    return parser


def _add_output(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=text)


def _add_look_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="MODEL PHOTOGRAPHS",
        help="a model, or up to four side by side: a name of timm or torchvision, a folder or name "
        "of Hugging Face, or module:function, which is imported and called; then a folder of "
        "photographs, or files",
    )
    _add_output(
        parser,
        "file of the page; the recording is beside it, with the ending .zarr, and what the page "
        "says, with .json",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--pretrained",
        action="store_true",
        help="take the weights that the library downloads (default)",
    )
    source.add_argument(
        "--weights",
        action="append",
        metavar="FILE",
        help="checkpoint of the model's weights; repeated, one for each model, or several of one "
        "model",
    )
    source.add_argument("--random", action="store_true", help="use random weights")
    parser.add_argument(
        "--models",
        metavar="FILE",
        help="file with a model on each line; the output is then a folder with a page for each and "
        "a table",
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="address of a dask scheduler whose workers share the models of --models",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=256,
        metavar="N",
        help="largest number of photographs, spread evenly over folders (default: 256)",
    )
    parser.add_argument(
        "--shown",
        type=int,
        default=6,
        metavar="N",
        help="number of photographs whose maps the page shows (default: 6)",
    )
    parser.add_argument(
        "--masks",
        metavar="FOLDER",
        help="masks of the objects in the photographs, white on black, with the same stems",
    )
    parser.add_argument(
        "--size",
        type=int,
        metavar="PIXELS",
        help="side of the images (default: the model's own)",
    )
    parser.add_argument("--device", help="device, such as cuda (default: cpu)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16", "float64"],
        help="dtype of the model",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="photographs at a time (default: 16)",
    )
    parser.add_argument(
        "--max-mb",
        type=float,
        default=5,
        metavar="MB",
        help="largest size of the page; maps are left out until it fits (default: 5)",
    )


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stores", nargs="+", metavar="store", help=_RECORDING)
    _add_output(parser, "file of the page, such as report.html")
    parser.add_argument(
        "--max-mb",
        type=float,
        default=3,
        metavar="MB",
        help="largest size of the page; maps and epochs are left out until it fits (default: 3)",
    )


def _add_map_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="timm's name of the model, such as deit_tiny_patch16_224")
    parser.add_argument("image", help="file of the picture")
    _add_output(
        parser,
        "file of the figure, such as maps.png; an .html file has all queries, to click around in",
    )
    parser.add_argument(
        "--query",
        nargs=2,
        type=int,
        metavar=("Y", "X"),
        help="pixel of the image as the model takes it (default: the class token, or else the "
        "middle)",
    )
    parser.add_argument("--layers", nargs="+", metavar="GLOB", help="layers to draw (default: all)")
    parser.add_argument(
        "--heads",
        nargs="+",
        type=int,
        metavar="HEAD",
        help="heads to draw (default: all)",
    )
    parser.add_argument(
        "--scale",
        choices=["own", "common"],
        default="own",
        help="scale of colours: of each map, or common to all (default: own)",
    )
    parser.add_argument("--weights", metavar="FILE", help="checkpoint of the model's weights")
    parser.add_argument(
        "--random",
        action="store_true",
        help="use random weights, so that nothing is downloaded",
    )
