"""Places of recordings: memory, a directory, a URL or a zarr store; and single objects read and written in them."""

import asyncio
import errno
import os
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname
from zipfile import BadZipFile

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.buffer import default_buffer_prototype

# zarr's own event loop: the connections of a remote store belong to the loop that zarr reads them in.
from zarr.core.sync import _get_loop, sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, ZipStore

from tcnn_probe.schema import StoreError
from tcnn_probe.storage.directory import Folder

__all__ = [
    "ROOT",
    "UNFINISHED",
    "Place",
    "Target",
    "condition",
    "find",
    "get",
    "in_zarr_thread",
    "listed",
    "put",
    "put_if",
    "read",
    "run",
]

Target = None | str | os.PathLike[str] | Store
T = TypeVar("T")

ROOT = "zarr.json"
UNFINISHED = ".tcnn_probe.init"

# A root describes a few hundred arrays in about a kilobyte each. The bound keeps a crafted one from filling the memory.
ROOT_BYTES = 16 * 2**20


# What zipfile raises for files that are damaged.
_ZIP_ERRORS = (BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error)


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
        # A disk or server that takes longer is given up: the user wants to leave.
        ended.wait(60)
        raise


def in_zarr_thread() -> bool:
    """Return whether this is zarr's own thread, in which :func:`run` cannot wait."""
    try:
        return asyncio.get_running_loop() is _get_loop()
    except RuntimeError:  # no loop is running in this thread
        return False


async def get(store: Store, key: str) -> bytes | None:
    """Read an object, at most one byte more of it than a root may have; None if it is not there."""
    buffer = await read(store, key, ROOT_BYTES + 1)
    return None if buffer is None else buffer.to_bytes()


async def read(
    store: Store,
    key: str,
    limit: int,
    byte_range: ByteRequest | None = None,
    prototype: BufferPrototype | None = None,
) -> Buffer | None:
    """Read an object or a part of it; StoreError for a zip file that is damaged.

    Args:
        store: Store of the object.
        key: Name of the object.
        limit: Number of bytes to read at most of a whole object. Files may be larger than they should be. Servers
            differ in what they make of a range beyond the end of an object, so there nothing is cut short.
        byte_range: Part of the object; None for all of it.
        prototype: Kind of buffer to return.
    """
    if byte_range is None and isinstance(store, Folder | ZipStore):
        byte_range = RangeByteRequest(0, limit)
    try:
        return await store.get(key, prototype or default_buffer_prototype(), byte_range)
    except _ZIP_ERRORS as error:
        if not isinstance(store, ZipStore):
            raise
        raise StoreError(f"{key!r} in {store} is damaged: {error}") from error


async def put(store: Store, key: str, data: bytes) -> None:
    """Write an object of a store."""
    await store.set(key, default_buffer_prototype().buffer.from_bytes(data))


async def condition(store: Store, key: str) -> dict[str, Any] | None:
    """Return the arguments of a write that fails once the object has changed; None where a store has no such writes.

    S3 through s3fs has them (``If-Match``), and every store of obstore with conditional writes.
    """
    try:
        if isinstance(store, FsspecStore) and "s3" in store.fs.protocol:
            return {
                "IfMatch": (await store.fs._info(f"{store.path}/{key}", refresh=True))[
                    "ETag"
                ]
            }
        if isinstance(store, ObjectStore):
            import obstore

            return {
                "mode": {"e_tag": (await obstore.head_async(store.store, key))["e_tag"]}
            }
    except FileNotFoundError:
        # In both libraries this fails if the object is there by then.
        return {"mode": "create"}
    return None


async def put_if(
    store: Store, key: str, data: bytes, precondition: dict[str, Any] | None
) -> None:
    """Write an object on a :func:`condition`, or just write it; StoreError if the condition does not hold."""
    try:
        if isinstance(store, FsspecStore) and precondition is not None:
            await store.fs._pipe_file(f"{store.path}/{key}", data, **precondition)
        elif isinstance(store, ObjectStore) and precondition is not None:
            import obstore

            await obstore.put_async(store.store, key, data, **precondition)
        else:
            await put(store, key, data)
    except Exception as error:
        if precondition is None:
            raise
        # The condition holds, so it is no reason.
        if await condition(store, key) == precondition:
            # Some servers have no conditional writes, and say so: the mark is then written without.
            if getattr(error, "errno", None) != errno.ENOSYS and not isinstance(
                error, NotImplementedError
            ):
                raise
            await put(store, key, data)
        # Equal if an earlier try has written it, and its answer was lost.
        elif await get(store, key) != data:
            raise StoreError(
                f"another recorder writes to {store}: it was written to in the meantime"
            ) from error


