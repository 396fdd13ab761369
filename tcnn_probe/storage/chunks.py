"""How arrays are cut into chunks, and the metadata documents (``zarr.json``) that say so.

- Numbers: chunks of 64 marks and all layers and heads; of 16 at the least where that is more than 256 kB. The chunk
  that grows is written anew with each mark.
- Maps: one shard a mark, in it one inner chunk for each layer and head, compressed. A shard is written once.
- Labels, such as names of layers: text of fixed width, which xarray gives back as NumPy's own text. (zarr's variable
  width comes back as a type that matplotlib refuses.)

Every chunk ends with its crc32c, so that a damaged one is an error when it is read.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zarr
from zarr.abc.buffer import Buffer
from zarr.abc.codec import BytesBytesCodec
from zarr.abc.store import Store
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore, StorePath

from tcnn_probe.schema import COORDINATES, Variable

__all__ = [
    "Document",
    "array_document",
    "is_map",
    "label_document",
    "open_array",
    "repacked",
    "with_length",
]

Document = dict[str, Any]

_CHUNK_BYTES = 256 * 1024
_MARKS_PER_CHUNK = (16, 64)
_CHECKED = (Crc32cCodec(),)
_COMPRESSED = (ZstdCodec(level=1), Crc32cCodec())


def array_document(variable: Variable, shape: Sequence[int], along: str, *, maps: bool = False) -> Document:
    """Describe an array over the marks, of no length yet, with rows of this shape."""
    row = [max(n, 1) for n in shape]
    if maps:
        cut = {"shards": (1, *row), "chunks": (1, *_one_of("layer", "head", dims=variable.dims, shape=row))}
    else:
        low, high = _MARKS_PER_CHUNK
        marks = _CHUNK_BYTES // (int(np.prod(row)) * np.dtype(variable.dtype).itemsize)
        cut = {"chunks": (min(max(marks, low), high), *row)}
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
    """Describe the same maps cut for reading one head over all marks: 100 marks a shard, in it 25 of one head."""
    dims, row = document["dimension_names"][1:], [max(n, 1) for n in document["shape"][1:]]
    return _document(
        shape=tuple(document["shape"]),
        dtype=document["data_type"],
        fill_value=np.nan if document["fill_value"] == "NaN" else document["fill_value"],
        dimension_names=document["dimension_names"],
        attributes=document["attributes"],
        compressors=_COMPRESSED,
        shards=(100, *_one_of("layer", dims=dims, shape=row)),
        chunks=(25, *_one_of("layer", "head", dims=dims, shape=row)),
    )


def label_document(name: str, labels: Sequence[Any]) -> tuple[Document, np.ndarray]:
    """Describe a coordinate of integers, or else of text; with its values."""
    numbers = all(isinstance(label, int) for label in labels)
    values = np.array(labels, dtype=np.int64 if numbers else np.str_)
    with warnings.catch_warnings():  # zarr's specification does not have this text yet
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
    """Whether an array is stored in shards."""
    return document["codecs"][0]["name"] == "sharding_indexed"


def with_length(document: Document, length: int) -> Document:
    """Describe the same array with another length along the marks."""
    return {**document, "shape": [length, *document["shape"][1:]]}


def open_array(store: Store, path: str, document: Document) -> "zarr.AsyncArray[Any]":
    """Give the array that a document describes; none of its chunks is left out, or deleted, for being empty."""
    return zarr.AsyncArray({**document}, StorePath(store, path), {"write_empty_chunks": True})  # type: ignore[call-overload]


def _one_of(*cut: str, dims: Sequence[str], shape: Sequence[int]) -> list[int]:
    return [1 if dim in cut else n for dim, n in zip(dims, shape, strict=True)]


def _document(*, compressors: Sequence[BytesBytesCodec] = _CHECKED, **about: Any) -> Document:
    objects: dict[str, Buffer] = {}
    zarr.create_array(MemoryStore(objects), compressors=compressors, **about)
    return json.loads(objects["zarr.json"].to_bytes())
