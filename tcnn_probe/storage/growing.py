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

    async def append(self, path: str, document: Document, rows: np.ndarray | None, *, committed: int) -> None:
        """Write the last rows of an array, which are not committed by this.

        Args:
            path: of the array.
            document: of the array as it is to be.
            rows: its last row, or all of them; None for the fill value.
            committed: how many rows are there: all but the last, or of a new array none. Then all of it is written,
                over what a killed run has left; rows that are not given get the fill value.

        Raises:
            StoreError: the chunk is damaged, so that its other rows cannot be written again.
        """
        length, size = document["shape"][0], document["chunk_grid"]["configuration"]["chunk_shape"][0]
        fill = np.array(float(document["fill_value"])).astype(document["data_type"])
        given = np.broadcast_to(fill, document["shape"][1:]) if rows is None else rows
        given = given if given.ndim == len(document["shape"]) else given[None]
        known, number = length - len(given), (length - 1) // size
        first = number * size
        if path not in self._chunks or self._chunks[path].number != number:
            array = open_array(self.store, path, with_length(document, first + size))
            chunk = _Chunk(number, array, np.full((size, *document["shape"][1:]), fill))
            if committed > first:
                chunk.rows[: committed - first] = await self._read(path, array, first, committed)
            elif committed < first:
                earlier = given[:first] if known == 0 else np.broadcast_to(fill, (first, *document["shape"][1:]))
                await array.setitem((slice(0, first), ...), earlier)
            self._chunks[path] = chunk
        chunk = self._chunks[path]
        chunk.rows[max(known - first, 0) : length - first] = given[max(first - known, 0) :]
        await chunk.array.setitem((slice(first, first + size), ...), chunk.rows)
        if length == first + size:
            del self._chunks[path]

    def forget(self) -> None:
        """Read chunks again before rows are added: those that were added last were not committed."""
        self._chunks.clear()

    async def _read(self, path: str, array: "zarr.AsyncArray[Any]", start: int, stop: int) -> Any:
        try:
            return await array.getitem((slice(start, stop), ...))
        except ValueError as error:
            raise StoreError(f"the last chunk of {path!r} in {self.store} is damaged: {error}") from error
