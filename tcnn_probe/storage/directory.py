"""Recordings in directories: durable writes,
a lock for one writer, and creation and replacement by renaming.
"""

import asyncio
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from zarr.abc.buffer import Buffer
from zarr.storage import LocalStore

from tcnn_probe.schema import StoreError

__all__ = [
    "LOCK",
    "DurableStore",
    "delete_unfinished",
    "lock",
    "new_directory",
    "restore",
]

LOCK = ".tcnn_probe.lock"


class DurableStore(LocalStore):
    """Directory store whose ``set`` returns only when the object is on the disk under its name.

    zarr's own store leaves this to the operating system, which may take half a minute. The
    directory itself is never created here, so that a mark fails if it was deleted meanwhile.
    """

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self._is_open = True  # opening would create the directory

    async def set(self, key: str, value: Buffer, *args: Any) -> None:
        """Write an object to a temporary file, rename it,
        and wait until it and its new folders are on the disk.
        """
        self._check_writable()
        await asyncio.to_thread(self._write, self.root / key, value.to_bytes())

    def _write(self, path: Path, data: bytes) -> None:
        changed = {path.parent}
        for folder in () if path.parent.is_dir() else reversed(path.parents):
            if self.root in folder.parents:
                with suppress(FileExistsError):
                    folder.mkdir()
                    changed.add(folder.parent)
        # Through a linked folder the file would be written outside the recording.
        if os.path.realpath(path.parent) != str(path.parent):
            raise StoreError(
                f"expected folders on the way to {path}, got a link: it is not followed"
            )
        write_file(path, data)
        for folder in changed:
            # A new name is on the disk once its folder is.
            sync_folder(folder)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file in one step: after a kill or a loss of power it has either content whole."""
    # The name is fixed, so that the file of a killed run is overwritten.
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # it may be a link
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            # Without fsync before the renaming, a loss of power could leave a renamed file without
            # its bytes.
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def lock(directory: Path, name: str) -> FileLock:
    """Take the lock of a directory for one writer;
    the system releases it when the process ends, in whatever way.

    StoreError if another recorder holds it. Forked processes do not inherit it.
    """
    held = FileLock(directory / LOCK, timeout=0, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        raise StoreError(f"{name} is being written by another recorder: one at a time") from None
    return held


@contextmanager
def new_directory(
    directory: Path, *, replace: bool = False
) -> Iterator[tuple[DurableStore, FileLock]]:
    """Create a directory under a temporary name and rename it at the end, with its lock still held.

    After an exception the directory is as before. A kill leaves a folder beside it, which the next
    attempt deletes; if it comes between the two renamings of a replacement, :func:`restore` renames
    the old directory back.

    Args:
        directory: Final path of the directory.
        replace: Whether to replace the existing directory of this path.

    Raises:
        StoreError: Another recorder has created the directory meanwhile, or writes to the one to be
            replaced.
    """
    missing = [folder for folder in directory.parents if not folder.exists()]
    filled = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.init")
    replaced = filled.with_suffix(".old")
    # The lock comes first, so that nothing is created beside a recording that is being written.
    old = lock(directory, directory.name) if replace else None
    new: FileLock | None = None
    try:
        delete_unfinished(directory)
        filled.mkdir(parents=True)
        new = lock(filled, directory.name)
        yield DurableStore(filled), new
        if old is not None:
            os.replace(directory, replaced)
        try:
            os.replace(filled, directory)
        except OSError as error:
            raise StoreError(
                f"another recorder writes here: {directory.name} was created in the meantime"
            ) from error
        filled = directory
        for folder in (directory, *missing):
            sync_folder(folder.parent)
    except BaseException:
        # The new recording is not announced yet, so the old one is restored.
        if new is not None:
            new.release()
        shutil.rmtree(filled, ignore_errors=True)
        if replaced.exists():
            os.replace(replaced, directory)
        raise
    finally:
        if old is not None:
            old.release()
    delete_unfinished(directory)


def delete_unfinished(directory: Path) -> None:
    """Delete temporary folders of killed runs that were creating or replacing this directory."""
    replaced = _beside(directory, "old") if directory.exists() else []
    for folder in [*_beside(directory, "init"), *replaced]:
        with suppress(StoreError, OSError):  # the run that fills the folder is alive
            lock(folder, folder.name).release()
            shutil.rmtree(folder, ignore_errors=True)


def restore(directory: Path) -> None:
    """Rename a directory back that a killed run was replacing."""
    for folder in () if directory.exists() else _beside(directory, "old"):
        with suppress(StoreError, OSError):  # another run is replacing it now
            held = lock(folder, folder.name)
            os.replace(folder, directory)
            held.release()


def _beside(directory: Path, suffix: str) -> list[Path]:
    """Return the temporary folders of a directory's runs, which lie beside it."""
    pattern = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{32}}\.{suffix}")
    try:
        folders = [*directory.parent.iterdir()]
    except OSError:  # the parent does not exist, or cannot be listed
        return []
    return [folder for folder in folders if pattern.fullmatch(folder.name)]
