"""Chunking of arrays: the metadata documents (``zarr.json``) that define it, and checks of chunks against them.

- Numbers: a chunk has up to 64 marks, fewer (but at least 16) if it would exceed 256 kB, and all layers and heads. The
  last chunk is rewritten with each mark.
- Maps: a shard for each mark, with a compressed inner chunk for each layer and head. A shard is written once.
- Labels, such as names of layers: text of fixed width, which xarray returns as NumPy's text. (zarr's text of variable
  width is returned as a type that matplotlib refuses.)

Every chunk ends with its crc32c, so that reading a damaged chunk raises an error.
"""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import google_crc32c
import numpy as np
import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.codec import BytesBytesCodec
from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore, StorePath, WrapperStore

from tcnn_probe.schema import COORDINATES, StoreError, Variable
from tcnn_probe.storage.directory import Folder
from tcnn_probe.storage.place import ROOT, ROOT_BYTES, get, read

__all__ = [
    "CheckedStore",
    "ChunkSize",
    "Document",
    "array_document",
    "is_map",
    "label_document",
    "open_array",
    "repacked",
    "with_length",
]

Document = dict[str, Any]

CHUNK_BYTES = 256 * 1024
MARKS_PER_CHUNK = (16, 64)

# zarr decodes ten whole chunks at a time. In practice no row of numbers and no map of one head is larger than this.
LARGEST_CHUNK = 256 * 2**20

# The index of a shard, 16 bytes for each chunk, is read before the chunks.
MOST_INNER_CHUNKS = 2**18

# Largest header of a zstd frame, in bytes: 4 + 1 + 1 + 4 + 8.
_FRAME_HEADER = 18

_CHECKED = (Crc32cCodec(),)
_COMPRESSED = (ZstdCodec(level=1), Crc32cCodec())
_NUMBERS = ["bytes", "crc32c"]
_MAPS = ["bytes", "zstd", "crc32c"]

# With zarr's other separator no chunk would be found, and fill values would be read.
_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_FILL_VALUES = ("NaN", -1, "")


def array_document(
    variable: Variable, shape: Sequence[int], along: str, *, maps: bool = False
) -> Document:
    """Describe an array over the marks that has no marks yet, with rows of this shape."""
    # A chunk has at least the size 1, even along a dimension of size 0.
    row = [max(size, 1) for size in shape]
    if maps:
        cut = {
            "shards": (1, *row),
            "chunks": (1, *_ones_along("layer", "head", dims=variable.dims, shape=row)),
        }
    else:
        row_bytes = prod(row) * np.dtype(variable.dtype).itemsize
        low, high = MARKS_PER_CHUNK
        marks = min(
            max(CHUNK_BYTES // row_bytes, low), high, max(1, LARGEST_CHUNK // row_bytes)
        )
        cut = {"chunks": (marks, *row)}
    return _document(
        shape=(0, *shape),
        dtype=variable.dtype,
        fill_value=np.nan if np.dtype(variable.dtype).kind == "f" else -1,
        dimension_names=(along, *variable.dims),
        attributes={key: value for key, value in variable.attrs.items() if value},
        compressors=_COMPRESSED if maps else _CHECKED,
        **cut,
    )


def repacked(document: Document) -> Document:
    """Describe the same maps with chunks for reading one head over marks: 25 marks of one head, in shards of 100."""
    dims, row = (
        document["dimension_names"][1:],
        [max(size, 1) for size in document["shape"][1:]],
    )
    return _document(
        shape=tuple(document["shape"]),
        dtype=document["data_type"],
        fill_value=np.nan
        if document["fill_value"] == "NaN"
        else document["fill_value"],
        dimension_names=document["dimension_names"],
        attributes=document["attributes"],
        compressors=_COMPRESSED,
        shards=(100, *_ones_along("layer", dims=dims, shape=row)),
        chunks=(25, *_ones_along("layer", "head", dims=dims, shape=row)),
    )


def label_document(name: str, labels: Sequence[Any]) -> tuple[Document, np.ndarray]:
    """Return the document of a coordinate and its values: int64 if all labels are ints, else text of fixed width."""
    numbers = all(isinstance(label, int) for label in labels)
    values = np.array(labels, dtype=np.int64 if numbers else np.str_)
    # zarr warns that its specification does not include text of fixed width yet.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        document = _document(
            shape=values.shape,
            dtype=values.dtype,
            fill_value=-1 if numbers else "",
            dimension_names=(name,),
            attributes=dict(COORDINATES.get(name, {"long_name": name})),
        )
    return document, values


def is_map(document: Mapping[str, Any]) -> bool:
    """Return True for an array that is stored in shards."""
    return document["codecs"][0]["name"] == "sharding_indexed"


def with_length(document: Document, length: int) -> Document:
    """Describe the same array with another length along the marks."""
    return {**document, "shape": [length, *document["shape"][1:]]}


