"""A finished recording copied into fewer, larger chunks."""

import os
from contextlib import nullcontext
from itertools import product
from typing import Any

from zarr.abc.store import Store

from tcnn_probe.storage.chunks import is_map, open_array, repacked
from tcnn_probe.storage.commit import REPACKED, Root, all_of, documents_beside
from tcnn_probe.storage.directory import new_directory
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.place import ROOT, find, put, run
from tcnn_probe.storage.reading import existing

__all__ = ["repack"]


def repack(source: str | os.PathLike[str] | Store, target: str | os.PathLike[str] | Store) -> None:
    """Copy a recording so that one head over all marks is quick to read.

    While training, the maps of each mark are an object of their own. In the copy 100 marks of a layer are one, in
    pieces of 25 marks of one head. The copy has the same values and is opened in the same way; it cannot be continued.

    Args:
        source: path, URL or zarr store of a recording.
        target: where nothing is yet.

    Raises:
        StoreError: there is no recording, it is damaged, or something is at the target.
    """
    old, new = find(source, writable=False), find(target)
    root = existing(old)
    if new.root() is not None:
        raise StoreError(f"{new.name} holds a recording already")
    new.check_writable(exists=False)
    maps = {path for path, about in root.arrays.items() if is_map(about)}
    documents = {path: repacked(about) if path in maps else about for path, about in root.documents.items()}
    copy = Root.of({**root.attributes, REPACKED: True}, documents)

    async def write(store: Store) -> None:
        await all_of(documents_beside(store, documents))
        for path, about in root.arrays.items():
            there, here = open_array(old.store, path, about), open_array(store, path, documents[path])
            steps = (here.shards or here.chunks)[:2]  # marks and, of maps, layers
            ranges = [range(0, size, step) for size, step in zip(here.shape[:2], steps, strict=True)]
            for starts in product(*ranges):
                some: Any = tuple(slice(start, start + step) for start, step in zip(starts, steps, strict=True))
                try:
                    await here.setitem(some, await there.getitem(some))
                except ValueError as error:
                    raise StoreError(f"{path!r} in {old.name} is damaged: {error}") from error
        await put(store, ROOT, copy.text)

    with nullcontext((new.store, None)) if new.directory is None else new_directory(new.directory) as (store, lock):
        run(write(store))
    if lock is not None:
        lock.release()
