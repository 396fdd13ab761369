"""Places of recordings: memory, a directory, a URL or a zarr store."""

import _thread
import os
import threading
from collections.abc import Callable, Coroutine
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

__all__ = ["ROOT", "UNFINISHED", "Place", "Source", "Target", "find", "run", "uninterrupted"]

Source = str | os.PathLike[str] | Store
Target = Source | None
T = TypeVar("T")

ROOT = "zarr.json"
UNFINISHED = ".tcnn_probe.init"
"""Object of a store without renaming, until its recording has its first mark."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in zarr's thread, as :func:`uninterrupted`."""
    return uninterrupted(sync, work)


def uninterrupted(function: Callable[..., T], *args: Any) -> T:
    """Call a function that uses zarr; Ctrl-C is raised once it has ended and writes no more."""
    # Only the main thread is interrupted, so another one waits for zarr's. Ctrl-C within the Python
    # code of a Thread or a Future could keep their locks for ever.
    ended = threading.Lock()
    ended.acquire()
    results: list[T] = []
    errors: list[BaseException] = []

    def complete() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    try:
        try:
            _thread.start_new_thread(complete, ())
        except RuntimeError:  # there can be no more threads, as when Python ends
            ended.release()
            raise
        ended.acquire()
    finally:
        if not (results or errors):
            ended.acquire()
    if errors:
        raise errors.pop()
    return results.pop()


@dataclass(frozen=True)
class Place:
    """A store, its directory if it has one, and its name for messages."""

    store: Store
    directory: Path | None
    name: str

    def read(self, key: str) -> bytes | None:
        """Read an object; None if it is not there."""
        buffer = run(self.store.get(key, default_buffer_prototype()))
        return None if buffer is None else buffer.to_bytes()

    def names(self, folder: str = "") -> list[str]:
        """List the objects and folders in a folder, by default at the top, in order."""

        async def listed() -> list[str]:
            return [name async for name in self.store.list_dir(folder)]

        return sorted(run(listed()))

    def root(self) -> bytes | None:
        """Read the root; None if nothing is there, or unfinished; StoreError for other files."""
        root = self.read(ROOT)
        names = self.names() if root is None else []
        if names and UNFINISHED not in names:
            raise self.something_else(str(names[:3]))
        return root

    def something_else(self, content: str) -> StoreError:
        """Return the error for a place that holds something else than a recording."""
        return StoreError(
            f"{self.name} holds something else than a recording ({content}): give another path"
        )

    def check_writable(self) -> None:
        """Raise StoreError if a directory evidently cannot be written; write nothing for this."""
        if self.directory is None:
            return
        around = next(folder for folder in self.directory.parents if folder.exists())
        for folder in (around, self.directory) if self.directory.exists() else (around,):
            if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
                raise StoreError(
                    f"{self.directory} cannot be written: expected {folder} to be a folder with "
                    "permission to write"
                )


def find(target: Target, *, writable: bool = True) -> Place:
    """Return the place of a target: memory for None, else a store, a URL with "://" or a path.

    StoreError for an empty path, and for a store that cannot be written; for a URL that cannot be
    opened, the error of fsspec.
    """
    if target is None:
        return Place(MemoryStore(), None, "memory")
    # A LocalStore of zarr is treated as a path, with its lock and durable writes.
    if type(target) is LocalStore and not (writable and target.read_only):
        target = target.root
    if isinstance(target, Store):
        run(target._ensure_open())
        abilities = target.supports_writes, target.supports_listing, target.supports_deletes
        if writable and (target.read_only or not all(abilities)):
            raise StoreError(
                f"expected a store that can be written, listed and deleted from, got {target}"
            )
        return Place(target, None, str(target))
    text = os.fspath(target)
    if text.startswith("file://"):
        text = url2pathname(urlsplit(text).path)
    elif "://" in text:
        return Place(FsspecStore.from_url(text), None, text)
    if not text:
        raise StoreError(
            "expected the path of a directory, got an empty path; None keeps the recording in "
            "memory"
        )
    # The path is made absolute, because the working directory may change while recording.
    directory = Path(text).expanduser().resolve()
    return Place(DurableStore(directory), directory, str(directory))
