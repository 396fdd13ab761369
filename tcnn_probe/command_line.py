"""``tcnn-probe``: recordings in a shell, without torch; and the attention of a model in a picture, with it."""

import argparse
import difflib
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

import tcnn_probe
from tcnn_probe.storage import StoreError, numbers

if TYPE_CHECKING:
    from torch import nn

__all__ = ["main"]

_COLUMNS = (
    "gate", "locality_strength", "content_information", "entropy", "content_entropy", "positional_entropy",
    "attention_distance", "prefix_attention", "class_entropy",
)  # fmt: skip

# The libraries that have most to do with what goes wrong: those measured, those that compute, those that store.
_PACKAGES = (
    "torch", "timm", "torchvision", "transformers", "lightning", "captum", "triton", "numpy", "xarray", "zarr",
    "matplotlib", "bokeh", "dask",
)  # fmt: skip
# Read by OpenMP, MKL and torch when they are loaded; numbers and speed may depend on them.
_SETTINGS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 1 for alarms of health, 2 for a recording or variable that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="tcnn-probe", description="Look at recordings, and at attention."
    )
    parser.add_argument("--version", action="version", version=tcnn_probe.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser(
        "show",
        help="layers, marks, the last mark's numbers, types of heads, what is missing",
    )
    show.add_argument("store", help="path or URL of a recording")
    health = commands.add_parser(
        "health", help="signs of illness, worst first; exits with 1 if there are alarms"
    )
    health.add_argument("store")
    health.add_argument(
        "--limit",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="a limit in place of the default, such as --limit max_logit 200",
    )
    compare = commands.add_parser(
        "compare", help="the numbers of two recordings at their last common mark"
    )
    compare.add_argument("stores", nargs=2, metavar="store")
    plot = commands.add_parser("plot", help="a variable over the marks, as a figure")
    plot.add_argument("store")
    plot.add_argument("variable", help="such as entropy")
    plot.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="of any kind that matplotlib writes",
    )
    plot.add_argument("--layers", default="*", metavar="GLOB", help="default: all")
    report = commands.add_parser(
        "report", help="one page to look at in a browser, of up to four recordings"
    )
    report.add_argument("stores", nargs="*", metavar="store")
    report.add_argument(
        "--seeds",
        nargs="+",
        action="append",
        default=[],
        metavar="STORE",
        help="recordings of the same training, shown as means with bands; may be repeated",
    )
    report.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="such as report.html"
    )
    report.add_argument(
        "--max-mb",
        type=float,
        default=100,
        help="leave out maps until the page fits; default: 100",
    )
    maps = commands.add_parser(
        "maps", help="where the heads of a model of timm look in a picture, as a figure"
    )
    maps.add_argument("model", help="name in timm, such as deit_tiny_patch16_224")
    maps.add_argument("image", help="file of a picture")
    maps.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="such as maps.png; maps.html, to click around in, has all queries",
    )
    maps.add_argument(
        "--query",
        nargs=2,
        type=int,
        metavar=("Y", "X"),
        help="pixel of the image as the model takes it; default: the class token, or else the middle",
    )
    maps.add_argument("--layers", nargs="+", metavar="GLOB", help="default: all")
    maps.add_argument("--heads", nargs="+", type=int, help="default: all")
    maps.add_argument("--scale", choices=["own", "common"], default="own")
    maps.add_argument("--weights", metavar="FILE", help="a checkpoint of the model")
    maps.add_argument(
        "--random", action="store_true", help="untrained: nothing is downloaded"
    )
    commands.add_parser(
        "info", help="versions, device and threads, for a report of a bug"
    )
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Run the command that was asked for, and print what is wrong with its recordings."""
    try:
        if options.command == "info":
            print(_printable("\n".join(_info())))
        elif options.command == "show":
            print(_printable(_describe(options.store)))
        elif options.command == "health":
            limits = {name: float(value) for name, value in options.limit}
            findings = tcnn_probe.health(_open_numbers(options.store), **limits)
            print(_printable(repr(findings)))
            return 1 if findings.alarms else 0
        elif options.command == "compare":
            print(_printable(_compare(*options.stores)))
        elif options.command == "report":
            recordings = [*options.stores, *options.seeds]
            tcnn_probe.report(recordings, options.output, max_mb=options.max_mb)
        elif options.command == "maps":
            _maps(options)
        else:
            _plot(options.store, options.variable, options.layers, options.output)
    except (
        StoreError,
        ValueError,
        TypeError,
        RuntimeError,
        OSError,
        ImportError,
    ) as error:
        print(_printable(f"tcnn-probe: {error}"), file=sys.stderr)
        return 2
    return 0


def _printable(text: str) -> str:
    """Escape what a terminal would take for commands: names of layers and attributes are those of a foreign file."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1]
        for letter in text
    )


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning: matplotlib's have letters of names in them that it cannot draw."""
    print(_printable(f"tcnn-probe: {message}"), file=sys.stderr)


