"""Whole objects by key, in any zarr store, for code that is not asynchronous."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from zarr.abc.store import Store
from zarr.buffer import default_buffer_prototype

# zarr's own event loop: the connections of a remote store belong to the loop that zarr reads them in.
from zarr.core.sync import sync

__all__ = ["Objects"]


class Objects:
    """The objects of a store.

    Args:
        store: any zarr store that can be written, listed and deleted from.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def get(self, key: str) -> bytes | None:
        """One object, or None if there is none."""
        buffer = sync(self.store.get(key, default_buffer_prototype()))
        return None if buffer is None else buffer.to_bytes()

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Write objects, in any order. Returns, or raises the first error, when all have ended."""
        buffer = default_buffer_prototype().buffer
        sync(_all(self.store.set(key, buffer.from_bytes(data)) for key, data in objects.items()))

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder ("" is the whole store): objects and folders, without their paths."""
        return sorted(name.strip("/") for name in sync(self._names(folder)))

    def is_empty(self) -> bool:
        """Whether there is nothing at all."""
        return sync(self.store.is_empty(""))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects that may not exist."""
        sync(_all(self.store.delete(key) for key in keys))

    def delete_folder(self, folder: str) -> None:
        """Delete all that lies under a folder, which may not exist."""
        sync(self.store.delete_dir(folder))

    def clear(self) -> None:
        """Delete everything."""
        sync(self.store.clear())

    async def _names(self, folder: str) -> list[str]:
        return [name async for name in self.store.list_dir(folder)]


async def _all(tasks: Iterable[Coroutine[Any, Any, None]]) -> None:
    # None may still be under way when an error is raised: it would land on what is done about that error.
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
