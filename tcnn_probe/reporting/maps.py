"""Maps as a page holds them: a byte a cell, and each map's largest value."""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.reporting.recordings import Run

__all__ = ["NO_VALUE", "Choice", "Maps", "choose", "packed"]

NO_VALUE = 255
"""The byte of a cell that is NaN; others are shares of the map's largest value, in steps of 1 / 254."""


@dataclass(frozen=True)
class Maps:
    """A variable of a layer's maps, or of the numbers beside them."""

    layer: str
    name: str
    shape: tuple[int, ...]  # (marks, images, heads or classes, y, x); y and x are 0 for numbers beside maps
    by: str  # "head" or "class"
    windows: bool  # whether a map is a sheet of windows
    data: bytes  # the largest value of each map (or the number itself) as float32, then the cells as bytes


@dataclass(frozen=True)
class Choice:
    """The maps of a recording that a page has."""

    marks: list[int]  # places of their marks in the recording
    images: int  # how many images, the first ones
    total: int  # how many images the recording has


def choose(run: Run, most: float) -> Choice:
    """Thin the maps of a recording until they take at most so many bytes in base64, not compressed.

    Images stay as long as there is room for one mark of them. The marks that stay are evenly spread, the last among
    them.
    """
    count, images = len(run.marks), len(run.images)
    cells = sum(_cells(values, run.along) for ds in run.maps for values in ds.data_vars.values())
    room = most / (4 / 3 * cells / images) if cells else 0.0  # in maps of one image at one mark
    if room < images:
        return Choice([count - 1], int(room), images) if room >= 1 else Choice([], 0, images)
    kept = min(count, int(room / images)) if images else 0
    return Choice(np.unique(np.linspace(count - 1, 0, kept).round().astype(int)).tolist(), images, images)


def packed(run: Run, choice: Choice) -> list[Maps]:
    """The chosen maps, layer by layer."""
    found = []
    for ds in run.maps if choice.marks else ():
        some = ds.isel({run.along: choice.marks, "image": slice(choice.images)}).load()  # or each layer would read all
        for name, values in some.data_vars.items():
            if "y" in values.dims and "window" in values.dims:
                values = _sheet(values)
            elif "window" in values.dims:
                continue  # numbers of windows have no place beside a sheet
            by = "class" if "class" in values.dims else "head"
            grid = [dim for dim in ("y", "x") if dim in values.dims]
            for layer in values["layer"].values.tolist():
                array = values.sel(layer=layer).transpose(run.along, "image", by, *grid).values.astype(np.float32)
                shape = array.shape if grid else (*array.shape, 0, 0)
                found.append(Maps(layer, str(name), shape, by, "window" in ds.dims, _bytes(array)))
    return found


def _cells(values: xr.DataArray, along: str) -> int:
    """Bytes that a variable of maps takes at one mark: of each map its cells, and its largest value as float32."""
    maps = int(np.prod([size for dim, size in values.sizes.items() if dim not in (along, "window", "y", "x")]))
    height, width = (values.sizes.get(dim, 0) for dim in ("y", "x"))
    rows, columns = _sheet_shape(values.sizes.get("window", 1))
    return maps * (4 + (rows * (height + 1) - 1) * (columns * (width + 1) - 1))


def _sheet_shape(windows: int) -> tuple[int, int]:
    columns = int(np.ceil(np.sqrt(windows)))
    return -(-windows // columns), columns


def _sheet(values: xr.DataArray) -> xr.DataArray:
    """Windows (window, y, x) side by side, row by row, with a line of NaN between them: (y, x)."""
    rows, columns = _sheet_shape(values.sizes["window"])
    extra = rows * columns - values.sizes["window"]
    padded = values.astype(np.float32).pad(window=(0, extra), y=(0, 1), x=(0, 1)).transpose(..., "window", "y", "x")
    *outer, _, height, width = padded.shape
    sheets = padded.values.reshape(*outer, rows, columns, height, width).swapaxes(-3, -2)
    sheets = sheets.reshape(*outer, rows * height, columns * width)[..., :-1, :-1]
    others = [dim for dim in padded.dims if dim not in ("window", "y", "x")]
    return xr.DataArray(sheets, {dim: values[dim] for dim in others}, (*others, "y", "x"))


def _bytes(array: NDArray[np.float32]) -> bytes:
    """Each map's largest value, then its cells."""
    if array.ndim == 3:
        return array.tobytes()
    finite = np.where(np.isfinite(array), array, 0)
    largest = finite.max((-2, -1))
    share = finite / np.maximum(largest, np.finfo(np.float32).tiny)[..., None, None]
    cells = np.where(np.isfinite(array), np.round(share * (NO_VALUE - 1)), NO_VALUE).astype(np.uint8)
    return largest.tobytes() + cells.tobytes()
