"""The arrays over the marks, each of which grows by one row with a mark."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store

from tcnn_probe.storage.chunks import Document, open_array, with_length
from tcnn_probe.storage.errors import StoreError

__all__ = ["GrowingArrays"]


@dataclass
class _Chunk:
    """A chunk to which rows are added. Opened once for all of them, and kept so that it is not read back."""

    number: int
    array: "zarr.AsyncArray[Any]"
    rows: np.ndarray


class GrowingArrays:
    """Adds rows to arrays: the last chunk of each is written anew, whole, with each row.

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
        if row is not None and row.ndim == len(document["shape"]):
            await open_array(self.store, path, document).setitem(..., row)
            return
        rows = document["chunk_grid"]["configuration"]["chunk_shape"][0]
        number, place = divmod(document["shape"][0] - 1, rows)
        if path not in self._chunks or self._chunks[path].number != number:
            self._chunks[path] = await self._opened(path, document, number, place, new=new)
        chunk = self._chunks[path]
        chunk.rows[place] = float(document["fill_value"]) if row is None else row
        await chunk.array.setitem((slice(number * rows, (number + 1) * rows), ...), chunk.rows)
        if place == rows - 1:
            del self._chunks[path]

    def forget(self) -> None:
        """Read chunks again before rows are added: those that were added last were not committed."""
        self._chunks.clear()

    async def _opened(self, path: str, document: Document, number: int, place: int, *, new: bool) -> _Chunk:
        rows = document["chunk_grid"]["configuration"]["chunk_shape"][0]
        first, shape = number * rows, (rows, *document["shape"][1:])
        array = open_array(self.store, path, with_length(document, first + rows))
        filled = np.full(shape, float(document["fill_value"]), document["data_type"])
        try:
            if new and first:
                await array.setitem((slice(0, first), ...), np.broadcast_to(filled[:1], (first, *shape[1:])))
            elif place and not new:
                filled[:place] = await array.getitem((slice(first, first + place), ...))
        except ValueError as error:
            raise StoreError(f"the last chunk of {path!r} in {self.store} is damaged: {error}") from error
        return _Chunk(number, array, filled)
