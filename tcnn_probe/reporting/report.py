"""``report()``: a recording as a page."""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path, PurePath
from typing import Any

from tcnn_probe.plot.style import image_array
from tcnn_probe.reporting.recordings import Run, read_run

__all__ = ["Report", "report"]


def report(
    recordings: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    images: Any = None,
    max_mb: float = 100,
) -> "Report":
    """Make a page of a recording, which a browser shows without a server or a network.

    ::

        tcnn_probe.report("run.zarr", "report.html")
        tcnn_probe.report(["a.zarr", "b.zarr"])  # two runs side by side; live, if it ends a cell of a notebook

    The page has a grid of layers x heads at each mark, coloured by type or by any variable; curves and maps of the head
    that is clicked; scalars; a table of all heads; missing variables, and the definition of each variable. Its numbers
    are those of the recording, in float64. Maps have 255 steps from 0 to the largest value of each.

    Args:
        recordings: A path, URL, dataset or tree of a recording; two of these; or a mapping that gives them names.
        path: Path of the HTML file, which is replaced in one step; None to write no file.
        images: Images to draw the maps over, (B, C, H, W) with 1 or 3 channels of any range: one for each image whose
            maps were recorded, in the order of the coordinate "image". Recordings hold no images.
        max_mb: Largest size of the page, in 10⁶ bytes. Maps of marks between others, and then of images, are left out
            until it fits; the page says which. Numbers and Bokeh, which takes 1.4 MB, are never left out.

    Returns:
        A :class:`Report`, which a notebook shows.

    Raises:
        ModuleNotFoundError: Bokeh is not installed; ``pip install "tcnn-probe[report]"``.
        TypeError: This is no recording.
        ValueError: A recording has no marks or layers, there are more than two, runs were marked along different
            dimensions, or the number of images is not that of the maps.
        StoreError: There is no recording at the path.
    """
    try:
        from tcnn_probe.reporting.page import page
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "bokeh":
            raise
        raise ModuleNotFoundError(
            'a report needs Bokeh: pip install "tcnn-probe[report]"', name="bokeh"
        ) from None
    names: list[Any] = []
    if isinstance(recordings, dict) and recordings:
        names, recordings = list(recordings), list(recordings.values())
    sources = list(recordings) if isinstance(recordings, list | tuple) else [recordings]
    if not 1 <= len(sources) <= 2:
        raise ValueError(f"expected one recording or two, got {len(sources)}")
    runs = [read_run(source) for source in sources]
    if not names:
        names = [run.name for run in runs]
        if len(set(names)) < len(runs):
            names = _distinct_names(sources, names[0])
    runs = [replace(run, name=str(name)) for run, name in zip(runs, names, strict=True)]
    result = Report(
        page(runs, [] if images is None else _pictures(images, runs), max_mb)
    )
    if path is not None:
        result.save(path)
    return result


def _distinct_names(sources: Sequence[Any], name: str) -> list[str]:
    """Rename two recordings of the same name: by their folders, if these differ."""
    paths = [
        PurePath(source) if isinstance(source, str | os.PathLike) else PurePath(name)
        for source in sources
    ]
    names = ["/".join(path.parts[-2:]) for path in paths]
    return names if names[0] != names[1] else [f"{name} (A)", f"{name} (B)"]


class Report:
    """Page that :func:`tcnn_probe.report` makes. A notebook shows it; ``html`` is the text of the file."""

    def __init__(self, html: str):
        self.html = html

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, in one step: no reader sees half of it."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(self.html, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    def __repr__(self) -> str:
        return f"<report, {len(self.html) / 1e6:.1f} MB; .save(path) writes it>"

    def _repr_html_(self) -> str:
        """Return the page in a frame, so that its styles and the notebook's do not mix."""
        style = "width: 100%; height: 900px; border: 1px solid #ccc"
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}"></iframe>'


def _pictures(images: Any, runs: Sequence[Run]) -> list[str]:
    """Encode images as data URLs, each from its smallest value (black) to its largest."""
    from PIL import Image

    arrays = image_array(images)
    recorded = sorted({image for run in runs for image in run.images})
    if len(arrays) != len(recorded):
        raise ValueError(
            f"expected the images {recorded}, whose maps were recorded; got {len(arrays)}"
        )
    urls = []
    for image in arrays:
        pixels = (image - image.min()) / max(float(image.max() - image.min()), 1e-12)
        picture = Image.fromarray(
            (255 * pixels).round().astype("uint8").transpose(1, 2, 0).squeeze()
        )
        picture.thumbnail(
            (384, 384)
        )  # tiles are 210 pixels wide; screens of high resolution show two in each
        file = io.BytesIO()
        picture.save(file, "PNG")
        urls.append(
            "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        )
    return urls
