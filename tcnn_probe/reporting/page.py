"""The page: numbers and maps as bytes, Bokeh's figures, and the words around them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.models import ColumnDataSource, CustomJS
from bokeh.palettes import Cividis256
from bokeh.resources import INLINE

from tcnn_probe.heads import TYPES
from tcnn_probe.reporting import figures, notes
from tcnn_probe.reporting.maps import Choice, Maps, choose, packed
from tcnn_probe.reporting.recordings import Axes, Run, axes_of
from tcnn_probe.reporting.variables import label, variables_of

__all__ = ["page"]

_HERE = Path(__file__).parent
_OVERHEAD = 1_600_000
"""Bytes of Bokeh's own program and of the words."""

_BESIDE = {
    "self_attention": "class_attention",
    "token_attention": "class_attention",
    "distillation_self_attention": "distillation_attention",
    "distillation_token_attention": "distillation_attention",
    "class_index": "attention_by_class",
    "class_score": "attention_by_class",
}
"""Numbers that are shown with a map."""

_PALETTES = {
    "numbers": figures.NUMBERS,
    "differences": figures.DIFFERENCES,
    "types": figures.TYPES,
    "runs": figures.RUNS,
    "maps": Cividis256,
    "missing": figures.MISSING,
    "absent": figures.ABSENT,
    "same": [figures.SAME_TYPE, figures.OTHER_TYPE],
}


def page(runs: Sequence[Run], pictures: Sequence[str], max_mb: float) -> str:
    """The page of one run or two, HTML that needs nothing else; pictures are data URLs of the images, or none."""
    axes = axes_of(runs)
    variables, numbers = variables_of(axes, runs)
    room = max_mb * 1e6 - _OVERHEAD - len(numbers) * 4 / 3 - sum(map(len, pictures))
    choices = [choose(run, room / len(runs)) for run in runs]
    maps = [(number, entry) for number, run in enumerate(runs) for entry in packed(run, choices[number])]
    facts = {
        "along": axes.along,
        "marks": axes.marks,
        "heads": axes.heads,
        "layers": [{"name": layer, "heads": count} for layer, count in axes.layers.items()],
        "runs": [_run(run, axes, choice) for run, choice in zip(runs, choices, strict=True)],
        "variables": variables,
        "types": TYPES,
        "images": axes.images,
        "pictures": pictures,
        "tiles": [_tile(place, *each) for place, each in enumerate(maps)],
        "palettes": _PALETTES,
        "border": figures.BORDER,
    }
    words = {
        "summary": notes.summary(axes, runs),
        "missing": notes.missing(axes, runs, choices, max_mb),
        "meanings": notes.meanings(axes, runs, [entry.name for _, entry in maps]),
        "provenance": notes.provenance(runs),
        "runs": [run.name for run in runs],
        "colors": figures.RUNS,
        "along": axes.along,
    }
    args = {"page": json.dumps(facts), "numbers": numbers, "maps": [entry.data for _, entry in maps]}
    return _html(_document(axes, runs, variables, args), " and ".join(run.name for run in runs), words)


def _run(run: Run, axes: Axes, choice: Choice) -> dict[str, Any]:
    there = set(run.marks)
    return {
        "name": run.name,
        "layers": list(run.heads),
        "images": run.images,
        "marked": [mark in there for mark in axes.marks],
        "kept": [axes.marks.index(run.marks[place]) for place in choice.marks],
    }


def _tile(place: int, run: int, entry: Maps) -> dict[str, Any]:
    """What is known of a map besides its bytes."""
    *_, height, width = entry.shape
    return {
        "place": place,
        "run": run,
        "layer": entry.layer,
        "name": entry.name,
        "label": label(entry.name),
        "beside": _BESIDE.get(entry.name),
        "shape": entry.shape,
        "by": entry.by,
        "windows": entry.windows,
        "query": [height // 2, width // 2] if entry.name == "center_attention" and not entry.windows else None,
    }


def _document(axes: Axes, runs: Sequence[Run], variables: Sequence[dict[str, Any]], args: dict[str, Any]) -> Document:
    """Bokeh's figures, and the program that fills them."""
    document = Document()
    counts = [run.heads for run in runs]
    if len(runs) == 2:
        counts.append({layer: min(count, runs[1].heads.get(layer, 0)) for layer, count in runs[0].heads.items()})
    grids = [figures.grid(axes, f"grid {number}", each) for number, each in enumerate(counts)]
    sources = [ColumnDataSource({axes.along: []}) for _ in runs]
    curves = [figures.curve(axes, variable, sources) for variable in variables if variable["curve"]]
    with document.models.freeze():  # or each root is compared with all before it
        for plot in [*(plot for plot, *_ in grids), *curves]:
            document.add_root(plot)
    _, cells, mappers, boxes = zip(*grids, strict=True)
    args |= {"grids": list(cells), "mappers": list(mappers), "boxes": list(boxes), "sources": sources, "plots": curves}
    program = CustomJS(args=args, code=(_HERE / "page.js").read_text(encoding="utf-8"))
    document.js_on_event("document_ready", program)  # the document's event, which no model hears
    names = [run.name for run in runs]
    captions = [""] if len(names) == 1 else [*names, f"{names[1]} minus {names[0]}"]
    document.template_variables["grids"] = [
        {"root": plot.name, "width": figures.width_of(axes), "caption": caption}
        for (plot, *_), caption in zip(grids, captions, strict=True)
    ]
    document.template_variables["variables"] = [variable for variable in variables if variable["curve"]]
    return document


def _html(document: Document, title: str, words: dict[str, Any]) -> str:
    template = (_HERE / "page.html").read_text(encoding="utf-8")
    variables = words | document.template_variables
    return file_html(
        document, INLINE, title=f"Attention heads: {title}", template=template, template_variables=variables
    )
