"""Writing of a mark: every array is created or extended, and the root that commits this prepared.

A chunk holds as many marks as fit into 256 kB, up to 64; the last one is rewritten with each mark.
Maps, which are larger, have a chunk for each mark, with all layers and heads, so that both one
epoch and one head over all epochs are read in few pieces. Every chunk ends with its crc32c; maps
are compressed. Labels, such as names of layers, are text of fixed width, which xarray returns as
NumPy's text. (zarr's text of variable width is returned as a type that matplotlib refuses.)
"""

import asyncio
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from tcnn_probe.schema import COORDINATES, Group, Variable, missing_value
from tcnn_probe.storage.checked import CheckedStore
from tcnn_probe.storage.place import run
from tcnn_probe.storage.root import GIVEN, Root, is_left_over, is_recorded, join, tables

__all__ = ["Mark", "chunk_shape", "write_mark"]

Mark = int | float

# A chunk of numbers is rewritten with each mark, so it stays small; one of maps is read whole.
REWRITTEN_BYTES = 256 * 2**10
MOST_MARKS = 64
LARGEST_CHUNK = 16 * 2**20
# Letters by which the name of a layer that joins may be longer than those of the first mark.
NAME_MARGIN = 64

_CHECKED = (Crc32cCodec(),)
_COMPRESSED = (ZstdCodec(level=1), Crc32cCodec())


def write_mark(
    store: CheckedStore,
    root: Root,
    along: str,
    marks: Sequence[Mark],
    groups: Mapping[str, Group],
    rows: Mapping[str, Any],
    attrs: Mapping[str, Any],
) -> None:
    """Write all arrays of a mark, and prepare the root, which is still to be committed.

    Args:
        store: Store to write to.
        root: Committed root.
        along: Name of the marks' coordinate.
        marks: All marks, with the new one.
        groups: Groups of the recording; those that are new, or have new layers, are created or
            extended.
        rows: Values of the mark by path; scalars of earlier marks that have none get NaN.
        attrs: Attributes of the root to replace.
    """
    *earlier, mark = marks
    dtype = "float64" if isinstance(mark, float) else "int64"
    about: dict[str, Any] = {"long_name": along, "description": GIVEN, **COORDINATES.get(along, {})}
    coordinate = Variable((), "", **about, dtype=dtype)
    # Chunks of fill values are written too, because a missing chunk is an error. zarr warns of text
    # of fixed width and of consolidated metadata, which its specification does not include yet, and
    # of the lock. Documents without indentation are encoded in C. The user may have asked for
    # zarr's earlier format, which has neither checksums nor names of dimensions.
    settings = {"array.write_empty_chunks": True, "json_indent": None, "default_zarr_format": 3}
    with zarr.config.set(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top = zarr.open_group(store, mode="a", use_consolidated=False)
        arrays = _undo_remains(top, root)
        top.update_attributes({**attrs})
        extended: list[tuple[zarr.Array[Any], Any]] = []

        def extend(
            path: str, variable: Variable, row: Any, sizes: Sequence[int] = (), before: Any = None
        ) -> None:
            array = arrays.get(path)
            if array is None:
                array = _create(top, path, variable, (len(marks), *sizes), along, before)
            extended.append((array, row))

        for path, group in groups.items():
            node = top
            # One by one, because a kill could leave a group without the one around it, which hides
            # it from the next recorder.
            for part in path.split("/") if path else ():
                node = node.require_group(part)
            if not (facts := tables(group)).items() <= dict(node.attrs).items():
                node.update_attributes({**facts})
            extend(join(path, along), coordinate, mark, before=earlier)
            for name, variable in group.variables.items():
                full = join(path, name)
                extend(full, variable, rows[full], group.shape(name))
            if root.groups.get(path) != group:
                layers = {"layer": [*group.layers]} if group.layers else {}
                ranges = {name: range(size) for name, size in group.sizes.items()}
                for name, labels in {**layers, **ranges, **group.coords}.items():
                    _write_labels(node, name, labels, arrays.get(join(path, name)))
        scalars = {name for name in rows if "/" not in name} - groups[""].variables.keys()
        for name in scalars | root.scalars:
            extend(name, Variable((), "", name, GIVEN), rows.get(name))
        _write_rows(extended, len(marks))
        zarr.consolidate_metadata(store)


def _undo_remains(top: zarr.Group, root: Root) -> dict[str, zarr.Array[Any]]:
    """Bring the arrays of a recording into the state of the committed root; return them by path.

    A killed mark may have extended some, and created others.
    """
    arrays: dict[str, zarr.Array[Any]] = {}
    for path, node in [*top.members(max_depth=None)]:
        document = node.metadata.to_dict()
        if path not in root.documents:
            if is_left_over(document):
                del top[path]
        elif isinstance(node, zarr.Array) and is_recorded(document):
            arrays[path] = node
            if [*node.shape] != root.documents[path]["shape"]:
                node.resize(root.documents[path]["shape"])
    return arrays


def chunk_shape(row: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the chunks (marks, *row) for rows of a shape, or less of a large row."""
    # A chunk has at least the size 1, even along a dimension of size 0.
    sizes = [max(size, 1) for size in row]
    for axis, size in enumerate(sizes):
        too_large = prod(sizes) * itemsize / LARGEST_CHUNK
        if too_large > 1:
            sizes[axis] = max(1, int(size / too_large))
    marks = REWRITTEN_BYTES // (prod(sizes) * itemsize)
    return (min(max(marks, 1), MOST_MARKS), *sizes)


def _create(
    top: zarr.Group,
    path: str,
    variable: Variable,
    shape: tuple[int, ...],
    along: str,
    before: Any = None,
) -> zarr.Array[Any]:
    """Create an array over the marks, with values for those before the last; None stands for fill
    values.
    """
    dtype = np.dtype(variable.dtype)
    fill_value: Any = missing_value(dtype)
    array = top.create_array(
        path,
        shape=shape,
        chunks=chunk_shape(shape[1:], dtype.itemsize),
        dtype=dtype,
        fill_value=fill_value,
        dimension_names=(along, *variable.dims),
        attributes={key: value for key, value in variable.attrs.items() if value},
        compressors=_COMPRESSED if "image" in variable.dims else _CHECKED,
    )
    if shape[0] > 1:
        array[:-1] = fill_value if before is None else before
    return array


def _write_labels(group: zarr.Group, name: str, labels: Sequence[Any], stored: Any) -> None:
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


def _write_rows(rows: Sequence[tuple[zarr.Array[Any], Any]], length: int) -> None:
    """Extend arrays to a number of marks, and write the last row; None stands for fill values.

    Several are written at the same time, as each waits for the disk, but all by one call into
    zarr's thread: a call takes as long as writing a row. After an error or Ctrl-C all have ended,
    so that none is written later.
    """
    turn = asyncio.Semaphore(8)

    async def write(array: zarr.AsyncArray[Any], row: Any) -> None:
        async with turn:
            if array.shape[0] < length:
                await array.resize((length, *array.shape[1:]))
            value: Any = array.metadata.fill_value if row is None else row
            await array.setitem(length - 1, value)

    async def write_all() -> list[BaseException | None]:
        work = [write(array.async_array, row) for array, row in rows]
        return await asyncio.gather(*work, return_exceptions=True)

    for array, row in rows:
        if row is not None and np.shape(row) != array.shape[1:]:
            _widen(array, np.shape(row))
    for error in run(write_all()):
        if error is not None:
            raise error


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
        before, after = map(slice, row[:axis]), map(slice, sizes[axis + 1 :])
        if size < row[axis] and marks:
            array[(slice(None), *before, slice(size, None), *after)] = fill
