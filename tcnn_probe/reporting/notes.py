"""What the page says in words: what is missing, what the variables mean, where the recordings come from."""

import json
from collections.abc import Iterable, Sequence

import numpy as np

from tcnn_probe.reporting.maps import Choice
from tcnn_probe.reporting.recordings import TYPE, Axes, Run
from tcnn_probe.reporting.variables import label, unit

__all__ = ["meanings", "missing", "provenance", "summary"]


def summary(axes: Axes, runs: Sequence[Run]) -> str:
    """A line below the title."""
    heads, marks = sum(axes.layers.values()), axes.marks
    span = f"{axes.along} {marks[0]}" + (f" to {marks[-1]} ({len(marks)} recorded)" if len(marks) > 1 else "")
    models = {str(run.attrs.get("model_class", "")): None for run in runs}
    return " · ".join([*filter(None, models), f"layers: {len(axes.layers)}, heads: {heads}", span])


def missing(axes: Axes, runs: Sequence[Run], choices: Sequence[Choice], max_mb: float) -> list[str]:
    """Sentences; one if nothing is missing."""
    lines = []
    for run, choice in zip(runs, choices, strict=True):
        whose = f"{run.name}: " if len(runs) > 1 else ""
        found = [*_of_attrs(run), *_of_maps(run, choice, max_mb), *(_against(run, axes) if len(runs) > 1 else ())]
        if run.hidden:
            found.append(f"recorded, but not on this page: {', '.join(run.hidden)}")
        lines += [whose + line for line in found]
    return lines or ["Nothing: every layer and variable that was asked for was recorded."]


def _of_attrs(run: Run) -> Iterable[str]:
    """What the recording says of itself."""
    for layer, why in json.loads(run.attrs.get("unsupported", "{}")).items():
        yield f"{layer} is not supported: {why}"
    unlabelled = json.loads(run.numbers[TYPE].attrs["unlabelled"]) if TYPE in run.numbers else {}
    for name, whys in (json.loads(run.attrs.get("missing", "{}")) | {"type": unlabelled}).items():
        reasons: dict[str, list[str]] = {}
        for layer, why in whys.items():
            reasons.setdefault(str(why), []).append(layer)
        for why, layers in reasons.items():
            yield f"{label(name)} of {', '.join(layers)}: {why}"
    if empty := [name for name, one in (run.numbers | run.scalars).items() if not np.isfinite(one).any()]:
        yield f"no value at any {run.along}: {', '.join(label(str(name)) for name in empty)}"
    if TYPE not in run.numbers:
        yield "types of heads: the recording lacks variables that they need"


def _of_maps(run: Run, choice: Choice, max_mb: float) -> Iterable[str]:
    """What of the maps is not on the page."""
    if not run.maps:
        yield "maps: none were recorded (record(..., images=[0, 1]) keeps those of two images)"
        return
    if not choice.marks:
        yield f"maps: there is no room for them, because max_mb={max_mb:g}; the recording has them"
        return
    left = []
    if len(choice.marks) < len(run.marks):
        spread = ", evenly spread" if len(choice.marks) > 1 else ""
        left.append(f"{len(choice.marks)} of {len(run.marks)} {run.along}s{spread}")
    if choice.images < choice.total:
        left.append(f"{choice.images} of {choice.total} images")
    if left:
        yield f"maps: this page has those of {' and of '.join(left)}, because max_mb={max_mb:g}; the recording has all"


def _against(run: Run, axes: Axes) -> Iterable[str]:
    """What another run has and this one does not."""
    parts = {
        "layers": [layer for layer in axes.layers if layer not in run.heads],
        f"{axes.along}s": [str(mark) for mark in axes.marks if mark not in run.marks],
        "variables": [n for n in (axes.numbers | axes.scalars) if n not in run.numbers and n not in run.scalars],
        "heads": [
            f"{n - run.heads[layer]} of {layer}" for layer, n in axes.layers.items() if run.heads.get(layer, n) < n
        ],
    }
    for what, lacking in parts.items():
        if lacking:
            some = ", ".join(lacking[:8]) + (f", ... ({len(lacking)})" if len(lacking) > 8 else "")
            yield f"the other run has {what} that this one has not: {some}"


def meanings(axes: Axes, runs: Sequence[Run], maps: Iterable[str]) -> list[tuple[str, str, str]]:
    """Name, unit and definition of everything that is shown."""
    rows = []
    for name, attrs in (axes.numbers | axes.scalars).items():
        if name == TYPE:
            defined = json.loads(attrs["definitions"]).items()
            text = "; ".join(f"{one}: {meaning}" for one, meaning in defined if one)
        else:
            text = attrs.get("description", "")
        rows.append((label(name) if name == TYPE else name, unit(attrs).strip() or "1", text))
    of_maps = {str(n): values.attrs for run in runs for ds in run.maps for n, values in ds.data_vars.items()}
    return rows + [(n, unit(of_maps[n]).strip() or "1", of_maps[n].get("description", "")) for n in dict.fromkeys(maps)]


def provenance(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Every attribute that is not shown elsewhere, a value for each run."""
    keys = dict.fromkeys(key for run in runs for key in run.attrs if key not in ("layers", "missing", "unsupported"))
    return [
        ("recording", [run.name for run in runs]),
        *((key, [str(run.attrs.get(key, "")) for run in runs]) for key in keys),
    ]
