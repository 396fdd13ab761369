"""The store of one recording, which is created or continued, extended mark by mark, read and closed."""

import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import xarray as xr
import zarr

from tcnn_probe.schema import Group, StoreError
from tcnn_probe.storage.commit import (
    GIVEN,
    HEADS,
    REPACKED,
    UNREADABLE,
    Root,
    all_of,
    check_names,
    check_replaceable,
    commit,
    documents_beside,
    is_name,
)
from tcnn_probe.storage.directory import (
    Folder,
    Lock,
    delete_unfinished,
    new_directory,
    restore,
)
from tcnn_probe.storage.place import (
    ROOT,
    UNFINISHED,
    Target,
    condition,
    find,
    get,
    listed,
    put,
    run,
)
from tcnn_probe.storage.reading import open_dataset, open_tree

__all__ = ["EpochStore", "Mode"]

Mark = int | float
Mode = Literal["a", "w", "x"]


class EpochStore:
    """Store of one recording, for one writer at a time.

    Creating the object only reads the place, and restores a directory that a killed run has renamed; nothing else
    changes before :meth:`hold` or :meth:`append`. The mode "a" continues an existing recording, "w" replaces it with
    the first mark, and "x" raises an error. StoreError if the path cannot be written, if the place holds something
    else, or if its recording cannot be continued because it has another schema version or coordinate, is repacked or is
    damaged.
    """

    def __init__(
        self, target: Target, *, along: str = "epoch", mode: Mode = "a"
    ) -> None:
        self._place = find(target)
        self._along = along
        directory = self._place.directory
        if directory is not None:
            # This comes first: a run that was killed may have left the recording under a temporary name.
            restore(directory)
        self._replaces = False
        if mode in ("w", "x") and Root.is_at(self._place):
            if mode == "x":
                raise StoreError(
                    f"{self._place.name} already exists: mode='a' continues it, mode='w' replaces it"
                )
            # The check is made here and again at the first mark, which comes only after an epoch of training.
            check_replaceable(self._place)
            self._replaces = True
        self._root = None if self._replaces else Root.read(self._place)
        self._place.check_writable(continued=self._root is not None)
        self._marks = () if self._root is None else self._resumed(self._root)
        self._created: tuple[Mapping[str, Group], Mapping[str, Any]] | None = None
        self._lock: Lock | None = None
        self._attempted: bytes | None = None
        self._store = (
            self._place.store
            if directory is None
            else Folder(directory, read_only=False)
        )
        # If two recorders add the same mark to a remote store, their roots must differ, so that each can recognise its
        # own.
        self._writer = (
            {} if target is None or directory else {"writer": uuid.uuid4().hex}
        )
        self._outdated = self._closed = False

    @property
    def name(self) -> str:
        """Name of the place for messages."""
        return self._place.name

    @property
    def groups(self) -> Mapping[str, Group] | None:
        """The stored groups; None before the first mark."""
        return None if self._root is None else self._root.groups

    @property
    def attrs(self) -> Mapping[str, Any] | None:
        """The stored attributes of the root; None before the first mark."""
        return None if self._root is None else self._root.attributes

    @property
    def has_layers(self) -> bool:
        """True if anything but scalars is recorded."""
        return any(group.layers for group in (self.groups or {}).values())

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The committed marks, ascending."""
        return self._marks

    def create(self, groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
        """Define the groups of a recording that is new or has no layers yet; earlier marks get NaN.

        The groups are created with the next mark; until then this may be called again. The path of a group is "" for
        the root, or a name such as "layer_scale" or "maps/6x14x14". StoreError if the recording has layers already;
        ValueError if a name is used twice.
        """
        if self._root is not None and self.has_layers:
            raise StoreError(f"{self._place.name} holds a recording already")
        check_names(groups, self._along)
        Root.new(groups, attrs, self._along, "int64")
        self._created = (dict(groups), dict(attrs))

    def hold(self) -> None:
        """Take the lock of an existing recording; for a new recording, :meth:`append` takes it.

        The lock of a recording that will be replaced is not kept: this only checks that no other recorder holds it.
        StoreError if another recorder holds the lock, or if the recording has changed since this store read or wrote
        it.
        """
        directory = self._place.directory
        if self._root is None:
            if self._replaces and directory is not None:
                Lock(directory, self._place.name).release()
            return
        self._check_unchanged()  # before a lock file is created
        if directory is not None and not self._holds:
            self._lock = Lock(directory, self._place.name)
            try:
                # This is checked again, because the former holder of the lock may have added a mark.
                self._check_unchanged()
            except BaseException:
                self._lock.release()
                raise
            # The former holder may have been killed before it had updated the arrays' own metadata.
            self._outdated = True
            delete_unfinished(directory)

    def append(
        self,
        mark: Mark,
        values: Mapping[str, Mapping[str, np.ndarray]],
        scalars: Mapping[str, float],
        *,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Commit one mark, which is durable when this returns.

        Args:
            mark: Number greater than all previous marks. If the first mark is an integer, all are stored as integers.
            values: Arrays by group and variable, with the shapes that :meth:`Group.shape` returns.
            scalars: Further variables of the root, NaN for marks without them.
            attrs: Attributes of the root, in plain JSON; they replace attributes of the same names.

        StoreError if the mark is not greater than the last one, or not an integer where integers are stored; if another
        recorder writes to the store; if the store was deleted, damaged or closed; or if :meth:`create` was not called.
        ValueError for values of another shape, and for a scalar with another thing's name. After these errors, and
        after errors of the store itself, earlier marks are unchanged, and the same mark can be tried again.
        """
        if self._closed:
            raise StoreError(
                f"{self._place.name} was closed: open it again to continue it"
            )
        mark = self._as_stored(mark)
        directory = self._place.directory
        # The precondition is read before the root is compared, so that a later change makes the write of the root fail.
        precondition = (
            None if directory is not None else run(condition(self._place.store, ROOT))
        )
        self.hold()
        root = self._root
        if root is None:
            if self._created is None:
                raise StoreError(
                    f"{self._place.name} holds nothing yet: create() comes first"
                )
            root = Root.new(
                *self._created,
                self._along,
                "int64" if isinstance(mark, int) else "float64",
            )
        elif self._created is not None and not self.has_layers:
            root = root.with_groups(self._created[0])
        rows = self._rows(root, values, scalars)
        stored = {} if self._root is None else self._root.documents
        for path in root.growing:
            if path.rpartition("/")[2] == self._along:
                rows[path] = np.array(mark if path in stored else [*self._marks, mark])
        new = root.with_mark(scalars, {**(attrs or {}), **self._writer})
        if self._replaces:
            check_replaceable(self._place)  # again, as an epoch may have passed
        if self._root is None and directory is not None:
            with new_directory(directory, replace=self._replaces) as (store, lock):
                run(commit(store, None, new, rows))
            self._lock = lock
            self._committed(mark, new)
            delete_unfinished(directory)
            return
        if self._replaces:
            precondition = run(self._deleted())
        if self._root is None:
            if self._place.root() not in (None, self._attempted):
                raise StoreError(
                    f"another recorder writes to {self._place.name}: it was created in the meantime"
                )
            run(put(self._place.store, UNFINISHED, b""))
        # If a store writes the root but reports a failure, this text is recognised as our own.
        self._attempted = new.text
        run(self._write(mark, new, rows, precondition))
        if len(self._marks) == 1:
            with suppress(Exception):  # it is harmless if it stays
                run(self._place.store.delete(UNFINISHED))

    def close(self) -> None:
        """Release the lock. The recording can still be read. This may be called more than once."""
        root = (
            self._root if self._outdated and not self._closed and self._holds else None
        )
        # An error, such as a full disk, is ignored, because only readers without consolidated metadata need these.
        with suppress(OSError, StoreError):
            if root is not None:
                self._check_unchanged()
                run(all_of(documents_beside(self._store, root.growing)))
        self._closed = True
        if self._lock is not None:
            self._lock.release()

    def dataset(self) -> xr.Dataset:
        """Open the root group with the committed marks; values are read lazily."""
        return open_dataset(self._existing().checked(self._place.store))

    def tree(self) -> xr.DataTree:
        """Open all groups, as :func:`open_recording` does, with the committed marks; values are read lazily."""
        return open_tree(self._existing().checked(self._place.store))

    @property
    def _holds(self) -> bool:
        return self._place.directory is None or (
            self._lock is not None and self._lock.held
        )

    def _existing(self) -> Root:
        if self._root is None:
            raise StoreError(
                f"{self._place.name} holds nothing yet: create() and append() come first"
            )
        return self._root

    def _resumed(self, root: Root) -> tuple[Mark, ...]:
        """Return the marks of a recording that will be continued."""
        if root.along != self._along:
            raise StoreError(
                f"{self._place.name} has its marks along {root.along!r}, expected {self._along!r}"
            )
        if REPACKED in root.attributes:
            raise StoreError(
                f"{self._place.name} was repacked for reading: continue the recording that it was made of"
            )
        try:
            group = zarr.open_group(
                root.checked(self._place.store), mode="r", use_consolidated=True
            )
            return tuple(np.asarray(group[self._along][:]).tolist())  # type: ignore[index]
        except UNREADABLE as error:
            raise StoreError(
                f"{self._place.name} has a damaged {self._along!r}: {error}"
            ) from error

    async def _write(
        self,
        mark: Mark,
        new: Root,
        rows: Mapping[str, np.ndarray],
        precondition: dict[str, Any] | None,
    ) -> None:
        await commit(self._store, self._root, new, rows, precondition)
        # This is inside the coroutine, because Ctrl-C may come before run() returns.
        self._committed(mark, new)

    def _committed(self, mark: Mark, new: Root) -> None:
        self._root = new
        self._marks = (*self._marks, mark)
        self._outdated = True
        self._replaces = False

    async def _deleted(self) -> dict[str, Any] | None:
        """Delete a recording in a store without renaming; the root goes first, so that no reader opens the rest."""
        store = self._place.store
        await put(store, UNFINISHED, b"")
        await store.delete(ROOT)
        for key in await listed(store.list):
            if key != UNFINISHED:
                await store.delete(key)
        self._replaces = False
        return await condition(store, ROOT)

    def _check_unchanged(self) -> None:
        """Raise StoreError if the root has changed since this store read or wrote it.

        The exception is a root of our own whose write was reported as failed: its mark will be written again.
        """
        text, root = self._place.root(), self._existing()
        if text is None:
            raise StoreError(
                f"{self._place.name} was deleted or moved while it was recorded"
            )
        if text not in (root.text, self._attempted):
            changed = Root.read(self._place)
            count = 0 if changed is None else changed.length
            raise StoreError(
                f"another recorder writes to {self._place.name}: {root.length} marks were left in it, {count} are there"
            )

    def _as_stored(self, mark: Mark) -> Mark:
        """Return the mark in the type of earlier marks; StoreError if it is not greater than the last one."""
        last = self._marks[-1] if self._marks else None
        if isinstance(last, int) and isinstance(mark, float):
            raise StoreError(
                f"expected an integer for {self._along!r} as for the marks before, got {mark!r}"
            )
        if last is not None and not mark > last:
            raise StoreError(
                f"expected {self._along!r} later than the last mark, {last}, got {mark!r}"
            )
        return float(mark) if isinstance(last, float) else mark

    def _rows(
        self,
        root: Root,
        values: Mapping[str, Mapping[str, np.ndarray]],
        scalars: Mapping[str, float],
    ) -> dict[str, np.ndarray]:
        """Return the values by path, in the dtypes in which they are stored."""
        rows: dict[str, np.ndarray] = {}
        for path, group in root.groups.items():
            for name, variable in group.variables.items():
                inner = f"{path}/{name}" if path else name
                rows[inner] = np.asarray(values[path][name], dtype=variable.dtype)
                if rows[inner].shape != group.shape(name):
                    raise ValueError(
                        f"{inner}: expected shape {group.shape(name)}, got {rows[inner].shape}"
                    )
        for name, scalar in scalars.items():
            is_taken = (
                name not in root.scalars
                if name in root.documents
                else self._is_foreign(name)
            )
            if name == HEADS or not is_name(name) or is_taken:
                raise ValueError(
                    f"{name!r} is the name of something else there: give the scalar another one"
                )
            rows[name] = np.array(float(scalar))
        return rows

    def _is_foreign(self, name: str) -> bool:
        """Return True if an array or a group of this name in the store was not written by a recorder's mark."""
        text = (
            run(get(self._place.store, f"{name}/{ROOT}"))
            if self._root is not None and is_name(name)
            else None
        )
        # A scalar with this description was left by a run that was killed.
        return text is not None and GIVEN not in text.decode(errors="replace")
