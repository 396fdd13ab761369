"""Recordings in directories: objects that survive a loss of power, one writer, creation and replacement in one step."""

import asyncio
import ctypes
import errno
import os
import re
import shutil
import stat
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    SuffixByteRequest,
)
from zarr.storage import LocalStore, WrapperStore

from tcnn_probe.schema import StoreError

__all__ = [
    "LOCK",
    "Folder",
    "Lock",
    "delete_unfinished",
    "entries",
    "new_directory",
    "restore",
]

LOCK = ".tcnn_probe.lock"

# Links would lead out of the recording, and opening a FIFO would wait for its other end. Windows has no such flags.
_SAFELY = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
_HERE = -100  # AT_FDCWD


class Folder(WrapperStore[LocalStore]):
    """A directory in which an object is on the disk, whole and under its name, when ``set`` returns.

    zarr's own store leaves it to the system when data reach the disk, which may be half a minute later. The directory
    is never made here: if it is gone, ``set`` raises FileNotFoundError. Only regular files are read and written, and
    no link is followed; StoreError for anything else under the name of an object.
    """

    def __init__(self, root: Path, *, read_only: bool = True) -> None:
        super().__init__(LocalStore(root, read_only=read_only))
        self._store._is_open = True  # opening would make the directory
        self.root = root
        self._folders = set[Path]()  # without a link among them

    def _with_store(self, store: LocalStore) -> Self:
        return type(self)(store.root, read_only=store.read_only)

    def __str__(self) -> str:
        return str(self._store)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Read an object or a part of it, None if it is not there."""
        data = await asyncio.to_thread(self._read, self.root / key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object to a temporary name, rename it, and wait until the disk has it and its new folders."""
        await asyncio.to_thread(self._write, self.root / key, value.to_bytes())

    def _read(self, path: Path, byte_range: ByteRequest | None) -> bytes | None:
        try:
            descriptor = _open_file(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        with os.fdopen(descriptor, "rb") as file:
            self._check_folder(path.parent)
            size = os.fstat(descriptor).st_size
            if isinstance(byte_range, RangeByteRequest):
                file.seek(byte_range.start)
                return file.read(max(0, min(byte_range.end, size) - byte_range.start))
            if isinstance(byte_range, OffsetByteRequest):
                file.seek(byte_range.offset)
            elif isinstance(byte_range, SuffixByteRequest):
                file.seek(max(0, size - byte_range.suffix))
            return file.read()

    def _write(self, path: Path, data: bytes) -> None:
        self._check_folder(path.parent)
        changed = {path.parent}
        for folder in () if path.parent.is_dir() else reversed(path.parents):
            if self.root in folder.parents:
                with suppress(FileExistsError):
                    folder.mkdir()
                    changed.add(folder.parent)
        # A fixed name, so that a killed run's is written over.
        partial = path.with_name(f".{path.name}.partial")
        try:
            with os.fdopen(_new_file(partial), "wb") as file:
                file.write(data)
                file.flush()
                # Flushed before the renaming: else a loss of power could leave the name on a file without its bytes.
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        for folder in changed:
            # A new name is on the disk when the folder that holds it is.
            _sync_folder(folder)

    def _check_folder(self, folder: Path) -> None:
        """Refuse a path with a link among its folders: StoreError."""
        if folder not in self._folders:
            # Once for each folder, as it looks at every one on the way, and chunks are many.
            if os.path.realpath(folder) != str(folder):
                raise StoreError(f"expected folders on the way to {folder}, got a link")
            self._folders.add(folder)


class Lock:
    """The right to write to a directory. The system frees it when its process ends, however that comes.

    A file in the directory names the holder; it goes when the lock is released. Forked processes do not inherit it.
    StoreError if another recorder holds it, or the directory is gone.
    """

    def __init__(self, folder: Path, name: str) -> None:
        import fcntl  # not on Windows, where recordings can be read

        self._paths = [folder / LOCK]
        while True:
            self._file, writable = _open_lock(self._paths[0], name)
            try:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holder = (
                        os.read(self._file, 1000).decode(errors="replace")
                        or "another recorder"
                    )
                    raise StoreError(
                        f"{name} is being written by {holder}: one recorder at a time"
                    ) from None
                except OSError:
                    pass  # a file system without locks: what another recorder commits is noticed all the same
                if _is_same(self._paths[0], self._file):
                    if writable:
                        break
                    # Left by a process of another user that was killed: the file is not ours to write, the folder is.
                    self._paths[0].unlink()
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)  # its former holder deleted it meanwhile
        self._free = weakref.finalize(self, _free, self._paths, self._file)
        _held.add(self)
        os.ftruncate(self._file, 0)
        since = datetime.now().isoformat(" ", "seconds")
        os.write(self._file, f"process {os.getpid()} since {since}".encode())

    @property
    def held(self) -> bool:
        """True until it is released, and in the process that took it."""
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
    try:
        # Deleted while the lock is held: afterwards the file could be that of the next holder.
        if _is_same(paths[0], file):
            paths[0].unlink()
    finally:
        os.close(file)


