"""Where a recording is kept: memory, a directory, a URL or a zarr store, and what is there now."""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.objects import Objects

__all__ = ["ROOT", "Place", "Target", "find"]

Target = None | str | os.PathLike[str] | Store

ROOT = "zarr.json"
_UNFINISHED = ".tcnn_probe.init"


@dataclass(frozen=True)
class Place:
    """A store, with the directory it is in if it was given as a path, and its name for messages."""

    objects: Objects
    directory: Path | None
    name: str

    def root(self) -> bytes | None:
        """The root ``zarr.json`` of what is here, None if nothing is.

        Raises:
            StoreError: something that is no zarr group of format 3.
        """
        if self.directory is not None and _is_vacant(self.directory):
            return None
        if self.directory is not None and not self.directory.is_dir():
            raise self.something_else("a file")
        text = self.objects.get(ROOT)
        if text is None and not self.objects.is_empty() and self.objects.get(_UNFINISHED) is None:
            raise self.something_else()
        return text

    def something_else(self, what: str | None = None) -> StoreError:
        """The error for a place that is taken."""
        what = str(self.objects.names("")[:3]) if what is None else what
        return StoreError(f"{self.name} holds something else than a recording ({what}): choose another path")

    def fill(self, objects: Mapping[str, bytes]) -> None:
        """Write a whole recording where there is nothing; killed meanwhile, there still is none."""
        if self.directory is not None:
            _fill_directory(self.directory, objects)
            return
        self.objects.clear()  # of a creation that was killed
        self.objects.put({_UNFINISHED: b""})
        self.objects.put({key: data for key, data in objects.items() if key != ROOT})
        self.objects.put({ROOT: objects[ROOT]})
        self.objects.delete([_UNFINISHED])

    def clear_partial(self) -> None:
        """Delete what a killed run had begun to write."""
        if isinstance(self.objects.store, LocalStore):
            for leftover in self.objects.store.root.rglob("*.partial"):
                leftover.unlink(missing_ok=True)
        if self.objects.get(_UNFINISHED) is not None:
            self.objects.delete([_UNFINISHED])


def find(target: Target, *, writable: bool = True) -> Place:
    """The place that a target means: None is memory, a string with "://" a URL, other strings are paths.

    Raises:
        StoreError: an empty path, a file in the way of a directory, a URL that cannot be opened, a store that cannot
            be written.
    """
    if target is None:
        return Place(Objects(MemoryStore()), None, "memory")
    if isinstance(target, Store):
        abilities = not target.read_only and target.supports_writes and target.supports_deletes
        if writable and not (abilities and target.supports_listing):
            raise StoreError(f"expected a store that can be written, listed and deleted from, got {target}")
        return Place(Objects(target), None, str(target))
    text = os.fspath(target)
    if text.startswith("file://"):
        text = url2pathname(urlsplit(text).path)
    elif "://" in text:
        return Place(Objects(_at_url(text)), None, text)
    if not text:
        raise StoreError("expected the path of a directory, got an empty one; None keeps the recording in memory")
    directory = Path(text).expanduser().resolve()  # the working directory may change while recording
    if any(parent.exists() and not parent.is_dir() for parent in directory.parents):
        raise _in_the_way(directory)
    return Place(Objects(LocalStore(directory)), directory, str(directory))


def _at_url(url: str) -> Store:
    try:
        return FsspecStore.from_url(url)
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"{url} cannot be opened ({error}): URLs need the package fsspec and, for most protocols, one more, such "
            f"as s3fs for s3:// or gcsfs for gs://; a zarr store object can be given instead"
        ) from error


def _is_vacant(directory: Path) -> bool:
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


def _in_the_way(directory: Path) -> StoreError:
    return StoreError(f"{directory} cannot be made: a file stands in its way")


def _fill_directory(directory: Path, objects: Mapping[str, bytes]) -> None:
    """Under another name first, then renamed."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise _in_the_way(directory) from error
    partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.init")
    try:
        Objects(LocalStore(partial)).put(objects)
        try:
            os.replace(partial, directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise StoreError(f"another recorder writes to this store: {directory.name} was made meanwhile") from error
    except BaseException:
        for pause in (0, 0.01, 0.1):  # interrupted from the keyboard, zarr's thread may still be writing
            time.sleep(pause)
            shutil.rmtree(partial, ignore_errors=True)
        raise
