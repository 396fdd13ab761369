"""Maps rewritten into fewer, larger objects after training, and back."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import zarr
from zarr.abc.store import Store

from tcnn_probe.storage.chunks import (
    Document,
    chunk_key,
    is_compacted,
    is_map,
    marks_per_inner_chunk,
    own_document,
    relaid,
)
from tcnn_probe.storage.commit import Root
from tcnn_probe.storage.encoding import encode_shard
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.place import ROOT, Place, find

__all__ = ["compact", "delete_other_layout", "rewrite_maps"]

Progress = Callable[[int, int], None]


def compact(target: str | os.PathLike[str] | Store, *, progress: Progress | None = None) -> None:
    """Rewrite the maps of a finished recording, so that one head over all marks is quick to read.

    While training, each mark's maps are an object of their own. This puts 100 marks of a layer into one, in pieces of
    25 marks of one head. Numbers are left as they are. Killed at any moment it loses nothing, and can be run again.
    The store may be continued afterwards: its first further mark then turns the maps back, which takes about as long.

    Nothing else may write meanwhile, and datasets that were opened before must be opened again.

    Args:
        target: path, URL or zarr store of a recording.
        progress: called with the number of objects written and that of all.

    Raises:
        StoreError: no recording is there, one of another schema version, or something else writes to it.
    """
    place = find(target)
    root = Root.read(place)
    if target is None or root is None:
        raise StoreError(f"{place.name} holds no recording: nothing is there")
    rewrite_maps(place, root, compacted=True, progress=progress)


def rewrite_maps(place: Place, root: Root, *, compacted: bool, progress: Progress | None = None) -> Root:
    """Bring all maps into one of the two layouts, beside the other, and commit. Gives the new root."""
    old = {path: about for path, about in root.documents.items() if is_map(about) and is_compacted(about) != compacted}
    if not old or not root.length:
        return root
    new = {path: relaid(about, compacted=compacted) for path, about in old.items()}
    _delete_layouts(place, old, keep_compacted=not compacted)  # of an earlier attempt
    group = zarr.open_group(place.objects.store, mode="r", use_consolidated=True)
    total = sum(_shard_count(about) for about in new.values())
    done = 0
    for path, about in new.items():
        step = max(about["chunk_grid"]["configuration"]["chunk_shape"][0], marks_per_inner_chunk(old[path]))
        for key, values in _shards(cast("zarr.Array[Any]", group[path]), path, about, step):
            place.objects.put({key: encode_shard(about, values)})
            done += 1
            if progress is not None:
                progress(done, total)
    if place.objects.get(ROOT) != root.text:
        raise StoreError(f"{place.name} was written to by something else: its maps are left as they were")
    committed = Root.of(root.attributes, {**root.documents, **new})
    place.objects.put({ROOT: committed.text})
    place.objects.put({key: data for path, about in new.items() for key, data in own_document(path, about).items()})
    _delete_layouts(place, new, keep_compacted=compacted)
    return committed


def delete_other_layout(place: Place, root: Root) -> None:
    """Delete what a rewriting that was killed has left: objects of the layout that the root does not state."""
    for path, about in root.documents.items():
        if is_map(about):
            _delete_layouts(place, [path], keep_compacted=is_compacted(about))


def _delete_layouts(place: Place, paths: Iterable[str], *, keep_compacted: bool) -> None:
    for path in paths:
        if keep_compacted:
            place.objects.delete_folder(f"{path}/c")
        else:
            names = [name for name in place.objects.names(path) if name.startswith("c.")]
            place.objects.delete(f"{path}/{name}" for name in names)


def _shard_count(document: Document) -> int:
    shape, shard = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
    return int(np.prod([-(-n // size) for n, size in zip(shape, shard, strict=True)]))


def _shards(array: "zarr.Array[Any]", path: str, document: Document, step: int) -> Iterator[tuple[str, np.ndarray]]:
    """Key and values of each shard; reads ``step`` marks of as many layers as a shard has at a time."""
    marks, *rest = document["chunk_grid"]["configuration"]["chunk_shape"]
    layers = rest[0] if rest else 1
    for start in range(0, array.shape[0], step):
        for layer in range(0, array.shape[1] if rest else 1, layers):
            some = (slice(start, start + step), slice(layer, layer + layers))
            block = np.asarray(array[some[: array.ndim]])
            for first in range(0, len(block), marks):
                index = ((start + first) // marks, layer // layers, *(0 for _ in rest[1:]))[: len(rest) + 1]
                yield chunk_key(path, document, index), block[first : first + marks]