def _info() -> Iterator[str]:
    """Yield lines on the versions, the platform and the settings, without names of the host, the user or paths."""
    yield f"tcnn-probe {tcnn_probe.__version__}"
    yield f"Python {platform.python_version()} ({platform.python_implementation()})"
    # Not platform.platform(): the release of a kernel may be named after the host that it was built for.
    yield f"platform: {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    for package in _PACKAGES:
        yield f"{package} {_installed_version(package)}"
    for setting in _SETTINGS:
        yield f"{setting}: {os.environ.get(setting, 'not set')}"
    try:
        import torch
    # Absent, or without a library that it needs.
    except (ImportError, OSError) as error:
        yield f"device: unknown, as importing torch raises {type(error).__name__}"
        return
    yield f"torch's threads: {torch.get_num_threads()}, between operators {torch.get_num_interop_threads()}"
    yield f"instruction set: {torch.backends.cpu.get_cpu_capability()}"
    yield f"CUDA of torch: {torch.version.cuda or 'none'}"
    devices = [
        torch.cuda.get_device_name(number)
        for number in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        devices.append("mps")
    yield f"device: {', '.join(devices) or 'cpu'}"


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _open_numbers(store: str) -> xr.Dataset:
    """Open a recording's scalars and heads as one dataset."""
    return numbers(tcnn_probe.open(store))


def _describe(store: str) -> str:
    ds, tree = _open_numbers(store), tcnn_probe.open(store)
    along = ds.attrs["along"]
    marks = ds[along].values
    if not len(marks):
        return f"{store}: no {along} marked"
    last = ds.isel({along: -1})
    lines = [
        f"{store}: {ds.attrs.get('model_class', 'a model')}, {len(marks)} marks, {along} {marks[0]} to {marks[-1]}"
    ]
    groups = [
        path.strip("/") for path, node in tree.subtree_with_keys if node.data_vars
    ]
    groups = [path for path in groups if path not in (".", "", "heads")]
    if groups:
        lines.append("also recorded: " + ", ".join(groups))
    scalars = {
        name: values.item()
        for name, values in last.data_vars.items()
        if not values.dims
    }
    lines += [
        f"at {along} {marks[-1]}:",
        *(f"  {name} {value:.6g}" for name, value in scalars.items()),
    ]
    if "layer" in ds.dims:
        lines += ["", _table(last).to_string(float_format="{:.4g}".format, na_rep="")]
        types = tcnn_probe.head_types(ds).isel({along: -1})
        counts = {
            name: int((types == name).sum())
            for name in sorted(set(types.values.ravel()))
            if name
        }
        lines += [
            "",
            "types of heads: "
            + ", ".join(f"{count} {name}" for name, count in counts.items()),
        ]
    for variable, reasons in json.loads(ds.attrs.get("missing", "{}")).items():
        lines += [
            f"missing: {variable} of {layer}: {reason}"
            for layer, reason in reasons.items()
        ]
    lines += [
        f"unsupported: {layer}: {reason}"
        for layer, reason in json.loads(ds.attrs.get("unsupported", "{}")).items()
    ]
    return "\n".join(lines)


def _table(ds: xr.Dataset):  # type: ignore[no-untyped-def]  # pandas has no types here
    """Tabulate means over heads, with a row for each layer."""
    names = [name for name in _COLUMNS if name in ds and "head" in ds[name].dims]
    return ds[names].mean("head").reset_coords(drop=True).to_dataframe()


def _compare(first: str, second: str) -> str:
    a, b = _open_numbers(first), _open_numbers(second)
    along = a.attrs["along"]
    if b.attrs["along"] != along:
        raise ValueError(
            f"{first} was marked by {along}, {second} by {b.attrs['along']}"
        )
    common = set(a[along].values.tolist()) & set(b[along].values.tolist())
    if not common:
        raise ValueError(f"{first} and {second} have no {along} in common")
    mark = max(common)
    a, b = a.sel({along: mark}), b.sel({along: mark})
    lines = [f"at {along} {mark}: {second} minus {first}"]
    for name, values in a.data_vars.items():
        if name in b and not values.dims:
            before, after = values.item(), b[name].item()
            lines.append(f"  {name} {after:.6g} - {before:.6g} = {after - before:.6g}")
    if "layer" in a.dims and "layer" in b.dims:
        layers = a.layer.values.tolist(), b.layer.values.tolist()
        for store, present, compared in ((first, *layers), (second, *reversed(layers))):
            unique = [layer for layer in present if layer not in compared]
            if unique:
                lines.append(f"  only in {store}: {', '.join(unique)}")
        difference = (
            (_table(b) - _table(a)).dropna(how="all", axis=0).dropna(how="all", axis=1)
        )
        if difference.size:
            lines += [
                "",
                difference.to_string(float_format="{:+.4g}".format, na_rep=""),
            ]
    return "\n".join(lines)


def _maps(options: argparse.Namespace) -> None:
    """Draw the attention of a model of timm in a picture."""
    import matplotlib as mpl

    mpl.use("Agg")  # a shell may have no display
    import matplotlib.pyplot as plt

    if options.weights is None:
        model = _with_timms_weights(options.model, pretrained=not options.random)
    else:
        model = _with_weights(options.model, options.weights)
    if options.output.endswith(".html"):
        maps = tcnn_probe.attention_maps(
            model, options.image, layers=options.layers, heads=options.heads
        )
        tcnn_probe.explore(maps, options.output)
        return
    query: Any = None if options.query is None else tuple(options.query)
    maps = tcnn_probe.attention_maps(
        model, options.image, queries=None if query is None else [query]
    )
    has_class = any("class_attention" in node for node in maps.children.values())
    if query is None and has_class:
        query = "class"
    figure = tcnn_probe.plot.attention_maps(
        maps,
        query=query,
        layers=options.layers,
        heads=options.heads,
        scale=options.scale,
    )
    figure.savefig(options.output, dpi=150)
    plt.close(figure)


def _with_timms_weights(name: str, *, pretrained: bool) -> "nn.Module":
    """Return a model of timm; with the way out where it is misspelt, or its weights cannot be downloaded."""
    import timm

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"timm has no model {name}{hint}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    except OSError as error:  # no network, or no such file there
        raise ValueError(
            f"no weights of {name} could be downloaded: give a file, --weights FILE, or --random for none ({error})"
        ) from error
    return model


def _with_weights(name: str, path: str) -> "nn.Module":
    """Return a model of timm with the weights and the classes of a file, of which no code is run."""
    import timm
    from timm.models import get_pretrained_cfg, load_state_dict

    if not Path(path).is_file():
        raise ValueError(f"--weights: there is no file {path}")
    try:
        # By default timm 1.0.20, the oldest one supported, runs code that a file holds.
        state = load_state_dict(path, weights_only=True)
        classifier = getattr(get_pretrained_cfg(name), "classifier", None) or "head"
        # One name, or several (DeiT with distillation).
        first = classifier if isinstance(classifier, str) else classifier[0]
        bias = state.get(f"{first}.bias")
        options = {} if bias is None else {"num_classes": len(bias)}
        model: nn.Module = timm.create_model(name, **options)
        model.load_state_dict(state)
    except (
        Exception
    ) as error:  # torch and safetensors raise many kinds for damaged files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{path} is damaged, or holds more than weights, or those of another model: {reason}"
        ) from error
    return model


def _plot(store: str, variable: str, layers: str, output: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")  # a shell may have no display
    import matplotlib.pyplot as plt

    ds = _open_numbers(store)
    if variable not in ds.data_vars:
        raise ValueError(
            f"{store} has no {variable!r}; it has {', '.join(map(str, ds.data_vars))}"
        )
    values = ds[variable]
    if "layer" in values.dims:
        names = [
            name for name in values.layer.values.tolist() if fnmatchcase(name, layers)
        ]
        if not names:
            raise ValueError(
                f"no layer of {store} matches {layers!r}; it has {', '.join(values.layer.values)}"
            )
        values = values.sel(layer=names)
    figure = plt.figure(layout="constrained")
    tcnn_probe.plot.evolution(values, figure.subplots())
    figure.savefig(output)
    plt.close(figure)
