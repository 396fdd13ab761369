"""Bytes of chunks and shards, as the zarr v3 specification has them.

zarr's own pipeline makes a task of every chunk, which takes most of the time of a mark: twelve numbers' chunks in 5 ms
instead of 1, a shard of 72 small chunks in 30 instead of 2. Readers use zarr.
"""

from math import ceil
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import Zstd

from tcnn_probe.storage.chunks import Document
from tcnn_probe.storage.errors import StoreError

__all__ = ["check_codecs", "decode_chunk", "encode_chunk", "encode_shard", "fill_value", "stored_dtype"]

_LEVEL = 1
_EMPTY = 2**64 - 1


def stored_dtype(document: Document) -> np.dtype[Any]:
    """The dtype of an array in its bytes."""
    return np.dtype(document["data_type"]).newbyteorder("<")


def fill_value(document: Document) -> float:
    """What is read where nothing was written."""
    return float(document["fill_value"])


def check_codecs(path: str, document: Document) -> None:
    """Whether the functions below apply.

    Raises:
        StoreError: they do not.
    """
    names = [codec["name"] for codec in document["codecs"]]
    if names == ["sharding_indexed"]:
        inner = document["codecs"][0]["configuration"]
        ends = [codec["name"] for codec in inner["index_codecs"]] == ["bytes", "crc32c"]
        names = [codec["name"] for codec in inner["codecs"]] if ends else names
    if names != ["bytes", "zstd"]:
        raise StoreError(f"{path} is encoded with {names}, expected ['bytes', 'zstd']: something else has written it")


def encode_chunk(values: np.ndarray) -> bytes:
    """A chunk of numbers, all of it."""
    return bytes(Zstd(_LEVEL).encode(np.ascontiguousarray(values)))


def decode_chunk(data: bytes, document: Document) -> np.ndarray:
    """A chunk of numbers."""
    shape = document["chunk_grid"]["configuration"]["chunk_shape"]
    return np.frombuffer(Zstd().decode(data), stored_dtype(document)).reshape(shape)


def encode_shard(document: Document, values: np.ndarray) -> bytes:
    """A shard of maps: its inner chunks one after the other, then where each lies and how long it is, then a checksum.

    Args:
        document: of the array.
        values: those of the shard, all of its marks or the first of them.
    """
    shape = document["chunk_grid"]["configuration"]["chunk_shape"]
    inner = document["codecs"][0]["configuration"]["chunk_shape"]
    grid = [size // part for size, part in zip(shape, inner, strict=True)]
    filled = ceil(len(values) / inner[0])
    if missing := filled * inner[0] - len(values):
        rest = np.full((missing, *values.shape[1:]), fill_value(document), values.dtype)
        values = np.concatenate([values, rest])
    values = values.astype(stored_dtype(document), copy=False)
    index = np.full((*grid, 2), _EMPTY, "<u8")
    chunks, offset = [], 0
    for cell in np.ndindex(filled, *grid[1:]):
        place = tuple(slice(k * size, (k + 1) * size) for k, size in zip(cell, inner, strict=True))
        chunks.append(encode_chunk(values[place]))
        index[cell] = offset, len(chunks[-1])
        offset += len(chunks[-1])
    table = index.tobytes()
    return b"".join([*chunks, table, google_crc32c.value(table).to_bytes(4, "little")])
