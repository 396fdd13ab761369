"""How arrays are cut into objects, and the metadata documents (``zarr.json``) that say so.

Documents are made by zarr, in memory, and kept as the plain JSON they are.

- Numbers: float64, chunks of 16 to 64 marks and all layers and heads, at most 256 kB unless 16 marks are more. The
  chunk that grows is written anew at every mark: with 256 marks in it, a mark cost twice as much.
- Maps: float16 or float32, one shard a mark, in it one inner chunk for each layer and head. A shard is written once.
- Compacted maps: shards of 100 marks of one layer, and in it inner chunks of 25 marks of one head. Their keys are
  written with another separator ("c.0.1" instead of "c/0/1"), so that both forms can be there until the root says which
  one holds.
"""

import json
from typing import Any

import numpy as np
import zarr
from zarr.abc.buffer import Buffer
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

from tcnn_probe.schema import COORDINATES, Group, Variable

__all__ = [
    "GIVEN",
    "Document",
    "chunk_key",
    "coordinates",
    "is_compacted",
    "is_map",
    "marks_per_inner_chunk",
    "marks_per_object",
    "new_array",
    "own_document",
    "own_length",
    "relaid",
    "with_length",
]

Document = dict[str, Any]

GIVEN = "As given to mark()."
_CHUNK_BYTES = 256 * 1024
_MARKS_PER_CHUNK = (16, 64)
_MARKS_PER_COMPACT_SHARD, _MARKS_PER_COMPACT_CHUNK = 100, 25
_SPARE_MAPS = 64
_CODECS = ZstdCodec(level=1)


def new_array(variable: Variable, shape: tuple[int, ...], along: str, *, maps: bool = False) -> Document:
    """The document of an array over the marks, of no length yet.

    Args:
        variable: what it holds.
        shape: lengths of the dimensions after that of the marks.
        along: name of the marks' dimension.
        maps: one shard for each mark.
    """
    dims = (along, *variable.dims)
    if maps:
        layout = _map_layout(dims, shape, 1, 1)
    else:
        row = int(np.prod(shape, dtype=int)) * np.dtype(variable.dtype).itemsize
        low, high = _MARKS_PER_CHUNK
        layout = {"chunks": (min(max(_CHUNK_BYTES // max(row, 1), low), high), *(max(n, 1) for n in shape))}
    return _document(
        shape=(0, *shape),
        dtype=variable.dtype,
        fill_value=np.nan if np.dtype(variable.dtype).kind == "f" else -1,
        dimension_names=dims,
        attributes={key: value for key, value in variable.attrs.items() if value},
        **layout,
    )


def relaid(document: Document, *, compacted: bool) -> Document:
    """The document of the same maps in the other layout."""
    dims, shape = tuple(document["dimension_names"]), tuple(document["shape"])
    marks = (_MARKS_PER_COMPACT_SHARD, _MARKS_PER_COMPACT_CHUNK) if compacted else (1, 1)
    return _document(
        shape=shape,
        dtype=document["data_type"],
        fill_value=np.nan if document["fill_value"] == "NaN" else document["fill_value"],
        dimension_names=dims,
        attributes=document["attributes"],
        chunk_key_encoding={"name": "default", "separator": "." if compacted else "/"},
        **_map_layout(dims, shape[1:], *marks),
    )


def coordinates(group: Group) -> dict[str, bytes]:
    """Objects of a group's coordinates, relative to the group: names of layers, labels, and 0 ... n-1 where none."""
    objects: dict[str, Buffer] = {}
    root = zarr.open_group(MemoryStore(objects), mode="w")
    if group.layers:
        _coordinate(root, "layer", np.array(list(group.layers), dtype=object), dtype=str)
    for name, size in group.sizes.items():
        labels = list(group.coords.get(name, range(size)))
        if all(isinstance(label, int) for label in labels):
            _coordinate(root, name, np.array(labels, dtype=np.int64), dtype="int64", fill_value=-1)
        else:
            _coordinate(root, name, np.array(labels, dtype=object), dtype=str)
    return {key: data.to_bytes() for key, data in objects.items() if key != "zarr.json"}


def chunk_key(path: str, document: Document, index: tuple[int, ...]) -> str:
    """Key of a chunk, or of a shard."""
    separator = document["chunk_key_encoding"]["configuration"]["separator"]
    return f"{path}/{separator.join(['c', *map(str, index)])}"


def is_map(document: Document) -> bool:
    """Whether a document is that of an array stored in shards."""
    return document["node_type"] == "array" and document["codecs"][0]["name"] == "sharding_indexed"


def is_compacted(document: Document) -> bool:
    """Whether an array holds maps in shards of many marks."""
    return is_map(document) and marks_per_object(document) > 1


def marks_per_object(document: Document) -> int:
    """Marks in a chunk of numbers, or in a shard of maps."""
    return document["chunk_grid"]["configuration"]["chunk_shape"][0]


def marks_per_inner_chunk(document: Document) -> int:
    """Marks that are read together, at the least."""
    if is_map(document):
        return document["codecs"][0]["configuration"]["chunk_shape"][0]
    return marks_per_object(document)


def own_length(document: Document, marks: int) -> int:
    """The length that an array's own document states: spare room for marks to come, so that it seldom changes."""
    block = max(marks_per_object(document), _SPARE_MAPS if is_map(document) else 1)
    return -(-max(marks, 1) // block) * block


def own_document(path: str, document: Document) -> dict[str, bytes]:
    """The object beside an array's chunks, for those who read without the root's metadata."""
    return {f"{path}/zarr.json": json.dumps(document).encode()}


def with_length(document: Document, length: int) -> Document:
    """The document of the same array with another length along the marks."""
    return {**document, "shape": [length, *document["shape"][1:]]}


def _map_layout(dims: tuple[str, ...], shape: tuple[int, ...], marks: int, inner_marks: int) -> dict[str, Any]:
    """Shards and the chunks inside them. One layer a shard where it holds many marks: it is put together in memory."""
    named = list(zip(dims[1:], shape, strict=True))
    return {
        "shards": (marks, *(1 if marks > 1 and dim == "layer" else max(n, 1) for dim, n in named)),
        "chunks": (inner_marks, *(1 if dim in ("layer", "head") else max(n, 1) for dim, n in named)),
    }


def _coordinate(group: zarr.Group, name: str, values: np.ndarray, **about: Any) -> None:
    array = group.create_array(
        name,
        shape=values.shape,
        dimension_names=(name,),
        attributes=dict(COORDINATES.get(name, {"long_name": name})),
        compressors=_CODECS,
        **about,
    )
    array[:] = values


def _document(**about: Any) -> Document:
    objects: dict[str, Buffer] = {}
    zarr.create_array(MemoryStore(objects), compressors=_CODECS, **about)
    return json.loads(objects["zarr.json"].to_bytes())