def open_array(store: Store, path: str, document: Document) -> "zarr.AsyncArray[Any]":
    """Open the array that a document describes, so that chunks of fill values are written, too, and never deleted."""
    return zarr.AsyncArray(
        {**document}, StorePath(store, path), {"write_empty_chunks": True}
    )  # type: ignore[call-overload]


@dataclass(frozen=True)
class ChunkSize:
    """Sizes of an array's chunks according to its document. ValueError for a document that no recording has."""

    chunk: int  # bytes of a chunk of numbers, or of an inner chunk of maps, when it is decoded
    count: int  # inner chunks of a shard; 0 for numbers
    array: int  # bytes of the decoded array
    chunks: int  # chunks or shards of the array

    @classmethod
    def of(cls, document: Document) -> Self:
        """Compute the sizes from a document."""
        codecs, outer = (
            document["codecs"],
            document["chunk_grid"]["configuration"]["chunk_shape"],
        )
        inner, names = outer, [codec["name"] for codec in codecs]
        if maps := names == ["sharding_indexed"]:
            cut = codecs[0]["configuration"]
            inner, names = (
                cut["chunk_shape"],
                [codec["name"] for codec in cut["codecs"]],
            )
            if [codec["name"] for codec in cut["index_codecs"]] != _NUMBERS or cut[
                "index_location"
            ] != "end":
                raise ValueError("its shards have another index")
        if names != (_MAPS if maps else _NUMBERS) or document.get(
            "storage_transformers"
        ):
            raise ValueError(f"its chunks are encoded by {names}")
        keys, fill_value = document["chunk_key_encoding"], document["fill_value"]
        if keys != _KEYS or fill_value not in _FILL_VALUES:
            raise ValueError(
                f"its chunks are named by {keys}, and filled with {fill_value!r}"
            )
        attributes = document["attributes"]
        known = attributes.keys() <= {"units", "long_name", "description"}
        if not known or not all(isinstance(text, str) for text in attributes.values()):
            raise ValueError(f"it has the attributes {sorted(attributes)}")
        dtype = document["data_type"]
        size = (
            np.dtype(dtype).itemsize
            if isinstance(dtype, str)
            else dtype["configuration"]["length_bytes"]
        )
        count = (
            prod(large // small for large, small in zip(outer, inner, strict=True))
            if maps
            else 0
        )
        shape = document["shape"]
        chunks = prod(
            -(-length // step) for length, step in zip(shape, outer, strict=True)
        )
        sizes = cls(prod(inner) * size, count, prod(shape) * size, chunks)
        if sizes.chunk > LARGEST_CHUNK or count > MOST_INNER_CHUNKS:
            raise ValueError(
                f"it has chunks of {sizes.chunk} bytes, {count} in each shard"
            )
        return sizes

    @property
    def stored(self) -> int:
        """Largest number of bytes that a stored chunk or shard may have."""
        # The index of a shard has 16 bytes for each chunk. A chunk of numbers has a checksum of 4 bytes; one more byte
        # is read, so that a chunk that is too large is noticed.
        return (
            (2 * self.chunk + 1024) * self.count + 16 * self.count
            if self.count
            else self.chunk + 5
        )


class CheckedStore(WrapperStore[Store]):
    """Store of a recording that checks what is read: missing, empty, damaged or too large chunks raise StoreError.

    zarr itself takes a missing chunk for fill values, and allocates as much memory as a compressed chunk claims to
    need. In a directory, StoreError is also raised after the recording was replaced by another one.

    Args:
        store: Store of the recording.
        sizes: Sizes of chunks, by the path of each array.
        identity: Text that only the root of this recording has.
    """

    def __init__(
        self, store: Store, sizes: Mapping[str, ChunkSize], identity: str
    ) -> None:
        super().__init__(store)
        self._sizes = sizes
        self._identity = identity
        self._compared: tuple[int, ...] | None = None

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self._sizes, self._identity)

    def __str__(self) -> str:
        return str(self._store)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Read an object, or a part of it."""
        path, _, cell = key.rpartition("/c/")
        size = None if cell.endswith(ROOT) else self._sizes.get(path)
        if size is None:
            return await read(self._store, key, ROOT_BYTES, byte_range, prototype)
        if isinstance(byte_range, RangeByteRequest):
            length = byte_range.end - byte_range.start
            # Data that zstd cannot compress become only slightly larger, never twice as large. zarr adds up the ends of
            # ranges in 64 bits.
            if not 0 <= length <= 2 * size.chunk + 1024 or byte_range.end >= 2**63:
                raise self._damaged(key, "its shard says that it is too large")
        buffer = await read(self._store, key, size.stored, byte_range, prototype)
        # This comes after the read, so that a recording that was replaced in between is noticed.
        await self._check_identity()
        if buffer is None or not len(buffer):
            raise self._damaged(key, "it is empty or not there")
        # The buffer is checked without a copy.
        self._check_whole(key, size, buffer.as_numpy_array(), byte_range)
        return buffer

    # Otherwise zarr 3.4 would read whole chunks from the inner store, without get(); get_ranges() is the same for parts
    # of shards.
    _supports_sync_io = False

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **options: Any,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Read parts of an object one by one, as each is checked by itself."""
        parts = [self.get(key, prototype, byte_range) for byte_range in byte_ranges]
        yield list(enumerate(await asyncio.gather(*parts)))

    def _check_whole(
        self,
        key: str,
        size: ChunkSize,
        data: np.ndarray,
        byte_range: ByteRequest | None,
    ) -> None:
        """Raise StoreError if a checksum or the size of a chunk, stored or claimed, is wrong."""
        chunks, index = [data], data[:0]
        # The index has the offset and length of each inner chunk, 8 bytes each, and a crc32c.
        index_bytes = 16 * size.count + 4
        if not size.count and len(data) != size.stored - 1:
            raise self._damaged(
                key, f"it has {len(data)} bytes, expected {size.stored - 1}"
            )
        is_part = isinstance(byte_range, RangeByteRequest)
        if size.count and not is_part and len(data) < index_bytes:
            raise self._damaged(key, f"it has {len(data)} bytes")
        if size.count and byte_range is None:
            index = data[-index_bytes:]
            places = np.frombuffer(index[:-4], "<u8").reshape(-1, 2).tolist()
            chunks = [data[start : start + length] for start, length in places]
        elif size.count and not is_part:
            chunks, index = [], data
        # zarr compares checksums, too, but its error does not name the chunk.
        for part in (index, *chunks):
            checksum = int.from_bytes(part[-4:].tobytes(), "little")
            if google_crc32c.value(part[:-4]) != checksum:
                raise self._damaged(key, "its checksum does not match")
        for chunk in chunks if size.count else ():
            if frame_size(chunk[:-4]) != size.chunk:
                raise self._damaged(
                    key,
                    f"a chunk in it is compressed from other than {size.chunk} bytes",
                )

    async def _check_identity(self) -> None:
        if not self._identity or not isinstance(self._store, Folder):
            return
        try:
            status = (self._store.root / ROOT).lstat()
            # Every mark and replacement creates a new file; inode numbers alone may be reused.
            state = status.st_ino, status.st_mtime_ns, status.st_size
        except OSError:
            state = None
        if state is None or state != self._compared:
            text = await get(self._store, ROOT)
            if text is None or self._identity.encode() not in text:
                raise StoreError(
                    f"{self} was deleted, or replaced by another recording: open it again"
                )
            self._compared = state

    def _damaged(self, key: str, reason: str) -> StoreError:
        return StoreError(f"the chunk {key!r} in {self} is damaged: {reason}")


def frame_size(data: np.ndarray) -> int | None:
    """Return the size of the content that a zstd frame declares (RFC 8878, section 3.1.1).

    None if the frame declares no size, or if it ends before the data do: zstd would decode a second frame as well,
    whose size is not checked.
    """
    header = data[:_FRAME_HEADER].tobytes()
    if len(header) < 6 or header[:4] != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = header[4]
    single_segment = descriptor >> 5 & 1
    width = (single_segment, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    field = header[start : start + width]
    if not width or len(field) < width:
        return None
    # A field of two bytes counts from 256.
    size = int.from_bytes(field, "little") + (256 if width == 2 else 0)
    has_checksum = descriptor >> 2 & 1
    end = _last_block_end(data, start + width, size)
    return size if end is not None and end + 4 * has_checksum == len(data) else None


def _last_block_end(data: np.ndarray, start: int, size: int) -> int | None:
    """Return the end of the blocks of a zstd frame, which begin at ``start``; None if there are too many of them."""
    # A block holds up to 128 KiB, and in practice all but the last hold several KiB. The limit bounds the time.
    for _ in range(2 + size // 64):
        header = int.from_bytes(data[start : start + 3].tobytes(), "little")
        repeats_a_byte = header >> 1 & 3 == 1
        start += 3 + (1 if repeats_a_byte else header >> 3)
        if header & 1:
            return start
    return None


def _ones_along(*cut: str, dims: Sequence[str], shape: Sequence[int]) -> list[int]:
    return [1 if dim in cut else size for dim, size in zip(dims, shape, strict=True)]


def _document(
    *, compressors: Sequence[BytesBytesCodec] = _CHECKED, **about: Any
) -> Document:
    objects: dict[str, Buffer] = {}
    # zarr writes the document, so that its defaults need not be repeated here.
    zarr.create_array(MemoryStore(objects), compressors=compressors, **about)
    return json.loads(objects["zarr.json"].to_bytes())
