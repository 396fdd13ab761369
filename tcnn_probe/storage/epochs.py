"""The store of one recording, which is created or continued,
extended mark by mark, read and closed.
"""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import xarray as xr
from filelock import FileLock
from zarr.buffer import default_buffer_prototype

from tcnn_probe.schema import COORDINATES, SCHEMA_VERSION, Group, StoreError
from tcnn_probe.storage.checked import CheckedStore
from tcnn_probe.storage.directory import (
    LOCK,
    delete_unfinished,
    lock,
    new_directory,
    restore,
)
from tcnn_probe.storage.marks import Mark, write_mark
from tcnn_probe.storage.place import ROOT, UNFINISHED, Place, Target, find, keys_of, run
from tcnn_probe.storage.reading import open_dataset, open_tree
from tcnn_probe.storage.root import ALONG, GIVEN, HEADS, IDENTITY, VERSION, Root, join

__all__ = ["EpochStore", "Mode"]

Mode = Literal["a", "w", "x"]

# A writer that was killed may leave it.
PARTIAL_ROOT = f".{ROOT}.partial"


class EpochStore:
    """Store of one recording, for one writer at a time.

    Creating the object only reads the place, and restores a directory that a killed run has
    renamed; nothing else changes before :meth:`hold` or :meth:`append`. The mode "a" continues an
    existing recording, "w" replaces it with the first mark, and "x" raises an error. StoreError if
    the path cannot be written, if the place holds something else, or if its recording cannot be
    continued because it has another schema version or coordinate, or is damaged.
    """

    def __init__(self, target: Target, *, along: str = "epoch", mode: Mode = "a") -> None:
        self._place = find(target)
        self._along = along
        directory = self._place.directory
        if directory is not None:
            # This comes first: a run that was killed may have left the recording under a temporary
            # name.
            restore(directory)
        self._root = Root.read(self._place)
        if self._root is not None and mode == "x":
            raise StoreError(
                f"{self._place.name} already exists: mode='a' continues it, mode='w' replaces it"
            )
        self._replaces = self._root is not None and mode == "w"
        if self._replaces:
            # The check is made here and again at the first mark, which comes only after an epoch of
            # training.
            _check_replaceable(self._place)
            self._root = None
        self._place.check_writable()
        self._marks = () if self._root is None else self._resumed(self._root)
        self._lock: FileLock | None = None
        self._attempted: bytes | None = None
        self._closed = False

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

    def hold(self) -> None:
        """Take the lock of an existing recording; for a new recording, :meth:`append` takes it.

        The lock of a recording that will be replaced is not kept: this only checks that no other
        recorder holds it. StoreError if another recorder holds the lock, or if the recording has
        changed since this store read or wrote it.
        """
        directory = self._place.directory
        if self._root is None:
            if self._replaces and directory is not None:
                self._replaces = directory.exists()  # it may have been deleted meanwhile
                if self._replaces:
                    lock(directory, self._place.name).release()
            return
        self._check_unchanged()  # before a lock file is created
        if directory is not None and not (self._lock and self._lock.is_locked):
            self._lock = lock(directory, self._place.name)
            try:
                # This is checked again, because the former holder of the lock may have added a
                # mark.
                self._check_unchanged()
            except BaseException:
                self._lock.release()
                raise
            delete_unfinished(directory)

    def append(
        self,
        mark: Mark,
        groups: Mapping[str, Group],
        values: Mapping[str, Mapping[str, np.ndarray]],
        scalars: Mapping[str, float],
        *,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Commit one mark, which is durable when this returns.

        Args:
            mark: Number greater than all previous marks. If the first mark is an integer, all are
                stored as integers.
            groups: Groups by their paths: "" for the root, or a name such as "layer_scale" or
                "maps/6x14x14". Those of earlier marks come first, with their layers and variables
                in the same order; others may follow, and have NaN at earlier marks.
            values: Arrays by group and variable, with the shapes that :meth:`Group.shape` returns.
            scalars: Further variables of the root, NaN for marks without them.
            attrs: Attributes of the root, in plain JSON; they replace attributes of the same names.

        StoreError if the mark is not greater than the last one, or not an integer where integers
        are stored; if another recorder writes to the store; or if the store was deleted, damaged or
        closed. ValueError for values of another shape, and for a scalar that has the name of
        something else. After these errors, and after errors of the store itself, earlier marks are
        unchanged, and the same mark can be tried again.
        """
        if self._closed:
            raise StoreError(f"{self._place.name} was closed: open it again to continue it")
        self.check_order(mark)
        mark = self._as_stored(mark)
        self.hold()
        rows = self._rows(groups, values, scalars)
        # A retry of a mark whose failure came after its commit finds this root.
        with self._place_to_write() as store:
            self._attempted = write_mark(
                store,
                self._root,
                self._along,
                [*self._marks, mark],
                groups,
                rows,
                # The user's attributes come first, so that they cannot replace the fixed ones.
                {**(attrs or {}), **self._fixed()},
            )
            run(store.commit())
        self._root = Root.parse(self._attempted, self._place)
        self._marks = (*self._marks, mark)

    @contextmanager
    def _place_to_write(self) -> Iterator[CheckedStore]:
        """Give the store to write a mark to: for the first one,
        an empty one that takes the recording's place.
        """
        if self._root is not None:
            yield self._root.checked(self._place, writes=True)
            return
        if self._replaces:
            _check_replaceable(self._place)  # again, as an epoch may have passed
        if self._place.directory is not None:
            new = new_directory(self._place.directory, replace=self._replaces)
            with new as (folder, held):
                yield CheckedStore(folder, {})
            self._lock = held
            self._replaces = False
            return
        store = self._place.store
        if not self._replaces and self._place.root() not in (None, self._attempted):
            raise StoreError(
                f"another recorder writes to {self._place.name}: it was created in the meantime"
            )
        run(store.set(UNFINISHED, default_buffer_prototype().buffer.from_bytes(b"")))
        if self._replaces:
            # The root goes first, so that no reader opens the rest.
            run(store.delete(ROOT))
            for key in keys_of(store):
                if key != UNFINISHED:
                    run(store.delete(key))
            self._replaces = False
        yield CheckedStore(store, {})
        run(store.delete(UNFINISHED))

    def close(self) -> None:
        """Release the lock. The recording can still be read. This may be called more than once."""
        self._closed = True
        if self._lock is not None and self._lock.is_locked:
            # Deleted while it is held, because afterwards it could belong to the next holder.
            with suppress(OSError):
                (self._place.directory / LOCK).unlink()  # type: ignore[operator]
            self._lock.release()

    def dataset(self) -> xr.Dataset:
        """Open the root group with the committed marks; values are read lazily."""
        return open_dataset(self._existing().checked(self._place))

    def tree(self) -> xr.DataTree:
        """Open all groups, as :func:`open_recording` does,
        with the committed marks; values are read lazily.
        """
        return open_tree(self._existing().checked(self._place))

    def _fixed(self) -> dict[str, Any]:
        """Return the attributes of the root that every recording has;
        none for one that has its own.
        """
        if self._root is not None:
            return {}
        return {
            IDENTITY: uuid.uuid4().hex,
            VERSION: SCHEMA_VERSION,
            ALONG: self._along,
        }

    def _existing(self) -> Root:
        if self._root is None:
            raise StoreError(f"{self._place.name} holds nothing yet: append() comes first")
        return self._root

    def _resumed(self, root: Root) -> tuple[Mark, ...]:
        """Return the marks of a recording that will be continued."""
        if root.along != self._along:
            raise StoreError(
                f"{self._place.name} has its marks along {root.along!r}, expected {self._along!r}"
            )
        for path, group in root.groups.items():
            labels = root.documents.get(join(path, "layer"))
            if labels and labels["shape"] != [len(group.layers)]:
                raise StoreError(
                    f"{self._place.name} is a selection of the layers of a recording, which cannot "
                    "be continued"
                )
        dataset = open_dataset(root.checked(self._place))
        return tuple(dataset[root.along].values.tolist())

    def _check_unchanged(self) -> None:
        """Raise StoreError if the root has changed since this store read or wrote it.

        The exception is a root of our own whose write was reported as failed: its mark will be
        written again.
        """
        text, root = self._place.root(), self._existing()
        if text is None:
            raise StoreError(f"{self._place.name} was deleted or moved while it was recorded")
        if text not in (root.text, self._attempted):
            length = Root.parse(text, self._place).length
            raise StoreError(
                f"another recorder writes to {self._place.name}: {root.length} marks were left in "
                f"it, {length} are there"
            )

    def check_order(self, mark: Mark) -> None:
        """Raise StoreError if a mark is there already, or does not come after the others."""
        if mark in self._marks:
            raise StoreError(
                f"{self._along} {mark} is already marked: record(..., mode='w') replaces the "
                "recording that is there; to continue it, leave out what is in recorder.epochs, or "
                "mark(..., if_marked='skip')"
            )
        if self._marks and not mark > self._marks[-1]:
            raise StoreError(
                f"expected {self._along} to be later than the last one marked, {self._marks[-1]}, "
                f"got {mark!r}"
            )

    def _as_stored(self, mark: Mark) -> Mark:
        """Return the mark in the type of earlier marks."""
        last = self._marks[-1] if self._marks else None
        if isinstance(last, int) and isinstance(mark, float):
            raise StoreError(
                f"expected an integer for {self._along!r} as for the marks before, got {mark!r}"
            )
        return float(mark) if isinstance(last, float) else mark

    def _rows(
        self,
        groups: Mapping[str, Group],
        values: Mapping[str, Mapping[str, np.ndarray]],
        scalars: Mapping[str, float],
    ) -> dict[str, Any]:
        """Return the values by path, in the dtypes in which they are stored."""
        rows: dict[str, Any] = {}
        for path, group in groups.items():
            for name, variable in group.variables.items():
                row = np.asarray(values[path][name], dtype=variable.dtype)
                rows[join(path, name)] = row
                if row.shape != group.shape(name):
                    raise ValueError(
                        f"{join(path, name)}: expected shape {group.shape(name)}, got {row.shape}"
                    )
        taken = {HEADS, ROOT, self._along, *COORDINATES, *groups[""].sizes}
        taken |= {path.split("/")[0] for path in (*rows, *groups)}
        if self._root is not None:
            documents = {path.split("/")[0] for path in self._root.documents}
            taken |= documents - self._root.scalars
            # Of these, one that is recorded now cannot go on as a scalar.
            scalars = {
                **dict.fromkeys(self._root.scalars & rows.keys(), 0.0),
                **scalars,
            }
        for name, scalar in scalars.items():
            is_path = not name or name.startswith(".") or "/" in name
            if is_path or name in taken:
                raise ValueError(
                    f"{name!r} is the name of something else in the recording, or a path: give the "
                    "scalar another one"
                )
            rows[name] = float(scalar)
        return rows


def _check_replaceable(place: Place) -> None:
    """Raise StoreError if a place holds something that no recording has written,
    as replacing would delete it.
    """
    root = Root.read(place)
    known = set() if root is None else root.names
    if place.directory is None:
        names = {key.split("/")[0] for key in keys_of(place.store)}
    else:
        names = {path.name for path in place.directory.iterdir()}
    for name in sorted(names - known - {ROOT, PARTIAL_ROOT, LOCK, UNFINISHED}):
        # A killed mark may have left the array of a scalar.
        document = run(place.store.get(f"{name}/{ROOT}", default_buffer_prototype()))
        if document is None or GIVEN.encode() not in document.to_bytes():
            raise StoreError(
                f"{place.name} holds more than a recording, and is not replaced: {name!r}"
            )
