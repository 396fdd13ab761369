"""Recordings in directories: objects that survive a loss of power, one writer, and creation in one step."""

import asyncio
import errno
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from zarr.abc.buffer import Buffer
from zarr.storage import LocalStore

from tcnn_probe.storage.errors import StoreError

__all__ = ["LOCK", "DurableStore", "Lock", "delete_directory", "new_directory"]

LOCK = ".tcnn_probe.lock"


class DurableStore(LocalStore):
    """A directory in which an object is on the disk, whole and under its name, when ``set`` returns.

    zarr's own store leaves it to the system when data reach the disk, which may be half a minute later. The directory
    is never made here: if it is gone, ``set`` raises FileNotFoundError.
    """

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self._is_open = True  # opening would make the directory

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object to a temporary name, rename it, and wait until the disk has it and its new folders."""
        await asyncio.to_thread(self._put, key, value.to_bytes())

    def _put(self, key: str, data: bytes) -> None:
        path = self.root / key
        changed = {path.parent}
        for folder in () if path.parent.is_dir() else reversed(path.parents):
            if self.root in folder.parents:
                with suppress(FileExistsError):
                    folder.mkdir()
                    changed.add(folder.parent)
        partial = path.with_name(f".{path.name}.partial")  # one name, so that a killed run's is written over
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        for folder in changed:
            _sync_folder(folder)


class Lock:
    """The right to write to a directory. The system frees it when its process ends, however that comes.

    A file in the directory names the holder; it goes when the lock is released. Forked processes do not inherit it.
    StoreError if another recorder holds it, or the directory is gone.
    """

    def __init__(self, folder: Path, name: str) -> None:
        import fcntl  # not on Windows, where recordings can be read

        self._paths = [folder / LOCK]
        while True:
            try:
                self._file = os.open(self._paths[0], os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError as error:
                raise StoreError(f"{name} was deleted or moved while it was recorded") from error
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self._file, 1000).decode(errors="replace") or "another recorder"
                os.close(self._file)
                raise StoreError(f"{name} is being written by {holder}: one recorder at a time") from None
            except OSError:
                pass  # a file system without locks: what another recorder commits is noticed all the same
            if _is_same(self._paths[0], self._file):
                break
            os.close(self._file)  # its former holder deleted it meanwhile
        self._free = weakref.finalize(self, _free, self._paths, self._file)
        _held.add(self)
        os.ftruncate(self._file, 0)
        since = datetime.now().isoformat(" ", "seconds")
        os.write(self._file, f"process {os.getpid()} since {since}".encode())

    @property
    def held(self) -> bool:
        """Whether it was not released, and this is not a forked process."""
        return self._free.alive

    def release(self) -> None:
        """Free it; may be called again."""
        self._free()

    def moved(self, folder: Path) -> None:
        """Take note that the directory has another name."""
        self._paths[0] = folder / LOCK

    def forget(self) -> None:
        """Leave it to the parent, in a forked process."""
        if self._free.detach():
            os.close(self._file)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _free(paths: list[Path], file: int) -> None:
    if _is_same(paths[0], file):
        paths[0].unlink()
    os.close(file)


def _is_same(path: Path, file: int) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file))


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def new_directory(directory: Path) -> Iterator[tuple[DurableStore, Lock]]:
    """Fill a directory under another name; it gets its own at the end, in one step, with the lock still held.

    After an exception there is nothing; after a kill a folder beside it, which the next attempt deletes. StoreError if
    somebody else has made it meanwhile.
    """
    made = [folder for folder in directory.parents if not folder.exists()]
    there = _unfinished(directory)
    lock: Lock | None = None
    try:
        _delete_unfinished(directory)
        there.mkdir(parents=True)
        lock = Lock(there, directory.name)
        yield DurableStore(there), lock
        try:
            os.replace(there, directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise StoreError(f"another recorder writes here: {directory.name} was made meanwhile") from error
        there = directory
        lock.moved(directory)
        for folder in (directory, *made):
            _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(there, ignore_errors=True)
        if lock is not None:
            lock.release()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def delete_directory(directory: Path) -> None:
    """Delete a recording, in one step for whoever looks: under another name first, as of a run that was killed.

    StoreError if another recorder writes to it.
    """
    if directory.exists():
        lock = Lock(directory, directory.name)
        unwanted = _unfinished(directory)
        try:
            directory.rename(unwanted)
            lock.moved(unwanted)
            shutil.rmtree(unwanted)
        finally:
            lock.release()


def _unfinished(directory: Path) -> Path:
    """A name beside it, new each time, of what is to be made or deleted."""
    return directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.init")


def _delete_unfinished(directory: Path) -> None:
    """Delete what killed runs left of their attempts to make this directory."""
    with suppress(OSError):  # as when the parent cannot be listed
        for folder in directory.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{32}}\.init", folder.name):
                with suppress(StoreError):  # its maker lives
                    lock = Lock(folder, folder.name)
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.release()


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
