"""``tcnn-probe``: look at recordings from a shell, without torch."""

import argparse
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase

import xarray as xr

import tcnn_probe
from tcnn_probe.storage import StoreError, numbers

__all__ = ["main"]

_COLUMNS = (
    "gate", "locality_strength", "content_information", "entropy", "content_entropy", "positional_entropy",
    "attention_distance", "prefix_attention", "class_entropy",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 2 if it was told something wrong."""
    parser = argparse.ArgumentParser(prog="tcnn-probe", description="Look at recordings.")
    parser.add_argument("--version", action="version", version=tcnn_probe.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="layers, marks, the last mark's numbers, types of heads, what is missing")
    show.add_argument("store", help="path or URL of a recording")
    compare = commands.add_parser("compare", help="the numbers of two recordings at their last common mark")
    compare.add_argument("stores", nargs=2, metavar="store")
    plot = commands.add_parser("plot", help="a variable over the marks, as a figure")
    plot.add_argument("store")
    plot.add_argument("variable", help="such as entropy")
    plot.add_argument("-o", "--output", required=True, metavar="FILE", help="of any kind that matplotlib writes")
    plot.add_argument("--layers", default="*", metavar="GLOB", help="default: all")
    report = commands.add_parser("report", help="one page to look at in a browser, of one recording or two")
    report.add_argument("stores", nargs="+", metavar="store")
    report.add_argument("-o", "--output", required=True, metavar="FILE", help="such as report.html")
    report.add_argument("--max-mb", type=float, default=100, help="leave out maps until the page fits; default: 100")
    options = parser.parse_args(arguments)
    try:
        if options.command == "show":
            print(_printable(_shown(options.store)))
        elif options.command == "compare":
            print(_printable(_compared(*options.stores)))
        elif options.command == "report":
            tcnn_probe.report(options.stores, options.output, max_mb=options.max_mb)
        else:
            _plotted(options.store, options.variable, options.layers, options.output)
    except (StoreError, ValueError, OSError, ModuleNotFoundError) as error:
        print(_printable(f"tcnn-probe: {error}"), file=sys.stderr)
        return 2
    return 0


def _printable(text: str) -> str:
    """Escape what a terminal would take for commands: names of layers and attributes are those of a foreign file."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def _opened(store: str) -> xr.Dataset:
    """Scalars and heads in one dataset, after the checks that ``open`` makes."""
    return numbers(tcnn_probe.open(store))


def _shown(store: str) -> str:
    ds, tree = _opened(store), tcnn_probe.open(store)
    along = ds.attrs["along"]
    marks = ds[along].values
    if not len(marks):
        return f"{store}: no {along} marked"
    last = ds.isel({along: -1})
    lines = [
        f"{store}: {ds.attrs.get('model_class', 'a model')}, {len(marks)} marks, {along} {marks[0]} to {marks[-1]}"
    ]
    others = [path.strip("/") for path, _ in tree.subtree_with_keys if path not in (".", "", "heads")]
    if others := [path for path in others if tree[path].data_vars]:
        lines.append("also recorded: " + ", ".join(others))
    scalars = {name: values.item() for name, values in last.data_vars.items() if not values.dims}
    lines += [f"at {along} {marks[-1]}:", *(f"  {name} {value:.6g}" for name, value in scalars.items())]
    if "layer" in ds.dims:
        lines += ["", _table(last).to_string(float_format="{:.4g}".format, na_rep="")]
        types = tcnn_probe.head_types(ds).isel({along: -1})
        counts = {name: int((types == name).sum()) for name in sorted(set(types.values.ravel())) if name}
        lines += ["", "types of heads: " + ", ".join(f"{count} {name}" for name, count in counts.items())]
    for what in ("missing", "unsupported"):
        for name, why in json.loads(ds.attrs.get(what, "{}")).items():
            reasons = why.items() if isinstance(why, dict) else [("", why)]
            lines += [f"{what}: {name}{f' of {layer}' if layer else ''}: {reason}" for layer, reason in reasons]
    return "\n".join(lines)


def _table(ds: xr.Dataset):  # type: ignore[no-untyped-def]  # pandas has no types here
    """Means over heads, a row a layer."""
    names = [name for name in _COLUMNS if name in ds and "head" in ds[name].dims]
    return ds[names].mean("head").reset_coords(drop=True).to_dataframe()


def _compared(first: str, second: str) -> str:
    one, two = _opened(first), _opened(second)
    along = one.attrs["along"]
    if two.attrs["along"] != along:
        raise ValueError(f"{first} was marked by {along}, {second} by {two.attrs['along']}")
    common = sorted({*one[along].values.tolist()} & {*two[along].values.tolist()})
    if not common:
        raise ValueError(f"{first} and {second} have no {along} in common")
    one, two = one.sel({along: common[-1]}), two.sel({along: common[-1]})
    lines = [f"at {along} {common[-1]}: {second} minus {first}"]
    for name in [name for name in one.data_vars if name in two and not one[name].dims]:
        a, b = one[name].item(), two[name].item()
        lines.append(f"  {name} {b:.6g} - {a:.6g} = {b - a:.6g}")
    if "layer" in one.dims and "layer" in two.dims:
        for store, ds, other in ((first, one, two), (second, two, one)):
            if only := [layer for layer in ds.layer.values.tolist() if layer not in other.layer.values]:
                lines.append(f"  only in {store}: {', '.join(only)}")
        both = (_table(two) - _table(one)).dropna(how="all", axis=0).dropna(how="all", axis=1)
        if both.size:
            lines += ["", both.to_string(float_format="{:+.4g}".format, na_rep="")]
    return "\n".join(lines)


def _plotted(store: str, variable: str, layers: str, output: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ds = _opened(store)
    if variable not in ds.data_vars:
        raise ValueError(f"{store} has no {variable!r}; it has {', '.join(map(str, ds.data_vars))}")
    values = ds[variable]
    if "layer" in values.dims:
        chosen = [name for name in values.layer.values.tolist() if fnmatchcase(name, layers)]
        if not chosen:
            raise ValueError(f"no layer of {store} fits {layers!r}; there are {', '.join(values.layer.values)}")
        values = values.sel(layer=chosen)
    figure = plt.figure(layout="constrained")
    tcnn_probe.plot.evolution(values, figure.subplots())
    figure.savefig(output)
    plt.close(figure)
