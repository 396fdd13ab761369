"""The page: numbers and maps as bytes, Bokeh's figures, and the text around them."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.models import ColumnDataSource, CustomJS
from bokeh.palettes import Cividis256
from bokeh.resources import INLINE

from tcnn_probe.heads import TYPES
from tcnn_probe.reporting import figures, health_panel, notes
from tcnn_probe.reporting.drawings import draw_heads
from tcnn_probe.reporting.maps import Choice, Maps, choose_maps, pack_maps
from tcnn_probe.reporting.networks import (
    describe_network,
    facts_of,
    first_head,
    image_names,
)
from tcnn_probe.reporting.recordings import Axes, Run, common_axes, thin_marks
from tcnn_probe.reporting.variables import label, pack_variables

__all__ = ["page"]

_BROWSER = Path(__file__).with_name("browser")
# Parts of one program, in this order: the last one starts the page.
_PROGRAM = ("values", "grids", "curves", "strips", "maps", "table", "controls")
_OVERHEAD = 1_600_000  # bytes of Bokeh's own program, 1.4 MB, and of the text

# Numbers that are shown beside a map.
_BESIDE = {
    "self_attention": "class_attention",
    "token_attention": "class_attention",
    "distillation_self_attention": "distillation_attention",
    "distillation_token_attention": "distillation_attention",
    "class_index": "attention_by_class",
    "class_score": "attention_by_class",
}

_PALETTES = {
    "numbers": figures.NUMBERS,
    "differences": figures.DIFFERENCES,
    "types": figures.TYPES,
    "maps": Cividis256,
    "missing": figures.MISSING,
    "same": [figures.SAME_TYPE, figures.OTHER_TYPE],
}


def page(runs: Sequence[Run], pictures: Sequence[str], max_mb: float) -> tuple[str, dict[str, Any]]:
    """Make the page of one to four runs, HTML without references,
    and say what it says of finished networks, as data.

    Pictures are data URLs of the images, or none.
    """
    drawings = draw_heads(runs)
    room = max_mb * 1e6 - _OVERHEAD
    room -= sum(map(len, [*pictures, *(drawing["svg"] for drawing in drawings)]))
    axes = common_axes(runs)
    recorded = len(axes.marks)
    variables, numbers = pack_variables(axes, runs)
    # Numbers leave a third of the room to maps, of which a few marks say most.
    share = room * (2 / 3 if any(run.maps for run in runs) else 1) / _size(numbers)
    if share < 1:
        runs = thin_marks(runs, int(recorded * share))
        axes = common_axes(runs)
        variables, numbers = pack_variables(axes, runs)
    room -= _size(numbers)
    choices = [choose_maps(run, room / len(runs)) for run in runs]
    maps = [
        (number, layer_maps)
        for number, run in enumerate(runs)
        for layer_maps in pack_maps(run, choices[number])
    ]
    findings = health_panel.finding_rows(axes, runs)
    is_finished = all(run.attrs.get("finished") for run in runs)
    signs = health_panel.sign_rows(axes, runs) if is_finished else []
    networks = [describe_network(axes, run) for run in runs] if is_finished else []
    data = {
        "along": axes.along,
        "marks": axes.marks,
        "heads": axes.heads,
        "layers": [{"name": layer, "heads": count} for layer, count in axes.layers.items()],
        "runs": [
            _describe_run(run, axes, choice) for run, choice in zip(runs, choices, strict=True)
        ],
        "variables": variables,
        "types": TYPES,
        "images": axes.images,
        "image_names": image_names(axes, runs),
        "first": first_head(networks),
        "pictures": pictures,
        "tiles": [
            _describe_tile(place, number, layer_maps)
            for place, (number, layer_maps) in enumerate(maps)
        ],
        "palettes": _PALETTES,
        "border": figures.BORDER,
    }
    text = {
        "summary": notes.summary(axes, runs),
        "missing": notes.missing(axes, runs, choices, max_mb, recorded),
        "meanings": notes.definitions(axes, runs, [layer_maps.name for _, layer_maps in maps]),
        "provenance": notes.provenance(runs),
        "drawings": drawings,
        "findings": findings,
        "networks": networks,
        "signs": signs,
        "is_finished": is_finished,
        "is_snapshot": len(axes.marks) == 1,
        "type_colors": figures.TYPES,
        "health": health_panel.headline(findings, runs),
        "checks": health_panel.checks(runs),
        "runs": [run.name for run in runs],
        "colors": figures.RUNS,
        "absent": figures.ABSENT,
        "along": axes.along,
    }
    args = {
        "page": json.dumps(data),
        "numbers": numbers,
        "maps": [layer_maps.data for _, layer_maps in maps],
    }
    document = _document(axes, runs, variables, args)
    html = file_html(
        document,
        INLINE,
        title=f"Attention heads: {_join([run.name for run in runs])}",
        template=_read("page.html"),
        template_variables=text | document.template_variables,
    )
    return html, facts_of(runs, text) if is_finished else {}


def _size(numbers: bytes) -> float:
    """Return the bytes that numbers take on the page,
    where Bokeh compresses them; base64 adds a third.
    """
    return 4 / 3 * len(zlib.compress(numbers, 1))


def _join(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _describe_run(run: Run, axes: Axes, choice: Choice) -> dict[str, Any]:
    marks = set(run.marks)
    return {
        "name": run.name,
        "heads": run.heads,
        "images": run.images,
        "marked": [mark in marks for mark in axes.marks],
        "kept": [axes.marks.index(run.marks[place]) for place in choice.marks],
    }


def _describe_tile(place: int, run: int, maps: Maps) -> dict[str, Any]:
    """Describe maps, apart from their bytes."""
    *_, height, width = maps.shape
    return {
        "place": place,
        "run": run,
        "layer": maps.layer,
        "name": maps.name,
        "label": label(maps.name),
        "beside": _BESIDE.get(maps.name),
        "shape": maps.shape,
        "by": maps.by,
        "windows": maps.windows,
        "query": [height // 2, width // 2]
        if maps.name == "center_attention" and not maps.windows
        else None,
    }


def _document(
    axes: Axes,
    runs: Sequence[Run],
    variables: Sequence[dict[str, Any]],
    args: dict[str, Any],
) -> Document:
    """Make Bokeh's figures, and attach the program that fills them."""
    document = Document()
    counts = [run.heads for run in runs]
    if len(runs) == 2:
        counts.append(
            {
                layer: min(count, runs[1].heads.get(layer, 0))
                for layer, count in runs[0].heads.items()
            }
        )
    grids = [figures.grid(axes, f"grid {number}", heads) for number, heads in enumerate(counts)]
    sources = [ColumnDataSource({axes.along: []}) for _ in runs]
    # A single mark has no curves: the page draws the place of the head among all others.
    curves = [
        figures.curve(axes, variable, sources)
        for variable in variables
        if variable["curve"] and len(axes.marks) > 1
    ]
    # Unfrozen, Bokeh walks through all models again for each root.
    with document.models.freeze():
        for plot in [*(plot for plot, *_ in grids), *curves]:
            document.add_root(plot)
    frames, cells, mappers, boxes = zip(*grids, strict=True)
    args |= {
        "frames": list(frames),
        "grids": list(cells),
        "mappers": list(mappers),
        "boxes": list(boxes),
        "sources": sources,
        "plots": curves,
    }
    code = [_read(f"{part}.js") for part in _PROGRAM]
    program = CustomJS(args=args, code="\n".join(code))
    # An event of the document, which models do not receive.
    document.js_on_event("document_ready", program)
    names = [run.name for run in runs]
    captions = names if len(names) > 1 else [""]
    if len(names) == 2:
        captions = [*names, f"{names[1]} minus {names[0]}"]
    document.template_variables["grids"] = [
        {"root": plot.name, "width": figures.grid_width(axes), "caption": caption}
        for (plot, *_), caption in zip(grids, captions, strict=True)
    ]
    document.template_variables["variables"] = [
        variable for variable in variables if variable["curve"]
    ]
    return document


def _read(name: str) -> str:
    return (_BROWSER / name).read_text(encoding="utf-8")
