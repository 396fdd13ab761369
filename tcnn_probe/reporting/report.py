"""``report()``: a recording as a page."""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path, PurePath
from typing import Any

from numpy.typing import NDArray

from tcnn_probe.extras import needed_for
from tcnn_probe.plot.style import image_array
from tcnn_probe.reporting.recordings import Run, read_run

__all__ = ["Report", "output_file", "picture_url", "report"]

# Colours that can be told apart, as thin lines on white and on black; grids side by side get too
# narrow for more.
MOST_RUNS = 4


def report(
    recordings: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    images: Any = None,
    max_mb: float = 3,
) -> "Report":
    """Make a page of a recording, which a browser shows without a server or a network.

    ::

        tcnn_probe.report("run.zarr", "report.html")
        # Two runs side by side; live, if it ends a cell of a notebook.
        tcnn_probe.report({"long": "a.zarr", "short": "b.zarr"})

    The page has a grid of layers x heads at each mark, coloured by type or by any variable; curves
    and maps of the head that is chosen; scalars; the findings of :func:`tcnn_probe.health`; a table
    of all heads; missing variables, and the definition of each variable. Its numbers are those of
    the recording, rounded to float32. Maps have 255 steps from 0 to the largest value of each.

    Args:
        recordings: A path, URL, dataset or tree of a recording; a list of up to four of these,
            which stand side by side; or a mapping that gives them names.
        path: Path of the HTML file, which is replaced in one step; None to write no file.
        images: Images to draw the maps over, (B, C, H, W) with 1 or 3 channels of any range: one
            for each image whose maps were recorded, in the order of the coordinate "image".
            Recordings hold no images.
        max_mb: Largest size of the page, in 10⁶ bytes. Maps of marks between others, then of
            images, and numbers of marks between others are left out until it fits; the page says
            which. Bokeh takes 1.4 MB of it.

    Returns:
        A :class:`Report`, which a notebook shows.

    Raises:
        ModuleNotFoundError: Bokeh is not installed.
        TypeError: This is no recording.
        ValueError: The path is a folder, a recording has no marks or layers, there are more than
            four beside each other, runs were marked along different dimensions, or the number of
            images is not that of the maps.
        StoreError: There is no recording at the path.
    """
    if path is not None:
        output_file(path)
    with needed_for("a report"):
        from tcnn_probe.reporting.page import page
    names: list[Any] = []
    if isinstance(recordings, dict) and recordings:
        names, recordings = list(recordings), list(recordings.values())
    sources = list(recordings) if isinstance(recordings, list | tuple) else [recordings]
    if not 1 <= len(sources) <= MOST_RUNS:
        raise ValueError(
            f"expected 1 to {MOST_RUNS} recordings beside each other, got {len(sources)}; "
            "plot.evolution draws bands over any number of runs"
        )
    runs = [read_run(source) for source in sources]
    names = names or _distinct_names(sources, runs)
    runs = [replace(run, name=str(name)) for run, name in zip(runs, names, strict=True)]
    html, facts = page(runs, [] if images is None else _pictures(images, runs), max_mb)
    result = Report(html, facts=facts)
    if path is not None:
        result.save(path)
    return result


def output_file(path: str | os.PathLike[str], expected: str = "a page, such as page.html") -> Path:
    """Return the path of a file to write, before what it will hold is computed.

    Raises:
        ValueError: The path is a folder.
        FileNotFoundError: The folder of the file does not exist.
    """
    file = Path(path)
    if not file.name or file.is_dir():
        raise ValueError(f"expected the file of {expected}, got the folder {path}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} in which to write {file.name}")
    return file


def _distinct_names(sources: Sequence[Any], runs: Sequence[Run]) -> list[str]:
    """Return the names of recordings; where they are not distinct,
    with their folders, or with letters.
    """
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [
        PurePath(source) if isinstance(source, str | os.PathLike) else PurePath(name)
        for source, name in zip(sources, names, strict=True)
    ]
    folders = ["/".join(path.parts[-2:]) for path in paths]
    if len(set(folders)) == len(folders):
        return folders
    return [f"{name} ({chr(ord('A') + number)})" for number, name in enumerate(names)]


class Report:
    """Page that :func:`tcnn_probe.report` or :func:`tcnn_probe.explore` makes. A notebook shows it.

    Args:
        html: Text of the file.
        height: Height in a notebook, in pixels.
        facts: What the page of finished networks says, as plain data for JSON; empty for other
            pages.
    """

    def __init__(self, html: str, height: int = 900, facts: Mapping[str, Any] | None = None):
        self.html = html
        self.height = height
        self.facts = facts or {}

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
        style = (
            f"width: 100%; height: {self.height}px; border: 1px solid #ccc; box-sizing: border-box"
        )
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}"></iframe>'


def _pictures(images: Any, runs: Sequence[Run]) -> list[str]:
    """Encode the images whose maps were recorded as data URLs."""
    arrays = image_array(images)
    recorded = sorted({image for run in runs for image in run.images})
    if len(arrays) != len(recorded):
        raise ValueError(
            f"expected the images {recorded}, whose maps were recorded; got {len(arrays)}"
        )
    return [picture_url(image) for image in arrays]


def picture_url(image: NDArray[Any]) -> str:
    """Encode an image (C, H, W) as a data URL, from its smallest value (black) to its largest."""
    from PIL import Image

    pixels = (image - image.min()) / max(float(image.max() - image.min()), 1e-12)
    picture = Image.fromarray((255 * pixels).round().astype("uint8").transpose(1, 2, 0).squeeze())
    # Screens of high resolution show two pixels in each of the tile's 210, as wide as maps are in a
    # report.
    picture.thumbnail((384, 384))
    file = io.BytesIO()
    # A photograph takes a tenth of the bytes that it takes as PNG.
    picture.save(file, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
