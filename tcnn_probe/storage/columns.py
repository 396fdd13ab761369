"""Arrays that grow by a row with each mark, as the writer holds them: the objects that a row adds."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from tcnn_probe.storage.chunks import (
    Document,
    chunk_key,
    is_map,
    marks_per_object,
    own_document,
    own_length,
    with_length,
)
from tcnn_probe.storage.encoding import (
    check_codecs,
    decode_chunk,
    encode_chunk,
    encode_shard,
    fill_value,
    stored_dtype,
)
from tcnn_probe.storage.objects import Objects

__all__ = ["Column", "Maps", "Numbers", "column"]


class Column(ABC):
    """An array over the marks.

    Args:
        path: of the array in the store.
        document: as the root states it.
        objects: the store.
    """

    def __init__(self, path: str, document: Document, objects: Objects) -> None:
        check_codecs(path, document)
        self.path, self.document, self._objects = path, document, objects
        self._own_length: int | None = None  # what the array's own document is known to state

    @property
    def fill_value(self) -> float:
        """What stands for a row without a value."""
        return fill_value(self.document)

    def row(self, marks: int, value: Any) -> dict[str, bytes]:
        """The objects to write for a row.

        Args:
            marks: how many are committed; the row is the next.
            value: of the shape of a row.
        """
        length = own_length(self.document, marks + 1)
        own: dict[str, bytes] = {}
        if length != self._own_length:
            own |= own_document(self.path, with_length(self.document, length))
            self._own_length = length
        return own | self._row(marks, value)

    def forget(self) -> None:
        """Some of the objects given out may not have been written."""
        self._own_length = None

    @abstractmethod
    def _row(self, marks: int, value: Any) -> dict[str, bytes]:
        """The objects that hold one more row."""

    def _key(self, index: int) -> str:
        return chunk_key(self.path, self.document, (index, *(0 for _ in self.document["shape"][1:])))


class Numbers(Column):
    """Chunks of many marks. The last one is kept, and written whole with each mark."""

    def __init__(self, path: str, document: Document, objects: Objects) -> None:
        super().__init__(path, document, objects)
        self._chunk: np.ndarray | None = None
        self._chunk_index = -1

    def _row(self, marks: int, value: Any) -> dict[str, bytes]:
        index, row = divmod(marks, marks_per_object(self.document))
        if index != self._chunk_index or self._chunk is None:
            self._chunk = self._load(index, row)
            self._chunk_index = index
        self._chunk[row] = value
        return {self._key(index): encode_chunk(self._chunk)}

    def _load(self, index: int, rows: int) -> np.ndarray:
        """A chunk with its first rows as committed, the others empty."""
        shape = self.document["chunk_grid"]["configuration"]["chunk_shape"]
        chunk = np.full(shape, fill_value(self.document), stored_dtype(self.document))
        if rows and (data := self._objects.get(self._key(index))) is not None:
            chunk[:rows] = decode_chunk(data, self.document)[:rows]
        return chunk


class Maps(Column):
    """One shard a mark, written once."""

    def _row(self, marks: int, value: Any) -> dict[str, bytes]:
        return {self._key(marks): encode_shard(self.document, np.asarray(value)[None])}


def column(path: str, document: Document, objects: Objects) -> Column:
    """The column for an array."""
    return (Maps if is_map(document) else Numbers)(path, document, objects)
