"""Recordings in directories: durable writes, a lock, creation and replacement by renaming."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from zarr.abc.buffer import Buffer
from zarr.storage import LocalStore

from tcnn_model.durable_files import sync_folder, write_file
from tcnn_probe.schema import StoreError

__all__ = ["DurableStore", "delete_unfinished", "new_directory", "release", "restore", "take_lock"]


class DurableStore(LocalStore):
    """Directory store whose ``set`` returns only when the object is on the disk under its name.

    zarr's own store leaves this to the operating system, which may take half a minute.
    """

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self._is_open = True  # opening would create the directory

    async def set(self, key: str, value: Buffer, *args: Any) -> None:
        """Write an object durably: a temporary file is renamed, and new folders are on the disk."""
        self._check_writable()
        await asyncio.to_thread(self._write, self.root / key, value.to_bytes())

    def _write(self, path: Path, data: bytes) -> None:
        # Through a linked folder the file would be written outside the recording.
        if os.path.realpath(path.parent) != str(path.parent):
            raise StoreError(
                f"expected folders on the way to {path}, got a link: it is not followed"
            )
        make_folder(path.parent, self.root)
        write_file(path, lambda file: file.write(data))


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Create a folder and those around it, and wait until their names are on the disk.

    The folder ``root`` is not created: a recording that was deleted meanwhile is not begun again.
    """
    if folder != root and not folder.is_dir():
        make_folder(folder.parent, root)
        folder.mkdir(exist_ok=True)  # other chunks are written at the same time
        sync_folder(folder.parent)


def take_lock(directory: Path) -> FileLock:
    """Take the lock of a directory, which may not exist yet; it ends with the process.

    It lies beside the directory, and so outlasts a replacement. Forked processes do not inherit it.
    StoreError if another recorder holds it.
    """
    make_folder(directory.parent)
    held = FileLock(_beside(directory, "lock"), timeout=0, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        raise StoreError(
            f"{directory} is being written by another recorder: end it first, with remove() or "
            "with its process"
        ) from None
    return held


def release(held: FileLock) -> None:
    """Release a lock; in a forked process, which does not hold it, do nothing."""
    if held.is_locked:
        # Deleted while it is held, because afterwards it could belong to the next holder.
        with suppress(OSError):
            Path(held.lock_file).unlink()
        held.release()


@contextmanager
def new_directory(directory: Path, *, replace: bool) -> Iterator[DurableStore]:
    """Create a directory, whose lock is held, under a temporary name and rename it at the end.

    After an exception the directory is as before. A kill leaves a folder beside it, which
    :func:`delete_unfinished` deletes; if it comes between the two renamings of a replacement,
    :func:`restore` renames the old directory back.
    """
    filled, replaced = _beside(directory, "init"), _beside(directory, "old")
    filled.mkdir()
    try:
        yield DurableStore(filled)
        if replace and directory.exists():
            os.replace(directory, replaced)
        os.replace(filled, directory)
        filled = directory
        sync_folder(directory.parent)
    except BaseException:
        # The new recording is not announced yet, so the old one is restored.
        shutil.rmtree(filled, ignore_errors=True)
        if replaced.exists():
            os.replace(replaced, directory)
        raise
    delete_unfinished(directory)


def delete_unfinished(directory: Path) -> None:
    """Delete what killed runs that were creating or replacing this directory left beside it.

    The lock is held, and :func:`restore` has been called.
    """
    for name in ("init", "old"):
        shutil.rmtree(_beside(directory, name), ignore_errors=True)


def restore(directory: Path) -> None:
    """Rename a directory back that a killed run was replacing.

    StoreError if another recorder is replacing it now.
    """
    replaced = _beside(directory, "old")
    if replaced.exists() and not directory.exists():
        held = take_lock(directory)
        try:
            os.replace(replaced, directory)
        finally:
            release(held)


def _beside(directory: Path, name: str) -> Path:
    return directory.with_name(f".{directory.name}.tcnn_probe.{name}")
