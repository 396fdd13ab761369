"""Where a recording is kept: memory, a directory, a URL or a zarr store, and whether it can be there."""

import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from zarr.abc.store import Store
from zarr.buffer import default_buffer_prototype

# zarr's own event loop: the connections of a remote store belong to the loop that zarr reads them in.
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from tcnn_probe.storage.errors import StoreError

__all__ = ["ROOT", "UNFINISHED", "Place", "Target", "find", "get", "put", "run"]

Target = None | str | os.PathLike[str] | Store
T = TypeVar("T")

ROOT = "zarr.json"
UNFINISHED = ".tcnn_probe.init"
_OWN = re.compile(rf"(.+/)?({re.escape(ROOT)}|c(/\d+)*|\.({re.escape(ROOT)}|c|\d+)\.partial)|\.tcnn_probe\.lock")
"""Keys of a recording: metadata, chunks, what a killed writer left of these, and the lock."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in zarr's thread. Interrupted from the keyboard, it ends first: nothing is written later."""
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await work
        finally:
            ended.set()

    try:
        return sync(watched())
    except BaseException:
        ended.wait(60)
        raise


async def get(store: Store, key: str) -> bytes | None:
    """An object of a store, None if there is none."""
    buffer = await store.get(key, default_buffer_prototype())
    return None if buffer is None else buffer.to_bytes()


async def put(store: Store, key: str, data: bytes) -> None:
    """Write an object of a store."""
    await store.set(key, default_buffer_prototype().buffer.from_bytes(data))


@dataclass(frozen=True)
class Place:
    """A store to read from, the directory it is in if it is in one, and its name for messages."""

    store: Store
    directory: Path | None
    name: str
    writable: bool = True

    def check_replaceable(self) -> None:
        """Refuse to delete what a recording has not written: StoreError if other files lie in it."""
        if others := [key for key in run(_listed(self.store.list)) if not _OWN.fullmatch(key)]:
            raise StoreError(f"{self.name} holds more than a recording, and is not replaced: {sorted(others)[0]!r}")

    def root(self) -> bytes | None:
        """The root ``zarr.json``, None if nothing is there; StoreError if something is, and no group of zarr 3."""
        if self.directory is not None and not self.directory.is_dir():
            if self.directory.exists():
                raise self.something_else("a file")
            return None
        text = run(get(self.store, ROOT))
        there = [] if text is not None else run(_listed(self.store.list_dir, ""))
        if text is None and there and UNFINISHED not in there:
            raise self.something_else(str(sorted(there)[:3]))
        return text

    def something_else(self, what: str) -> StoreError:
        """The error for a place that is taken."""
        advice = "choose another path" if self.writable else "tcnn_probe.open reads what tcnn_probe.record wrote"
        return StoreError(f"{self.name} holds something else than a recording ({what}): {advice}")

    def check_writable(self, *, exists: bool) -> None:
        """Refuse a directory that cannot be written, or made, as far as this shows without a try: StoreError."""
        if self.directory is not None:
            folders = (self.directory,) if exists else self.directory.parents
            there = next(folder for folder in folders if folder.exists())
            if not there.is_dir():
                raise StoreError(f"{self.directory} cannot be made: the file {there} stands in its way")
            if not os.access(there, os.W_OK | os.X_OK):
                raise StoreError(f"{self.directory} cannot be written: no permission to write in {there}")


def find(target: Target, *, writable: bool = True) -> Place:
    """The place that a target means: None is memory, a string with "://" a URL, other strings are paths.

    StoreError for an empty path, a URL that cannot be opened, a store that cannot be written.
    """
    if target is None:
        return Place(MemoryStore(), None, "memory")
    if type(target) is LocalStore and not (writable and target.read_only):
        target = target.root
    if isinstance(target, Store):
        if writable and (target.read_only or not (target.supports_writes and target.supports_listing)):
            raise StoreError(f"expected a store that can be written and listed, got {target}")
        return Place(target, None, str(target), writable)
    text = os.fspath(target)
    if text.startswith("file://"):
        text = url2pathname(urlsplit(text).path)
    elif "://" in text:
        return Place(_at_url(text), None, text, writable)
    if not text:
        raise StoreError("expected the path of a directory, got an empty one; None keeps the recording in memory")
    directory = Path(text).expanduser().resolve()  # the working directory may change while recording
    return Place(LocalStore(directory, read_only=True), directory, str(directory), writable)


async def _listed(keys: Callable[..., AsyncIterator[str]], *given: str) -> list[str]:
    """All that a store lists. Some stores look for a running event loop when they are asked, so it is done in one."""
    return [key async for key in keys(*given)]


def _at_url(url: str) -> Store:
    try:
        return FsspecStore.from_url(url)
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"{url} cannot be opened ({error}): URLs need the package fsspec and, for most protocols, one more, such "
            f"as s3fs for s3:// or gcsfs for gs://; a zarr store object can be given instead"
        ) from error
