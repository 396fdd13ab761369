"""Arrays of a recording: how they are cut into chunks, created, and extended by a mark.

A chunk holds as many marks as fit into 256 kB, up to 64; the last one is rewritten with each mark.
Maps, which are larger, have a chunk for each mark, with all layers and heads, so that both one
epoch and one head over all epochs are read in few pieces. Every chunk ends with its crc32c; maps
are compressed. Labels, such as names of layers, are text of fixed width, which xarray returns as
NumPy's text. (zarr's text of variable width is returned as a type that matplotlib refuses.)
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from tcnn_probe.schema import COORDINATES, Variable

__all__ = ["chunk_shape", "create_variable", "write_labels", "write_rows"]

# A chunk of numbers is rewritten with each mark, so it stays small; one of maps is read whole.
REWRITTEN_BYTES = 256 * 2**10
MOST_MARKS = 64
# Letters by which the name of a layer that joins may be longer than those of the first mark.
NAME_MARGIN = 64
LARGEST_CHUNK = 16 * 2**20

_CHECKED = (Crc32cCodec(),)
_COMPRESSED = (ZstdCodec(level=1), Crc32cCodec())


def chunk_shape(row: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the chunks of an array whose marks have rows of this shape:
    (marks, *row), or less of a large row.
    """
    # A chunk has at least the size 1, even along a dimension of size 0.
    sizes = [max(size, 1) for size in row]
    for axis, size in enumerate(sizes):
        too_large = prod(sizes) * itemsize / LARGEST_CHUNK
        if too_large > 1:
            sizes[axis] = max(1, int(size / too_large))
    marks = REWRITTEN_BYTES // (prod(sizes) * itemsize)
    return (min(max(marks, 1), MOST_MARKS), *sizes)


def create_variable(
    top: zarr.Group,
    path: str,
    variable: Variable,
    shape: tuple[int, ...],
    along: str,
    before: Any = None,
) -> zarr.Array[Any]:
    """Create an array over the marks, with values for those before; None stands for fill values."""
    dtype, is_map = np.dtype(variable.dtype), "image" in variable.dims
    fill_value: Any = np.nan if dtype.kind == "f" else -1
    array = top.create_array(
        path,
        shape=shape,
        chunks=chunk_shape(shape[1:], dtype.itemsize),
        dtype=dtype,
        fill_value=fill_value,
        dimension_names=(along, *variable.dims),
        attributes={key: value for key, value in variable.attrs.items() if value},
        compressors=_COMPRESSED if is_map else _CHECKED,
    )
    if shape[0]:
        array[:] = fill_value if before is None else before
    return array


def write_labels(group: zarr.Group, name: str, labels: Sequence[Any], stored: Any) -> None:
    """Write the labels along a dimension, which are created if None are stored."""
    numbers = all(isinstance(label, int) for label in labels)
    values = np.array(labels, dtype=np.int64 if numbers else np.str_)
    if stored is None:
        if name == "layer":
            # Layers that join later may have longer names, such as blocks.10 after blocks.9.
            values = values.astype(f"U{values.itemsize // 4 + NAME_MARGIN}")
        group.create_array(
            name,
            data=values,
            chunks=(max(len(values), 1),),
            fill_value=-1 if numbers else "",
            dimension_names=(name,),
            attributes={"long_name": name, **COORDINATES.get(name, {})},
            compressors=_CHECKED,
        )
    elif values.dtype.itemsize > np.dtype(stored.dtype).itemsize:
        raise ValueError(f"expected shorter names than {max(labels, key=len)!r}")
    else:
        stored.resize(values.shape)
        stored[:] = values.astype(stored.dtype)


def write_rows(rows: Iterable[tuple[zarr.Array[Any], Any]], length: int) -> None:
    """Extend arrays to this number of marks,
    and write the last row of each; None stands for fill values.

    They are written at the same time, as each waits for the disk. After an error or Ctrl-C all have
    ended, so that none is written later.
    """

    def write(array: zarr.Array[Any], row: Any) -> None:
        shape = array.shape[1:] if row is None else np.shape(row)
        if shape != array.shape[1:]:
            _widen(array, shape)
        array.resize((length, *shape))
        value: Any = array.metadata.fill_value if row is None else row
        array[length - 1] = value

    with ThreadPoolExecutor(8) as pool:
        for written in [pool.submit(write, array, row) for array, row in rows]:
            written.result()


def _widen(array: zarr.Array[Any], row: Sequence[int]) -> None:
    """Give an array larger rows, with fill values for the marks that are there already.

    Chunks keep their size, so that what is stored does not change before the root is replaced:
    layers and heads that are added lie in further chunks, or outside of the array in those at its
    edge.
    """
    marks, *sizes = array.shape
    fill: Any = array.metadata.fill_value
    array.resize((marks, *row))
    for axis, size in enumerate(sizes):
        # Each block covers whole axes before this one, and the former length of those after it.
        block = [slice(None), *map(slice, row[:axis]), slice(size, None)]
        block += map(slice, sizes[axis + 1 :])
        if size < row[axis] and marks:
            array[tuple(block)] = fill
