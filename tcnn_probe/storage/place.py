"""Places of recordings (memory, a directory, a URL or a zarr store), with reading and writing of single objects."""

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

# zarr's own event loop is used, because the connections of a remote store belong to the loop in which zarr reads.
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

# A root describes a few hundred arrays with about a kilobyte each. The limit keeps a crafted root from filling the
# memory.
ROOT_BYTES = 16 * 2**20


# Errors that zipfile raises for damaged files.
_ZIP_ERRORS = (BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in zarr's thread. After Ctrl-C, wait until it has ended, so that nothing is written later."""
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


def in_zarr_thread() -> bool:
    """Return whether this is zarr's own thread, in which :func:`run` cannot wait."""
    try:
        return asyncio.get_running_loop() is _get_loop()
    except RuntimeError:  # no loop is running in this thread
        return False


async def get(store: Store, key: str) -> bytes | None:
    """Read an object, up to one byte more than a root may have; None if it does not exist."""
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
        limit: Largest number of bytes to read of a whole object, as files may be larger than they should be. It does
            not apply to servers, which differ in their treatment of ranges beyond the end of an object.
        byte_range: Part of the object; None for all of it.
        prototype: Type of buffer to return.
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
    """Return arguments for a write that fails if the object has changed; None if the store has no conditional writes.

    S3 has them through s3fs (``If-Match``), and so have the stores of obstore that support them.
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
        # In both libraries such a write fails if the object exists by then.
        return {"mode": "create"}
    return None


async def put_if(
    store: Store, key: str, data: bytes, precondition: dict[str, Any] | None
) -> None:
    """Write an object, if given under a :func:`condition`; StoreError if the condition does not hold."""
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
        # If the condition still holds, the write has failed for another reason.
        if await condition(store, key) == precondition:
            # Some servers report that they have no conditional writes: the object is then written without a condition.
            if getattr(error, "errno", None) != errno.ENOSYS and not isinstance(
                error, NotImplementedError
            ):
                raise
            await put(store, key, data)
        # The data are equal if an earlier attempt has written them, and its response was lost.
        elif await get(store, key) != data:
            raise StoreError(
                f"another recorder writes to {store}: it was written to in the meantime"
            ) from error


async def listed(keys: Callable[..., AsyncIterator[str]], *prefix: str) -> list[str]:
    """List keys of a store, in a coroutine, because some stores need a running event loop."""
    return [key async for key in keys(*prefix)]


@dataclass(frozen=True)
class Place:
    """A store to read from, its directory if it has one, and its name for messages."""

    store: Store
    directory: Path | None
    name: str
    writable: bool = True

    def root(self) -> bytes | None:
        """Read the root ``zarr.json``; None if the place is empty or unfinished, StoreError if it has other files."""
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
        """Return the error for a place that holds something else than a recording."""
        advice = (
            "choose another path"
            if self.writable
            else "tcnn_probe.open reads what tcnn_probe.record wrote"
        )
        return StoreError(
            f"{self.name} holds something else than a recording ({content}): {advice}"
        )

    def check_writable(self, *, continued: bool) -> None:
        """Raise StoreError if a directory evidently cannot be written or created; nothing is written for this check.

        Args:
            continued: Whether marks are added to an existing recording. Otherwise the first mark is written to a folder
                beside the directory, which then replaces it.
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
            # A mount point cannot be renamed.
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
    """Return the place of a target: memory for None, a URL for a string with "://", a path for other strings.

    StoreError for an empty path, for a URL or store that cannot be opened, and for a store that cannot be written.
    """
    if target is None:
        return Place(MemoryStore(), None, "memory")
    # A LocalStore of zarr is treated as a path, with its lock, durable writes and checks.
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
    # The path is made absolute, because the working directory may change while recording.
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
