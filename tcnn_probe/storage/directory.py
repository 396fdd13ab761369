"""Recordings in directories: durable writes, a lock for one writer, and atomic creation and replacement."""

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

# Links could lead out of the recording, and opening a FIFO would block. Windows lacks these flags.
_SAFELY = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
_HERE = -100  # AT_FDCWD


class Folder(WrapperStore[LocalStore]):
    """Directory store whose ``set`` returns only when the complete object is on the disk under its name.

    With zarr's own store, the operating system may write data to the disk half a minute later. The directory is never
    created here: if it does not exist, ``set`` raises FileNotFoundError. Only regular files are read and written, and
    links are not followed; StoreError if anything else has the name of an object.
    """

    def __init__(self, root: Path, *, read_only: bool = True) -> None:
        super().__init__(LocalStore(root, read_only=read_only))
        self._store._is_open = True  # opening would create the directory
        self.root = root
        self._folders = set[Path]()  # folders that are known to be no links

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
        """Read an object or a part of it; None if it does not exist."""
        data = await asyncio.to_thread(self._read, self.root / key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object to a temporary file, rename it, and wait until it and its new folders are on the disk."""
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
        # The temporary name is fixed, so that a killed run's file is overwritten.
        partial = path.with_name(f".{path.name}.partial")
        try:
            with os.fdopen(_new_file(partial), "wb") as file:
                file.write(data)
                file.flush()
                # Without fsync before the renaming, a loss of power could leave a renamed file without its bytes.
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        for folder in changed:
            # A new name is on the disk once its folder is.
            _sync_folder(folder)

    def _check_folder(self, folder: Path) -> None:
        """Raise StoreError if a folder of the path is a link."""
        if folder not in self._folders:
            # Results are cached, because realpath checks every parent, and there are many chunks.
            if os.path.realpath(folder) != str(folder):
                raise StoreError(f"expected folders on the way to {folder}, got a link")
            self._folders.add(folder)


class Lock:
    """Lock of a directory for one writer. The system releases it when the process ends, in whatever way.

    A file in the directory names the holder; releasing the lock deletes it. Forked processes do not inherit the lock.
    StoreError if another recorder holds it, or if the directory does not exist.
    """

    def __init__(self, folder: Path, name: str) -> None:
        import fcntl  # missing on Windows, where recordings can only be read

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
                    pass  # the file system has no locks; commits of another recorder are noticed nevertheless
                if _is_same(self._paths[0], self._file):
                    if writable:
                        break
                    # A killed process of another user has left this file, which we cannot write but may delete.
                    self._paths[0].unlink()
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)  # the former holder has deleted the file meanwhile
        self._free = weakref.finalize(self, _free, self._paths, self._file)
        _held.add(self)
        os.ftruncate(self._file, 0)
        since = datetime.now().isoformat(" ", "seconds")
        os.write(self._file, f"process {os.getpid()} since {since}".encode())

    @property
    def held(self) -> bool:
        """True until the lock is released, in the process that took it."""
        return self._free.alive

    def release(self) -> None:
        """Release the lock. This may be called more than once."""
        self._free()

    def moved(self, folder: Path) -> None:
        """Update the path of the lock after the directory was renamed."""
        self._paths[0] = folder / LOCK

    def forget(self) -> None:
        """Leave the lock to the parent process, in a forked one."""
        if self._free.detach():
            os.close(self._file)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _free(paths: list[Path], file: int) -> None:
    try:
        # The file is deleted while the lock is held, because afterwards it could belong to the next holder.
        if _is_same(paths[0], file):
            paths[0].unlink()
    finally:
        os.close(file)


def _forget_all() -> None:
    # The set is copied, because locks may be garbage-collected during the loop.
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def new_directory(
    directory: Path, *, replace: bool = False
) -> Iterator[tuple[Folder, Lock]]:
    """Create a directory under a temporary name, and rename it atomically at the end, with its lock still held.

    After an exception everything is as before. A kill leaves a folder beside the directory, which the next attempt
    deletes.

    Args:
        directory: Final path of the directory.
        replace: Whether to exchange it with the existing directory of this path, which remains under the temporary name
            for :func:`delete_unfinished`.

    Raises:
        StoreError: Another recorder has created the directory meanwhile, or writes to the one to be replaced.
    """
    missing = [folder for folder in directory.parents if not folder.exists()]
    filled = _unfinished(directory)
    # The lock comes first, so that nothing is created beside a recording that is being written.
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
        # The new recording is not announced yet, so the old one is restored.
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
            # The old directory is replaced by now or unchanged, so the mark must not fail because of its lock file.
            with suppress(OSError):
                old.release()


def delete_unfinished(directory: Path) -> None:
    """Delete temporary folders of killed runs that were creating or replacing this directory."""
    replaced = _beside(directory, "old") if directory.exists() else []
    for folder in _beside(directory, "init") + replaced:
        with suppress(StoreError, OSError):  # the run that fills the folder is alive
            # The lock is released first: some network file systems keep a name for a deleted file while it is open, so
            # that its folder could not be deleted.
            Lock(folder, folder.name).release()
            shutil.rmtree(folder, ignore_errors=True)


def restore(directory: Path) -> None:
    """Restore a directory that a killed run has renamed, on systems that cannot exchange directories atomically."""
    for folder in () if directory.exists() else _beside(directory, "old"):
        with suppress(StoreError, OSError):  # another run is replacing it now
            lock = Lock(folder, folder.name)
            _rename(folder, directory)
            lock.moved(directory)
            lock.release()


def entries(directory: Path) -> Iterator[tuple[str, bool]]:
    """Yield all paths in a directory, each with whether it is a regular file or a folder."""
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            yield (
                path.relative_to(directory).as_posix(),
                stat.S_ISREG(mode) or stat.S_ISDIR(mode),
            )


def _open_file(path: Path, flags: int) -> int:
    """Open a regular file that is not a link; StoreError for something else, IsADirectoryError for a folder."""
    try:
        # The user's umask applies to the mode, as in open().
        descriptor = os.open(path, flags | _SAFELY, 0o666)
    except OSError as error:
        # ELOOP is raised for a link, and ENXIO for a socket or a FIFO without a reader.
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
    """Create a file. An existing one is deleted, not overwritten, because it may be a link or have a second name."""
    while True:
        try:
            return _open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            path.unlink(missing_ok=True)


def _open_lock(path: Path, name: str) -> tuple[int, bool]:
    """Open or create the file of a lock; return it with whether it can be written."""
    try:
        try:
            file, writable = _open_file(path, os.O_RDWR | os.O_CREAT), True
        except PermissionError:
            file, writable = _open_file(path, os.O_RDONLY), False
    except FileNotFoundError as error:
        raise StoreError(
            f"{name} was deleted or moved while it was recorded"
        ) from error
    # The holder's name, which is written to the file, would appear in the linked file.
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
        # The target is a folder with files; an empty folder would be replaced. Systems report either number.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise StoreError(
            f"another recorder writes here: {directory.name} was created in the meantime"
        ) from error


def _exchange(new: Path, old: Path) -> None:
    """Exchange the names of two directories, atomically where possible (on Linux, except on network disks)."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2") and not libc.renameat2(
        _HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE
    ):
        return
    # Otherwise this takes three steps; a run that is killed between them leaves a name that `restore` recognises.
    temporary = old.with_name(f"{new.name.removesuffix('.init')}.old")
    os.replace(old, temporary)
    try:
        os.replace(new, old)
    except BaseException:
        os.replace(temporary, old)
        raise
    os.replace(temporary, new)


def _unfinished(directory: Path) -> Path:
    """Return a new temporary path beside a directory, for the directory that will replace it."""
    return directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.init")


def _beside(directory: Path, suffix: str) -> list[Path]:
    """Return the temporary folders of a directory's runs, which lie beside it."""
    pattern = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{32}}\.{suffix}")
    try:
        folders = [
            folder
            for folder in directory.parent.iterdir()
            if pattern.fullmatch(folder.name)
        ]
        return [folder for folder in folders if not folder.is_symlink()]
    except OSError:  # the parent does not exist, or cannot be listed
        return []


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
