"""``explore()``: attention maps as a page, on which a click chooses the place to look from."""

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.plot.attention_over_image import check_maps, first_cell
from tcnn_probe.reporting.maps import encode_maps
from tcnn_probe.reporting.report import Report, output_file, picture_url

__all__ = ["explore"]

# The dimensions of the queries of each variable of maps.
_QUERY_DIMS: Mapping[str, tuple[str, ...]] = {
    "attention": ("query_y", "query_x"),
    "class_attention": (),
    "attention_by_query": ("query",),
    "attention_by_class": ("class",),
}
# Pixels: the widget's height in a notebook, with 12 heads beside a square image.
_HEIGHT = 700


def explore(
    maps: xr.DataTree,
    path: str | os.PathLike[str] | None = None,
    *,
    max_mb: float = 50,
) -> Report:
    """Show attention maps as a page: click a pixel,
    or choose a head, a layer, the class token or another query.

    ::

        # Without queries=, so that any pixel can be clicked.
        maps = tcnn_probe.attention_maps(vit, photograph)
        tcnn_probe.explore(maps)  # at the end of a notebook's cell
        tcnn_probe.explore(maps, "maps.html")  # for a browser

    The page holds all that it shows, and needs neither Python nor a network.

    Args:
        maps: Result of :func:`tcnn_probe.attention_maps`.
        path: Path of the HTML file, which is replaced in one step; None to write no file.
        max_mb: Largest size of the page, in 10⁶ bytes; a byte for each cell of each map, and a
            third.

    Returns:
        A :class:`Report`, which a notebook shows.

    Raises:
        TypeError: ``maps`` are no such tree.
        ValueError: The path is a folder, the page would be larger than ``max_mb``, or the maps are
            of videos.
    """
    check_maps(maps)
    if path is not None:
        output_file(path)
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    size = sum(
        values.size
        for node in maps.children.values()
        for name, values in node.data_vars.items()
        if name in _QUERY_DIMS
    )
    if size * 4 / 3 > max_mb * 1e6:
        raise ValueError(
            f"expected maps for a page of at most {max_mb:g} MB (max_mb), got {size * 4 / 3e6:.0f} "
            "MB: give attention_maps fewer layers=, heads=, images or queries=, or explore a "
            "larger max_mb="
        )
    pictures = maps.dataset["input"].values
    packer = _Packer()
    layers = [
        packer.pack(node.dataset.sel(layer=[layer]))
        for layer in json.loads(maps.attrs["layers"])
        for node in maps.children.values()
        if layer in node.layer.values
    ]
    about = {
        "layers": layers,
        "pictures": [picture_url(picture) for picture in pictures],
        "size": pictures.shape[2:],
        "palette": [to_hex(color) for color in mpl.colormaps["cividis"](range(256))],
        "missing": json.loads(maps.attrs["missing"]),
    }
    browser = Path(__file__).with_name("browser")
    template = (browser / "explorer.html").read_text(encoding="utf-8")
    # No "<" in JSON: a layer's name must not end the script that holds it.
    text = {
        "{program}": (browser / "explorer.js").read_text(encoding="utf-8"),
        "{about}": json.dumps(about).replace("<", "\\u003c"),
        "{largest}": base64.b64encode(b"".join(packer.largest)).decode(),
        "{cells}": base64.b64encode(b"".join(packer.cells)).decode(),
    }
    for place, content in text.items():
        template = template.replace(place, content, 1)
    page = Report(template, height=_HEIGHT)
    if path is not None:
        page.save(path)
    return page


class _Packer:
    """Collects the maps of layers as bytes, and describes where they are."""

    def __init__(self) -> None:
        self.largest: list[bytes] = []
        self.cells: list[bytes] = []
        self._maps = 0
        self._cells = 0

    def pack(self, ds: xr.Dataset) -> dict[str, Any]:
        """Add the maps of a single layer, and describe it."""
        maps = {}
        for name, dims in _QUERY_DIMS.items():
            if name not in ds or bool(ds[name].isnull().all()):
                continue
            values = ds[name].isel(layer=0)
            if "query" in values.dims:
                dims = ("query",)
            array = values.transpose("image", "head", *dims, "y", "x").values
            maps[name] = self._add(array.astype(np.float32))
            if "from_y" in values.coords:
                pixels = np.stack([values.from_y, values.from_x], 1)
                maps[name]["pixels"] = pixels.tolist()
        cells = [first_cell(ds, dim) for dim in "yx"]
        return {
            "name": ds.layer.item(),
            "heads": ds["head"].values.tolist(),
            "shape": [ds.sizes["y"], ds.sizes["x"]],
            "centre": [float(ds[f"pixel_{dim}"][0]) for dim in "yx"],
            "origin": [edge for edge, _ in cells],
            "spacing": [spacing for _, spacing in cells],
            "maps": maps,
        }

    def _add(self, array: NDArray[np.float32]) -> dict[str, Any]:
        """Add maps (image, head, ..., y, x), and describe where they begin."""
        largest, cells = encode_maps(array)
        entry = {
            "first": self._maps,
            "start": self._cells,
            "queries": array.shape[2:-2],
        }
        self.largest.append(largest)
        self.cells.append(cells)
        self._maps += len(largest) // 4
        self._cells += len(cells)
        return entry
