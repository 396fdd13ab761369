"""Store of a recording: chunks that are read must be there, and the root is written last."""

from collections.abc import Mapping
from typing import Any, Self

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.buffer import default_buffer_prototype
from zarr.storage import LocalStore, WrapperStore

from tcnn_probe.schema import StoreError
from tcnn_probe.storage.place import ROOT

__all__ = ["CheckedStore"]


class CheckedStore(WrapperStore[Store]):
    """Store in which a missing chunk raises StoreError, and ``commit`` replaces the root.

    zarr itself checks the checksums of chunks, but takes a missing chunk for fill values. In a
    directory, StoreError is also raised once the recording was replaced by another one, instead of
    mixing the two.

    Args:
        store: Store of the recording.
        documents: Metadata of all arrays as committed, by path.
        identity: Text that only the root of this recording has; "" while it is written, under its
            lock.
    """

    def __init__(self, store: Store, documents: Mapping[str, Any], identity: str = "") -> None:
        super().__init__(store)
        self._documents = documents
        self._identity = identity
        self._root: Buffer | None = None  # not committed yet
        self._compared: tuple[int, ...] | None = None
        # Recordings have no such attribute. xarray adds it to copies, in which it leaves out chunks
        # of fill values.
        self._is_copy = any(
            "_FillValue" in about.get("attributes", {}) for about in documents.values()
        )

    # zarr 3.4 would otherwise read from the inner store, without get().
    _supports_sync_io = False

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self._documents, self._identity)

    def __str__(self) -> str:
        return str(self._store)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Read an object, or a part of it."""
        prototype = prototype or default_buffer_prototype()
        if key == ROOT and self._root is not None:
            return self._root
        buffer = await self._store.get(key, prototype, byte_range)
        path, _, cell = key.rpartition("/c/")
        if path in self._documents and self._is_committed(path, cell):
            # This comes after the read, so that a recording that was replaced in between is
            # noticed.
            await self._check_identity()
            if (buffer is None or not len(buffer)) and not self._is_copy:
                raise StoreError(f"the chunk {key!r} in {self} is empty or not there")
        return buffer

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object; the root is kept until ``commit``."""
        if key == ROOT:
            self._root = value
        else:
            await self._store.set(key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Write an object, unless there is one, as zarr does with the groups around an array."""
        if await self.get(key) is None:
            await self.set(key, value)

    async def commit(self) -> None:
        """Write the root: until then no reader sees what was written before."""
        assert self._root is not None
        await self._store.set(ROOT, self._root)

    @property
    def text(self) -> bytes:
        """The root that ``commit`` writes."""
        assert self._root is not None
        return self._root.to_bytes()

    def _is_committed(self, path: str, cell: str) -> bool:
        """Return whether a chunk has values of a committed mark, so that it must be there."""
        document = self._documents[path]
        steps = document["chunk_grid"]["configuration"]["chunk_shape"]
        places = map(int, cell.split("/"))
        return all(
            place * step < size
            for place, step, size in zip(places, steps, document["shape"], strict=True)
        )

    async def _check_identity(self) -> None:
        if not self._identity or not isinstance(self._store, LocalStore):
            return
        try:
            status = (self._store.root / ROOT).stat()
            # Every mark and replacement creates a new file; inode numbers alone may be reused.
            state = status.st_ino, status.st_mtime_ns, status.st_size
        except OSError:
            state = None
        if state is None or state != self._compared:
            root = await self._store.get(ROOT, default_buffer_prototype())
            if root is None or self._identity.encode() not in root.to_bytes():
                raise StoreError(
                    f"{self} was deleted, or replaced by another recording: open it again"
                )
            self._compared = state
