"""Sentences of the page: missing variables, definitions, provenance."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from tcnn_probe.reporting.maps import Choice
from tcnn_probe.reporting.recordings import TYPE, Axes, Run
from tcnn_probe.reporting.variables import label, unit

__all__ = [
    "definitions",
    "missing",
    "provenance",
    "summary",
    "types_rest_on",
]


_SHOWN_ELSEWHERE = (
    "layers",
    "missing",
    "unsupported",
    "photographs",
    "photographs_unreadable",
)


def summary(axes: Axes, runs: Sequence[Run]) -> str:
    """Summarize the recordings in a line."""
    heads, marks = sum(axes.layers.values()), axes.marks
    span = f"{axes.along} {marks[0]}" + (
        f" to {marks[-1]} ({len(marks)} recorded)" if len(marks) > 1 else ""
    )
    models = {str(run.attrs.get("model_class", "")): None for run in runs}
    chosen = {str(run.attrs.get("photographs_chosen", "")): None for run in runs}
    if any(chosen):
        span = "; ".join(filter(None, chosen))
    return " · ".join([*filter(None, models), f"layers: {len(axes.layers)}, heads: {heads}", span])


def missing(
    axes: Axes,
    runs: Sequence[Run],
    choices: Sequence[Choice],
    max_mb: float,
    recorded: int,
) -> list[str]:
    """Say what is missing from the page, which has some
    of the recorded marks, or that nothing is.
    """
    lines = []
    if len(axes.marks) < recorded:
        lines.append(
            f"this page has {len(axes.marks)} of {recorded} {axes.along}s, evenly spread, because "
            f"max_mb={max_mb:g}; the recording has all"
        )
    for run, choice in zip(runs, choices, strict=True):
        run_lines = [*_missing_variables(run), *_missing_maps(run, choice, max_mb)]
        if len(runs) > 1:
            holder = "the other run has" if len(runs) == 2 else "another run has"
            run_lines += _missing_beside(run, axes, holder)
        if run.hidden:
            run_lines.append(f"recorded, but not on this page: {', '.join(run.hidden)}")
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        lines += [prefix + line for line in run_lines]
    return lines or ["Nothing: every layer and variable that was asked for was recorded."]


def types_rest_on(run: Run) -> str:
    """Say from how many images the types of heads are, and what few images bound."""
    attrs = run.numbers[TYPE].attrs if TYPE in run.numbers else {}
    if "images" not in attrs:
        return ""
    count = int(attrs["images"].split()[0])
    text = f"Types rest on {attrs['images']} photographs."
    if count > 1:
        bound = count / (count - 1) * np.log(count)
        text += (
            f" From {count}, content (the sum of its two parts) is at most n / (n - 1) log n = "
            f"{bound:.2f} nat"
        )
        layers = [*json.loads(attrs.get("bound", "{}"))]
        text += f", and too low in {', '.join(layers)}." if layers else "."
    return text


def _missing_variables(run: Run) -> Iterable[str]:
    """Say which layers and variables the recording lacks, and why."""
    for name, reason in json.loads(run.attrs.get("photographs_unreadable", "{}")).items():
        yield f"{name} could not be read: {reason}"
    if reason := run.attrs.get("without_objects"):
        yield f"attention on objects: {reason}"
    for layer, reason in json.loads(run.attrs.get("unsupported", "{}")).items():
        yield f"{layer} is not supported: {reason}"
    unlabelled = json.loads(run.numbers[TYPE].attrs["unlabelled"]) if TYPE in run.numbers else {}
    for name, reasons in (
        json.loads(run.attrs.get("missing", "{}")) | {"type": unlabelled}
    ).items():
        layers_by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for layer, reason in reasons.items():
            layers_by_reason[str(reason)].append(layer)
        for reason, layers in layers_by_reason.items():
            yield f"{label(name)} of {', '.join(layers)}: {reason}"
    variables = [*run.numbers.data_vars.values(), *run.scalars.data_vars.values()]
    empty = [label(str(values.name)) for values in variables if not np.isfinite(values).any()]
    if empty:
        yield f"no value at any {run.along}: {', '.join(empty)}"
    if TYPE not in run.numbers:
        yield "types of heads: the recording lacks variables that they need"


def _missing_maps(run: Run, choice: Choice, max_mb: float) -> Iterable[str]:
    """Say which maps of the recording are not on the page, and why."""
    if not run.maps:
        yield "maps: none were recorded (record(..., images=[0, 1]) keeps those of two images)"
        return
    if not choice.marks:
        yield f"maps: there is no room for them, because max_mb={max_mb:g}; the recording has them"
        return
    parts = []
    if len(choice.marks) < len(run.marks):
        spread = ", evenly spread" if len(choice.marks) > 1 else ""
        parts.append(f"{len(choice.marks)} of {len(run.marks)} {run.along}s{spread}")
    if choice.images < choice.total:
        parts.append(f"{choice.images} of {choice.total} images")
    if parts:
        yield (
            f"maps: this page has those of {' and of '.join(parts)}, "
            f"because max_mb={max_mb:g}; the recording has all"
        )


def _missing_beside(run: Run, axes: Axes, holder: str) -> Iterable[str]:
    """Say what a run lacks and others have."""
    variables = {*run.numbers.data_vars, *run.scalars.data_vars}
    heads = {layer: count - run.heads.get(layer, count) for layer, count in axes.layers.items()}
    lacking = {
        "layers": [layer for layer in axes.layers if layer not in run.heads],
        f"{axes.along}s": [str(mark) for mark in axes.marks if mark not in run.marks],
        "variables": [name for name in (axes.numbers | axes.scalars) if name not in variables],
        "heads": [f"{count} of {layer}" for layer, count in heads.items() if count],
    }
    for kind, names in lacking.items():
        if names:
            listed = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
            yield f"{holder} {kind} that this one has not: {listed}"


def definitions(axes: Axes, runs: Sequence[Run], maps: Iterable[str]) -> list[tuple[str, str, str]]:
    """List name, unit and definition of every variable on the page."""
    map_attrs = {
        str(name): values.attrs
        for run in runs
        for ds in run.maps
        for name, values in ds.data_vars.items()
    }
    variables = list((axes.numbers | axes.scalars).items()) + [
        (name, map_attrs[name]) for name in dict.fromkeys(maps)
    ]
    rows = []
    for name, attrs in variables:
        text = attrs.get("description", "")
        if name == TYPE:
            types = json.loads(attrs["definitions"]).items()
            text = "; ".join(f"{kind}: {definition}" for kind, definition in types if kind)
            name = label(name)
        rows.append((name, unit(attrs).strip() or "1", text))
    return rows


def provenance(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """List every attribute that is not shown elsewhere, with a value for each run."""
    keys = dict.fromkeys(key for run in runs for key in run.attrs if key not in _SHOWN_ELSEWHERE)
    return [
        ("recording", [run.name for run in runs]),
        *((key, [str(run.attrs.get(key, "")) for run in runs]) for key in keys),
    ]
