"""``report()``: a recording as one page."""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path, PurePath
from typing import Any

from tcnn_probe.plot.style import image_array
from tcnn_probe.reporting.recordings import Run, read

__all__ = ["Report", "report"]


def report(
    recordings: Any, path: str | os.PathLike[str] | None = None, *, images: Any = None, max_mb: float = 100
) -> "Report":
    """Make one page of a recording, which a browser shows without a server or a network.

    ::

        tcnn_probe.report("run.zarr", "report.html")
        tcnn_probe.report(["a.zarr", "b.zarr"])  # two runs side by side; live, if it ends a cell of a notebook

    The page has a grid of layers x heads at each mark, coloured by type or by any variable; the curves and maps of the
    head that is clicked; scalars; a table of all heads; what is missing, and what each variable means. Its numbers are
    those of the recording, in float64. Maps have 255 steps from 0 to the largest value of each.

    Args:
        recordings: a path, URL, dataset or tree of a recording; two of these; or a mapping that gives them names.
        path: of the HTML file, which is replaced in one step; None to write none.
        images: pictures to draw the maps over, (B, C, H, W) with 1 or 3 channels of any range: one for each image whose
            maps were recorded, in the order of the coordinate "image". Recordings hold no images.
        max_mb: size of the page, 10⁶ bytes. Maps of marks between others, and then of images, are left out until it
            fits; the page says which. Numbers and Bokeh, which takes 1.4 MB, are never left out.

    Returns:
        :class:`Report`, which a notebook shows.

    Raises:
        ModuleNotFoundError: no Bokeh; ``pip install "tcnn-probe[report]"``.
        TypeError: no recording.
        ValueError: a recording without marks or layers; more than two; runs that were marked by different things;
            another number of images than have maps.
        StoreError: nothing at a path, or something else.
    """
    try:
        from tcnn_probe.reporting.page import page
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "bokeh":
            raise
        raise ModuleNotFoundError('a report needs Bokeh: pip install "tcnn-probe[report]"', name="bokeh") from None
    names = list(recordings) if isinstance(recordings, dict) else []
    given = list(recordings.values()) if names else recordings
    given = list(given) if isinstance(given, list | tuple) else [given]
    if not 1 <= len(given) <= 2:
        raise ValueError(f"expected one recording or two, got {len(given)}")
    runs = [read(one) for one in given]
    if not names and len(runs) == 2 and runs[0].name == runs[1].name:
        names = _told_apart(given, runs[0].name)
    runs = [replace(run, name=str(name)) for run, name in zip(runs, names or [run.name for run in runs], strict=True)]
    made = Report(page(runs, [] if images is None else _pictures(images, runs), max_mb))
    if path is not None:
        made.save(path)
    return made


def _told_apart(given: Sequence[Any], name: str) -> list[str]:
    """Other names for two recordings of one name: with the folders they are in, if these have other names."""
    found = ["/".join(PurePath(one).parts[-2:]) if isinstance(one, str | os.PathLike) else name for one in given]
    return found if found[0] != found[1] else [f"{name} (A)", f"{name} (B)"]


class Report:
    """The page that :func:`tcnn_probe.report` makes. A notebook shows it; ``html`` is the text of the file."""

    def __init__(self, html: str):
        self.html = html

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, in one step: no reader sees half of it."""
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            beside.write_text(self.html, encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
        return target

    def __repr__(self) -> str:
        return f"<report, {len(self.html) / 1e6:.1f} MB; .save(path) writes it>"

    def _repr_html_(self) -> str:
        """A frame, so that the page and the notebook do not disturb each other."""
        style = "width: 100%; height: 900px; border: 1px solid #ccc"
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}"></iframe>'


def _pictures(images: Any, runs: Sequence[Run]) -> list[str]:
    """Data URLs, of each image from its least value (black) to its largest."""
    from PIL import Image

    found = image_array(images)
    recorded = sorted({image for run in runs for image in run.images})
    if len(found) != len(recorded):
        raise ValueError(f"expected the images {recorded}, whose maps were recorded; got {len(found)}")
    urls = []
    for image in found:
        pixels = (image - image.min()) / max(float(image.max() - image.min()), 1e-12)
        picture = Image.fromarray((255 * pixels).round().astype("uint8").transpose(1, 2, 0).squeeze())
        picture.thumbnail((384, 384))
        picture.save(file := io.BytesIO(), "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    return urls
