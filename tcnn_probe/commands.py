"""What ``tcnn-probe`` does: with recordings,
without torch; and with a model and pictures, with torch.
"""

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import xarray as xr

import tcnn_probe
from tcnn_probe.extras import needed_for
from tcnn_probe.storage import StoreError, numbers

__all__ = ["run"]

_COLUMNS = (
    "gate", "locality_strength", "selectivity", "offset_information", "position_information",
    "key_content_information", "query_key_content_information", "content_information",
    "entropy", "content_entropy",
    "positional_entropy", "attention_distance", "prefix_attention", "class_entropy",
)  # fmt: skip

# Packages whose versions matter most for errors: those that are measured, that compute and that
# store.
_PACKAGES = (
    "torch", "timm", "torchvision", "transformers", "lightning", "captum", "triton",
    "numpy", "xarray", "zarr",
    "matplotlib", "bokeh", "dask",
)  # fmt: skip
# Variables that OpenMP, MKL, oneDNN and torch read when they are loaded, and on which numbers and
# speed may depend.
_SETTINGS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the requested command, print errors of its recordings and options,
    and return the exit code.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        with needed_for(options.command):
            return _execute(options)
    except (
        StoreError,
        ValueError,
        TypeError,
        RuntimeError,
        OSError,
        ImportError,
    ) as error:
        print(_printable(f"tcnn-probe: {error}"), file=sys.stderr)
        # NoAttentionError cannot be named here: importing it takes torch.
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        print("tcnn-probe: interrupted", file=sys.stderr)
        return 130


def _execute(options: argparse.Namespace) -> int:
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
        tcnn_probe.report(options.stores, options.output, max_mb=options.max_mb)
        _name_file(options.output)
    elif options.command == "maps":
        _maps(options)
        _name_file(options.output)
    elif options.command == "look":
        from tcnn_probe.looking.command import run_look

        page = run_look(options)
        if page is not None:
            _name_file(page)
    else:
        _plot(options.store, options.variable, options.layers, options.output)
        _name_file(options.output)
    return 0


def _name_file(path: str | os.PathLike[str]) -> None:
    """Print which file a command has written."""
    print(_printable(f"wrote {path}"))


def _printable(text: str) -> str:
    """Escape control characters of a terminal,
    which names of layers and attributes of a foreign file may contain.
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning, escaped because matplotlib's warnings contain letters
    of names that it cannot draw.
    """
    print(_printable(f"tcnn-probe: {message}"), file=sys.stderr)


def _info() -> Iterator[str]:
    """Yield lines on the versions, the platform and the settings,
    without names of the host, the user or paths.
    """
    yield f"tcnn-probe {tcnn_probe.__version__}"
    yield f"Python {platform.python_version()} ({platform.python_implementation()})"
    # platform.platform() is avoided, because the release of a kernel may contain the name of a
    # host.
    yield f"platform: {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    for package in _PACKAGES:
        yield f"{package} {_installed_version(package)}"
    for setting in _SETTINGS:
        yield f"{setting}: {os.environ.get(setting, 'not set')}"
    try:
        import torch
    # torch is not installed, or lacks a library that it needs.
    except (ImportError, OSError) as error:
        yield f"device: unknown, as importing torch raises {type(error).__name__}"
        return
    between = torch.get_num_interop_threads()
    yield f"torch's threads: {torch.get_num_threads()}, between operators {between}"
    yield f"instruction set: {torch.backends.cpu.get_cpu_capability()}"
    yield f"CUDA of torch: {torch.version.cuda or 'none'}"
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
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
    several = f"{len(marks)} marks, {along} {marks[0]} to {marks[-1]}"
    lines = [
        f"{store}: {ds.attrs.get('model_class', 'a model')}, "
        + (several if len(marks) > 1 else f"1 mark, {along} {marks[0]}")
    ]
    groups = [path.strip("/") for path, node in tree.subtree_with_keys if node.data_vars]
    groups = [path for path in groups if path not in (".", "", "heads")]
    if groups:
        lines.append("also recorded: " + ", ".join(groups))
    scalars = {name: values.item() for name, values in last.data_vars.items() if not values.dims}
    lines += [
        f"at {along} {marks[-1]}:",
        *(f"  {name} {value:.6g}" for name, value in scalars.items()),
    ]
    if "layer" in ds.dims:
        lines += ["", _table(last).to_string(float_format="{:.4g}".format, na_rep="")]
        types = tcnn_probe.head_types(ds).isel({along: -1})
        counts = {
            name: int((types == name).sum()) for name in sorted(set(types.values.ravel())) if name
        }
        images = types.attrs.get("images")
        source = f" (from {images} images)" if images else ""
        listed = [f"{count} {name}" for name, count in counts.items()]
        if "uncertain" in types.coords and types.uncertain.any():
            listed.append(f"{int(types.uncertain.sum())} of these uncertain")
        lines += ["", f"types of heads{source}: {', '.join(listed)}"]
    lines += _missing(json.loads(ds.attrs.get("missing", "{}")))
    lines += [
        f"unsupported: {layer}: {reason}"
        for layer, reason in json.loads(ds.attrs.get("unsupported", "{}")).items()
    ]
    return "\n".join(lines)