async def listed(keys: Callable[..., AsyncIterator[str]], *prefix: str) -> list[str]:
    """List keys of a store. Some stores look for a running event loop when they are asked, so it is done in one."""
    return [key async for key in keys(*prefix)]


@dataclass(frozen=True)
class Place:
    """A store to read from, the directory it is in if it is in one, and its name for messages."""

    store: Store
    directory: Path | None
    name: str
    writable: bool = True

    def root(self) -> bytes | None:
        """Read the root ``zarr.json``; None if nothing is there, StoreError if something is, and no group of zarr 3."""
        if self.directory is not None and not self.directory.is_dir():
            if self.directory.exists():
                raise self.something_else("a file")
            return None
        text = run(get(self.store, ROOT))
        if text is None:
            names = run(listed(self.store.list_dir, ""))
            if names and UNFINISHED not in names:
                raise self.something_else(str(sorted(names)[:3]))
        elif len(text) > ROOT_BYTES:
            raise self.something_else(f"a {ROOT} of more than {ROOT_BYTES} bytes")
        return text

    def something_else(self, content: str) -> StoreError:
        """Return the error for a place that holds no recording."""
        advice = (
            "choose another path"
            if self.writable
            else "tcnn_probe.open reads what tcnn_probe.record wrote"
        )
        return StoreError(
            f"{self.name} holds something else than a recording ({content}): {advice}"
        )

    def check_writable(self, *, continued: bool) -> None:
        """Refuse a directory that cannot be written, or made, as far as this shows without a try: StoreError.

        Args:
            continued: Whether marks are added to the recording that is there. Otherwise the first mark fills a folder
                beside the directory, which then takes its place.
        """
        if self.directory is None:
            return
        folders = (self.directory, *self.directory.parents)
        folder = next(folder for folder in folders if folder.exists())
        if not folder.is_dir():
            raise StoreError(
                f"{self.directory} cannot be made: the file {folder} stands in its way"
            )
        written = [folder]
        if folder == self.directory and not continued:
            # It could not be renamed.
            if os.path.ismount(folder):
                raise StoreError(
                    f"{self.directory} is where a disk is mounted: choose a path inside it"
                )
            written.append(folder.parent)
        for folder in written:
            if not os.access(folder, os.W_OK | os.X_OK):
                raise StoreError(
                    f"{self.directory} cannot be written: no permission to write in {folder}"
                )


def find(target: Target, *, writable: bool = True) -> Place:
    """Return the place of a target: None is memory, a string with "://" a URL, other strings are paths.

    StoreError for an empty path, a URL or store that cannot be opened, a store that cannot be written.
    """
    if target is None:
        return Place(MemoryStore(), None, "memory")
    # A directory of zarr's gets the lock, the durable writes and the checks of a path.
    if type(target) is LocalStore and not (writable and target.read_only):
        target = target.root
    if isinstance(target, Store):
        try:
            run(target._ensure_open())
        except _ZIP_ERRORS as error:
            raise StoreError(f"{target} cannot be opened: {error}") from error
        if writable and (
            target.read_only or not (target.supports_writes and target.supports_listing)
        ):
            raise StoreError(
                f"expected a store that can be written and listed, got {target}"
            )
        return Place(target, None, str(target), writable)
    text = os.fspath(target)
    if text.startswith("file://"):
        text = url2pathname(urlsplit(text).path)
    elif "://" in text:
        return Place(_at_url(text), None, text, writable)
    if not text:
        raise StoreError(
            "expected the path of a directory, got an empty path; None keeps the recording in memory"
        )
    # The working directory may change while recording.
    directory = Path(text).expanduser().resolve()
    return Place(Folder(directory), directory, str(directory), writable)


def _at_url(url: str) -> Store:
    try:
        return FsspecStore.from_url(url)
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"{url} cannot be opened ({error}): URLs need the package fsspec and, for most protocols, one more, such "
            f"as s3fs for s3:// or gcsfs for gs://; a zarr store object can be given instead"
        ) from error