def _forget_all() -> None:
    # A list, as locks that are collected meanwhile leave the set.
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def new_directory(
    directory: Path, *, replace: bool = False
) -> Iterator[tuple[Folder, Lock]]:
    """Fill a directory under another name; it gets its own at the end, in one step, with the lock still held.

    After an exception everything is as before; after a kill a folder is left beside it, which the next attempt deletes.

    Args:
        directory: Path that the directory gets.
        replace: Exchange it with the directory that has this path, which is then left for :func:`delete_unfinished`.

    Raises:
        StoreError: somebody else has made the directory meanwhile, or writes to the one that is to be replaced.
    """
    missing = [folder for folder in directory.parents if not folder.exists()]
    filled = _unfinished(directory)
    # First of all, so that nothing is made beside a recording that somebody is writing.
    old = Lock(directory, directory.name) if replace else None
    lock: Lock | None = None
    exchanged = False
    try:
        delete_unfinished(directory)
        filled.mkdir(parents=True)
        lock = Lock(filled, directory.name)
        yield Folder(filled, read_only=False), lock
        if old is not None:
            _exchange(filled, directory)
            exchanged = True
            old.moved(filled)
        else:
            _rename(filled, directory)
            filled = directory
        lock.moved(directory)
        for folder in (directory, *missing):
            _sync_folder(folder.parent)
    except BaseException:
        # It is not announced yet, so the old recording is the one that counts.
        if exchanged and old is not None:
            _exchange(filled, directory)
            old.moved(directory)
        shutil.rmtree(filled, ignore_errors=True)
        if lock is not None:
            lock.moved(filled)
            lock.release()
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise
    finally:
        if old is not None:
            # Its directory is replaced already, or stays as it was: the mark is not to fail for a file beside it.
            with suppress(OSError):
                old.release()


def delete_unfinished(directory: Path) -> None:
    """Delete folders that killed runs filled to become this directory, and those that such folders have replaced."""
    replaced = _beside(directory, "old") if directory.exists() else []
    for folder in _beside(directory, "init") + replaced:
        with suppress(StoreError, OSError):  # its maker lives
            # Released first: some network file systems keep a name for a deleted file that is open, and so its folder.
            Lock(folder, folder.name).release()
            shutil.rmtree(folder, ignore_errors=True)


def restore(directory: Path) -> None:
    """Put a directory back that a killed run had renamed, where two directories cannot be exchanged in one step."""
    for folder in () if directory.exists() else _beside(directory, "old"):
        with suppress(StoreError, OSError):  # it is being replaced now
            lock = Lock(folder, folder.name)
            _rename(folder, directory)
            lock.moved(directory)
            lock.release()


def entries(directory: Path) -> Iterator[tuple[str, bool]]:
    """Yield the path of everything in a directory, and whether it is a regular file or a folder."""
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            yield (
                path.relative_to(directory).as_posix(),
                stat.S_ISREG(mode) or stat.S_ISDIR(mode),
            )


def _open_file(path: Path, flags: int) -> int:
    """Open a regular file that is no link; StoreError for something else, IsADirectoryError for a folder."""
    try:
        # The mode is less the user's umask, as that of open().
        descriptor = os.open(path, flags | _SAFELY, 0o666)
    except OSError as error:
        # ELOOP for a link; ENXIO for a socket, or a FIFO that nobody reads.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise StoreError(
                f"expected a regular file at {path}, got a link or a pipe"
            ) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise StoreError(f"expected a regular file at {path}, got a pipe or a device")


def _new_file(path: Path) -> int:
    """Make a file; what has its name is deleted, and not written to: it may be a link, or have a second name."""
    while True:
        try:
            return _open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            path.unlink(missing_ok=True)


def _open_lock(path: Path, name: str) -> tuple[int, bool]:
    """Open or make the file of a lock, and say whether it can be written."""
    try:
        try:
            file, writable = _open_file(path, os.O_RDWR | os.O_CREAT), True
        except PermissionError:
            file, writable = _open_file(path, os.O_RDONLY), False
    except FileNotFoundError as error:
        raise StoreError(
            f"{name} was deleted or moved while it was recorded"
        ) from error
    # The name of the holder is written to it, and would end in the other file.
    if os.fstat(file).st_nlink > 1:
        os.close(file)
        raise StoreError(
            f"{name} has a lock that is a hard link to another file, {path}: delete it"
        )
    return file, writable


def _is_same(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _rename(folder: Path, directory: Path) -> None:
    try:
        os.replace(folder, directory)
    except OSError as error:
        # A folder with files in its place: an empty one is replaced. Systems report either number.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise StoreError(
            f"another recorder writes here: {directory.name} was created in the meantime"
        ) from error


def _exchange(new: Path, old: Path) -> None:
    """Exchange the names of two directories, in one step where the system can: Linux, but not on network disks."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2") and not libc.renameat2(
        _HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE
    ):
        return
    # In three steps otherwise; a run that is killed between them leaves a name that `restore` knows.
    temporary = old.with_name(f"{new.name.removesuffix('.init')}.old")
    os.replace(old, temporary)
    try:
        os.replace(new, old)
    except BaseException:
        os.replace(temporary, old)
        raise
    os.replace(temporary, new)


def _unfinished(directory: Path) -> Path:
    """Return a new name beside a directory, of what is to become it."""
    return directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.init")


def _beside(directory: Path, suffix: str) -> list[Path]:
    """Return the folders beside a directory whose names are of its runs."""
    pattern = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{32}}\.{suffix}")
    try:
        folders = [
            folder
            for folder in directory.parent.iterdir()
            if pattern.fullmatch(folder.name)
        ]
        return [folder for folder in folders if not folder.is_symlink()]
    except OSError:  # the parent is not there, or cannot be listed
        return []


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
