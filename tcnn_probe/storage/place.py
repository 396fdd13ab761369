"""Places of recordings: memory, a directory, a URL or a zarr store."""

import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from zarr.abc.store import Store
from zarr.buffer import default_buffer_prototype

# zarr's own event loop is used, because the connections of a remote store belong to the loop in
# which zarr reads.
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from tcnn_probe.schema import StoreError
from tcnn_probe.storage.directory import DurableStore

__all__ = ["ROOT", "UNFINISHED", "Place", "Target", "find", "keys_of", "run"]

Target = None | str | os.PathLike[str] | Store
T = TypeVar("T")

ROOT = "zarr.json"
UNFINISHED = ".tcnn_probe.init"
"""Object of a store without renaming, until its recording has its first mark."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in zarr's thread. After Ctrl-C,
    wait until it has ended, so that nothing is written later.
    """
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await work
        finally:
            ended.set()

    try:
        return sync(watched())
    except BaseException:
        # If a disk or server takes longer, do not wait: the user wants to stop.
        ended.wait(60)
        raise


def keys_of(store: Store) -> list[str]:
    """List all keys of a store."""

    async def listed() -> list[str]:
        return [key async for key in store.list()]

    return run(listed())


@dataclass(frozen=True)
class Place:
    """A store, its directory if it has one, and its name for messages."""

    store: Store
    directory: Path | None
    name: str

    def root(self) -> bytes | None:
        """Read the root ``zarr.json``; None if the place is empty or unfinished,
        StoreError if it has other files.
        """
        if self.directory is not None and not self.directory.is_dir():
            if self.directory.exists():
                raise self.something_else("a file")
            return None
        buffer = run(self.store.get(ROOT, default_buffer_prototype()))
        if buffer is not None:
            return buffer.to_bytes()
        keys = keys_of(self.store)
        if keys and UNFINISHED not in keys:
            raise self.something_else(str(sorted(keys)[:3]))
        return None

    def something_else(self, content: str) -> StoreError:
        """Return the error for a place that holds something else than a recording."""
        return StoreError(
            f"{self.name} holds something else than a recording ({content}): give another path"
        )

    def check_writable(self) -> None:
        """Raise StoreError if a directory evidently cannot be written or created;
        nothing is written for this check.
        """
        if self.directory is None:
            return
        folders = (self.directory, *self.directory.parents)
        folder = next(folder for folder in folders if folder.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise StoreError(
                f"{self.directory} cannot be written: expected {folder} to be a folder with "
                "permission to write"
            )


def find(target: Target, *, writable: bool = True) -> Place:
    """Return the place of a target: memory for None,
    a URL for a string with "://", a path for other strings.

    StoreError for an empty path, for a URL that cannot be opened, and for a store that cannot be
    written.
    """
    if target is None:
        return Place(MemoryStore(), None, "memory")
    # A LocalStore of zarr is treated as a path, with its lock and durable writes.
    if type(target) is LocalStore and not (writable and target.read_only):
        target = target.root
    if isinstance(target, Store):
        run(target._ensure_open())
        if writable and (
            target.read_only or not (target.supports_writes and target.supports_listing)
        ):
            raise StoreError(f"expected a store that can be written and listed, got {target}")
        return Place(target, None, str(target))
    text = os.fspath(target)
    if text.startswith("file://"):
        text = url2pathname(urlsplit(text).path)
    elif "://" in text:
        return Place(_at_url(text), None, text)
    if not text:
        raise StoreError(
            "expected the path of a directory, got an empty path; None keeps the recording in "
            "memory"
        )
    # The path is made absolute, because the working directory may change while recording.
    directory = Path(text).expanduser().resolve()
    return Place(DurableStore(directory), directory, str(directory))


def _at_url(url: str) -> Store:
    try:
        return FsspecStore.from_url(url)
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"{url} cannot be opened ({error}): URLs need the package fsspec and, for most "
            "protocols, one more, such as s3fs for s3:// or gcsfs for gs://; a zarr store object "
            "can be given instead"
        ) from error
