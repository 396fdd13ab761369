"""Maps of a page: a byte for each cell, and each map's largest value."""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.reporting.recordings import Run

__all__ = ["NO_VALUE", "Choice", "Maps", "choose_maps", "encode_maps", "pack_maps"]

NO_VALUE = 255
"""Byte of a cell that is NaN; other bytes are shares
of the map's largest value, in steps of 1 / 254.
"""


@dataclass(frozen=True)
class Maps:
    """Maps of a layer and variable, or the numbers beside them."""

    layer: str
    name: str
    # (marks, images, heads or classes, y, x); y and x are 0 for numbers beside maps.
    shape: tuple[int, ...]
    by: str  # "head" or "class"
    windows: bool  # True if a map is a sheet of windows
    # Largest value of each map (or the number itself) as float32, then the cells as bytes.
    data: bytes


@dataclass(frozen=True)
class Choice:
    """Selection of a recording's maps for a page."""

    marks: list[int]  # indices of the marks in the recording
    images: int  # number of images, from the first
    total: int  # number of images in the recording


def choose_maps(run: Run, max_bytes: float) -> Choice:
    """Thin the maps of a recording until their uncompressed base64 fits into a number of bytes.

    Images are dropped only if a single mark of all of them does not fit. Marks that stay are evenly
    spread, the last among them.
    """
    count, images = len(run.marks), len(run.images)
    size = sum(
        _bytes_per_mark(values, run.along) for ds in run.maps for values in ds.data_vars.values()
    )
    # In maps of an image at a mark; base64 adds a third.
    room = max_bytes / (4 / 3 * size / images) if size else 0.0
    if room < images:
        return Choice([count - 1], int(room), images) if room >= 1 else Choice([], 0, images)
    marks = min(count, int(room / images)) if images else 0
    return Choice(
        np.unique(np.linspace(count - 1, 0, marks).round().astype(int)).tolist(),
        images,
        images,
    )


def pack_maps(run: Run, choice: Choice) -> list[Maps]:
    """Pack the chosen maps, layer by layer."""
    packed = []
    for ds in run.maps if choice.marks else ():
        # Loaded at once: a chunk has all layers, and would be read again for each of them.
        selected = ds.isel({run.along: choice.marks, "image": slice(choice.images)}).load()
        for name, values in selected.data_vars.items():
            if "y" in values.dims and "window" in values.dims:
                values = _sheet(values)
            elif "window" in values.dims:
                continue  # numbers of single windows have no place beside a sheet
            by = "class" if "class" in values.dims else "head"
            grid = [dim for dim in ("y", "x") if dim in values.dims]
            for layer in values["layer"].values.tolist():
                array = (
                    values.sel(layer=layer)
                    .transpose(run.along, "image", by, *grid)
                    .values.astype(np.float32)
                )
                shape = array.shape if grid else (*array.shape, 0, 0)
                packed.append(Maps(layer, str(name), shape, by, "window" in ds.dims, _pack(array)))
    return packed


def _bytes_per_mark(values: xr.DataArray, along: str) -> int:
    """Count the bytes of a variable of maps at a mark:
    the cells of each map, and its largest value as float32.
    """
    maps = int(
        np.prod(
            [size for dim, size in values.sizes.items() if dim not in (along, "window", "y", "x")]
        )
    )
    height, width = (values.sizes.get(dim, 0) for dim in ("y", "x"))
    rows, columns = _sheet_shape(values.sizes.get("window", 1))
    return maps * (4 + (rows * (height + 1) - 1) * (columns * (width + 1) - 1))


def _sheet_shape(windows: int) -> tuple[int, int]:
    columns = int(np.ceil(np.sqrt(windows)))
    return -(-windows // columns), columns


def _sheet(values: xr.DataArray) -> xr.DataArray:
    """Lay windows (window, y, x) side by side,
    row by row, with a line of NaN between them: (y, x).
    """
    rows, columns = _sheet_shape(values.sizes["window"])
    extra = rows * columns - values.sizes["window"]
    padded = (
        values.astype(np.float32)
        .pad(window=(0, extra), y=(0, 1), x=(0, 1))
        .transpose(..., "window", "y", "x")
    )
    *outer, _, height, width = padded.shape
    sheets = padded.values.reshape(*outer, rows, columns, height, width).swapaxes(-3, -2)
    sheets = sheets.reshape(*outer, rows * height, columns * width)[..., :-1, :-1]
    outer_dims = padded.dims[:-3]
    return xr.DataArray(sheets, {dim: values[dim] for dim in outer_dims}, (*outer_dims, "y", "x"))


def _pack(array: NDArray[np.float32]) -> bytes:
    """Encode the largest values of all maps, then the cells; numbers beside maps as they are."""
    return array.tobytes() if array.ndim == 3 else b"".join(encode_maps(array))


def encode_maps(array: NDArray[np.float32]) -> tuple[bytes, bytes]:
    """Encode maps (..., y, x): the largest value of each, as float32, and the cells, as bytes."""
    finite = np.where(np.isfinite(array), array, 0)
    largest = finite.max((-2, -1))
    share = finite / np.maximum(largest, np.finfo(np.float32).tiny)[..., None, None]
    cells = np.where(np.isfinite(array), np.round(share * (NO_VALUE - 1)), NO_VALUE).astype(
        np.uint8
    )
    return largest.tobytes(), cells.tobytes()
