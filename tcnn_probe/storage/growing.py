"""The arrays over the marks, each of which grows by one row with a mark."""

from dataclasses import dataclass

import numpy as np
from zarr.abc.store import Store

from tcnn_probe.storage.chunks import Document, as_chunk, is_map, open_array, with_length
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.place import put

__all__ = ["GrowingArrays"]


@dataclass
class _Chunk:
    """The last chunk of an array of numbers, kept so that it is not read back."""

    first: int  # its first row in the array
    rows: np.ndarray
    stored: bool = False

    def set(self, place: int, row: np.ndarray) -> bool:
        """Set a row, and the rows after it to what is likely to come; False if it is stored already."""
        if self.stored and self.rows[place].tobytes() == row.tobytes():
            return False
        self.rows[place:] = row
        if place and self.rows.ndim == 1 and row.dtype.kind == "i":
            self.rows[place:] += (row - self.rows[place - 1]) * np.arange(len(self.rows) - place)
        self.stored = True
        return True


class GrowingArrays:
    """Adds rows to arrays: the last chunk of each is written anew, whole, unless it holds the row already.

    The rows of a chunk that are not committed yet are seen by nobody. They are filled with what is likely to come: the
    same numbers again, and for the marks the same step. Then what does not change from mark to mark is not written.

    Args:
        store: of the recording.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._chunks: dict[str, _Chunk] = {}

    async def append(self, path: str, document: Document, row: np.ndarray | None, *, new: bool) -> None:
        """Add a row to an array, which is not committed by this.

        Args:
            path: of the array.
            document: of the array as it is to be; its last row is the one to be written.
            row: None for the fill value; of a new array also all of its rows.
            new: whether none of the array is committed: then all rows before this one get the fill value, over
                whatever a killed run has left.

        Raises:
            StoreError: the chunk is damaged, so that its other rows cannot be written again.
        """
        length, size = document["shape"][0], document["chunk_grid"]["configuration"]["chunk_shape"][0]
        if row is not None and row.ndim == len(document["shape"]):
            await open_array(self.store, path, document).setitem(..., row)
            return
        first, fill = (length - 1) // size * size, float(document["fill_value"])
        if new and first:
            await open_array(self.store, path, document).setitem((slice(0, first), ...), fill)
        if is_map(document):
            shard = fill if row is None else row[None]
            await open_array(self.store, path, document).setitem((slice(first, length), ...), shard)
            return
        if path not in self._chunks or self._chunks[path].first != first:
            self._chunks[path] = await self._opened(path, document, first, new=new)
        chunk, place = self._chunks[path], length - 1 - first
        if chunk.set(place, np.asarray(fill if row is None else row, chunk.rows.dtype)):
            key = "/".join([path, "c", str(first // size), *["0"] * (chunk.rows.ndim - 1)])
            await put(self.store, key, as_chunk(chunk.rows))

    def forget(self) -> None:
        """Read chunks again before rows are added: those that were added last were not committed."""
        self._chunks.clear()

    async def _opened(self, path: str, document: Document, first: int, *, new: bool) -> _Chunk:
        """The chunk with the rows that are committed."""
        rows = np.empty(document["chunk_grid"]["configuration"]["chunk_shape"], document["data_type"])
        there = document["shape"][0] - 1
        if there > first and new:
            rows[: there - first] = float(document["fill_value"])
        elif there > first:
            array = open_array(self.store, path, with_length(document, there))
            try:
                rows[: there - first] = await array.getitem((slice(first, there), ...))
            except ValueError as error:
                raise StoreError(f"the last chunk of {path!r} in {self.store} is damaged: {error}") from error
        return _Chunk(first, rows)