def _missing(missing: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for the variables that the same layers lack for the same reason."""
    together: dict[tuple[str, str], list[str]] = {}
    for variable, reasons in missing.items():
        for reason in dict.fromkeys(reasons.values()):
            layers = ", ".join(layer for layer, why in reasons.items() if why == reason)
            together.setdefault((layers, reason), []).append(variable)
    for (layers, reason), variables in together.items():
        yield f"missing: {', '.join(variables)} of {layers}: {reason}"


def _table(ds: xr.Dataset):  # type: ignore[no-untyped-def]  # pandas has no types here
    """Tabulate means over heads, with a row for each layer."""
    names = [name for name in _COLUMNS if name in ds and "head" in ds[name].dims]
    return ds[names].mean("head").reset_coords(drop=True).to_dataframe()


def _compare(first: str, second: str) -> str:
    a, b = _open_numbers(first), _open_numbers(second)
    along = a.attrs["along"]
    if b.attrs["along"] != along:
        raise ValueError(f"{first} was marked by {along}, {second} by {b.attrs['along']}")
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
        if "images" in a and "images" in b:
            before, after = a.images.max().item(), b.images.max().item()
            if before != after:
                reason = "content information from fewer is too low"
                lines.append(f"  of {after:g} and {before:g} images: {reason}")
        layers = a.layer.values.tolist(), b.layer.values.tolist()
        for store, present, compared in ((first, *layers), (second, *reversed(layers))):
            unique = [layer for layer in present if layer not in compared]
            if unique:
                lines.append(f"  only in {store}: {', '.join(unique)}")
        difference = (_table(b) - _table(a)).dropna(how="all", axis=0).dropna(how="all", axis=1)
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

    from tcnn_probe.looking.named_models import create_timm_model, with_weights
    from tcnn_probe.reporting.report import output_file

    output_file(options.output, "a figure, such as maps.png, or of a page, such as maps.html")
    if options.weights is None:
        model = create_timm_model(options.model, pretrained=not options.random)
    else:
        model = with_weights(options.model, options.weights)
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


def _plot(store: str, variable: str, layers: str, output: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")  # a shell may have no display
    import matplotlib.pyplot as plt

    from tcnn_probe.reporting.report import output_file

    output_file(output, "a figure, such as entropy.png")
    ds = _open_numbers(store)
    kernels = None
    tree = tcnn_probe.open(store)
    if variable == "offset_kernel" and "offset-kernel" in tree.children:
        kernels = tree["offset-kernel"].dataset.offset_kernel
    if kernels is None and variable not in (*ds.data_vars, "anatomy"):
        raise ValueError(f"{store} has no {variable!r}; it has {', '.join(map(str, ds.data_vars))}")
    values: Any = kernels
    if kernels is None:
        values = ds if variable == "anatomy" else ds[variable]
    if "layer" in values.dims:
        names = [name for name in values.layer.values.tolist() if fnmatchcase(name, layers)]
        if not names:
            raise ValueError(
                f"no layer of {store} matches {layers!r}; it has {', '.join(values.layer.values)}"
            )
        values = values.sel(layer=names)
    along = ds.attrs["along"]
    if kernels is not None:
        last = {along: -1}
        axes = tcnn_probe.plot.offset_kernels(values.isel(last), positional=ds.isel(last))
    elif variable == "anatomy":
        axes = tcnn_probe.plot.anatomy(values)
    elif ds.sizes[along] == 1 and {"layer", "head"} <= {*values.dims}:
        # A training of one mark has no curves.
        axes = tcnn_probe.plot.depth(values)
    else:
        axes = tcnn_probe.plot.evolution(values, plt.figure(layout="constrained").subplots())
    figure: Any = axes.figure
    figure.savefig(output)
    plt.close(figure)
