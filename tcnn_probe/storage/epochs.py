"""The store of one recording, extended mark by mark."""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import xarray as xr
from filelock import FileLock
from zarr.buffer import default_buffer_prototype

from tcnn_probe.schema import COORDINATES, SCHEMA_VERSION, Group, StoreError
from tcnn_probe.storage.checked import CheckedStore
from tcnn_probe.storage.directory import (
    delete_unfinished,
    new_directory,
    release,
    restore,
    take_lock,
)
from tcnn_probe.storage.marks import Mark, write_mark
from tcnn_probe.storage.place import ROOT, UNFINISHED, Place, Target, find, run, uninterrupted
from tcnn_probe.storage.reading import open_dataset, open_tree
from tcnn_probe.storage.root import (
    ALONG,
    HEADS,
    IDENTITY,
    VERSION,
    Root,
    is_left_over,
    is_recorded,
    join,
)

__all__ = ["EpochStore", "Mode"]

Mode = Literal["a", "w", "x"]

# What a recording has at its top beside arrays and groups: the root, a root that a killed writer
# has not finished, the mark of an unfinished recording, and the lock of earlier versions.
_OWN_FILES = {ROOT, f".{ROOT}.partial", UNFINISHED, ".tcnn_probe.lock"}


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
        if self._place.directory is not None:
            # This comes first: a run that was killed may have left the recording under a temporary
            # name.
            restore(self._place.directory)
        root = Root.read(self._place)
        if root.text is not None and mode == "x":
            raise StoreError(
                f"{self._place.name} already exists: mode='a' continues it, mode='w' replaces it"
            )
        self._replaces = root.text is not None and mode == "w"
        self._root = Root() if self._replaces else root
        self._place.check_writable()
        self._marks = self._resumed_marks()
        self._lock: FileLock | None = None
        self._attempted: bytes | None = None

    @property
    def name(self) -> str:
        """Name of the place for messages."""
        return self._place.name

    @property
    def groups(self) -> Mapping[str, Group] | None:
        """The stored groups; None before the first mark."""
        return self._root.groups if self._root.text else None

    @property
    def attrs(self) -> Mapping[str, Any]:
        """The stored attributes of the root."""
        return self._root.attributes

    @property
    def has_layers(self) -> bool:
        """True if anything but scalars is recorded."""
        return any(group.layers for group in self._root.groups.values())

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The committed marks, ascending."""
        return self._marks

    def hold(self) -> None:
        """Take the lock of a recording that is there; :meth:`append` takes that of a new one.

        StoreError if another recorder holds the lock; if the recording has changed since this store
        read or wrote it; or if it is to be replaced, and its place holds anything else.
        """
        # A cell of a notebook that failed before the first mark may run again beside its recorder.
        if self._root.text or self._replaces:
            self._take_lock()

    def _take_lock(self) -> None:
        directory = self._place.directory
        if directory is None or (self._lock and self._lock.is_locked):
            self._check_unchanged()
            return
        self._lock = take_lock(directory)
        try:
            self._check_unchanged()
        except BaseException:
            release(self._lock)
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
        are stored; if another recorder writes to the store; or if the store was deleted or damaged.
        ValueError for a scalar that has the name of something else. After these errors, and after
        errors of the store itself, earlier marks are unchanged, and the same mark can be tried
        again.
        """
        self.check_order(mark)
        if self._marks:
            mark = type(self._marks[-1])(mark)
        rows = self._rows(groups, values, scalars)
        self._take_lock()
        fixed = {IDENTITY: uuid.uuid4().hex, VERSION: SCHEMA_VERSION, ALONG: self._along}
        # The user's attributes come first, so that they cannot replace the fixed ones.
        attrs = {**(attrs or {}), **({} if self._root.text else fixed)}
        marks = (*self._marks, mark)
        with self._place_to_write() as store:
            uninterrupted(write_mark, store, self._root, self._along, marks, groups, rows, attrs)
            # A retry of a mark whose failure came after its commit finds this root.
            self._attempted = store.text
            run(store.commit())
        self._replaces = False
        self._root = Root.parse(self._attempted, self._place)
        self._marks = marks

    @contextmanager
    def _place_to_write(self) -> Iterator[CheckedStore]:
        """Give the store to write a mark to; the first mark's is empty, and takes the place."""
        store = self._place.store
        if self._root.text:
            yield self._root.checked(self._place, writes=True)
        elif self._place.directory is not None:
            with new_directory(self._place.directory, replace=self._replaces) as folder:
                yield CheckedStore(folder, {})
        else:
            run(store.set(UNFINISHED, default_buffer_prototype().buffer.from_bytes(b"")))
            if self._replaces:
                # The root goes first, so that no reader opens the rest.
                run(store.delete(ROOT))
                for name in self._place.names():
                    run(store.delete_dir(name))
                self._replaces = False
            yield CheckedStore(store, {})
            run(store.delete(UNFINISHED))

    def close(self) -> None:
        """Release the lock. The recording can still be read. This may be called more than once."""
        if self._lock is not None:
            release(self._lock)

    def dataset(self) -> xr.Dataset:
        """Open the root group with the committed marks; values are read lazily."""
        return open_dataset(self._root.checked(self._place))

    def tree(self) -> xr.DataTree:
        """Open all groups with the committed marks, as :func:`open_recording` does."""
        return open_tree(self._root.checked(self._place))

    def _resumed_marks(self) -> tuple[Mark, ...]:
        """Return the marks of a recording that will be continued."""
        root = self._root
        if root.text is None:
            return ()
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
        if self._replaces:
            # This is checked here twice: before an epoch of training, and after it.
            _check_replaceable(self._place)
            return
        text = self._place.root()
        if text == self._root.text:
            return
        if text is None:
            raise StoreError(f"{self._place.name} was deleted or moved while it was recorded")
        if text != self._attempted:
            length = Root.parse(text, self._place).length
            raise StoreError(
                f"another recorder writes to {self._place.name}: {len(self._marks)} marks were "
                f"left in it, {length} are there"
            )

    def check_order(self, mark: Mark) -> None:
        """Raise StoreError unless a mark comes after all others, and is an integer if they are."""
        if not self._marks:
            return
        last = self._marks[-1]
        if mark in self._marks:
            raise StoreError(
                f"{self._along} {mark} is already marked: record(..., mode='w') replaces the "
                "recording that is there; to continue it, leave out what is in recorder.epochs, or "
                "mark(..., if_marked='skip')"
            )
        if not mark > last:
            raise StoreError(
                f"expected {self._along} to be later than the last one marked, {last}, got {mark!r}"
            )
        if isinstance(last, int) and isinstance(mark, float):
            raise StoreError(
                f"expected an integer for {self._along!r} as for the marks before, got {mark!r}"
            )

    def _rows(
        self,
        groups: Mapping[str, Group],
        values: Mapping[str, Mapping[str, np.ndarray]],
        scalars: Mapping[str, float],
    ) -> dict[str, Any]:
        """Return the values by path, in the dtypes in which they are stored."""
        rows: dict[str, Any] = {}
        for path, group in groups.items():
            for name in group.variables:
                rows[join(path, name)] = row = values[path][name]
                assert row.shape == group.shape(name), name
        taken = {HEADS, self._along, *COORDINATES, *groups[""].sizes}
        taken |= {path.split("/")[0] for path in (*rows, *groups)}
        # A variable or group that joins must not have the name of an earlier scalar.
        for name in scalars.keys() | self._root.scalars:
            if "/" in name or name in taken:
                raise ValueError(
                    f"{name!r} is the name of something else in the recording, or a path: give the "
                    "scalar another one"
                )
        return rows | {name: float(scalar) for name, scalar in scalars.items()}


def _check_replaceable(place: Place) -> None:
    """Raise StoreError if replacing would delete something that no recording has written."""
    documents = Root.read(place).documents.items()
    known = _OWN_FILES | {path.split("/")[0] for path, about in documents if is_recorded(about)}
    for name in place.names():
        if name not in known and not _holds_only_remains(place, name):
            raise StoreError(
                f"{place.name} holds more than a recording, and is not replaced: {name!r}"
            )


def _holds_only_remains(place: Place, path: str) -> bool:
    """Return whether this is an array, group or folder that a mark may have left when killed."""
    text = place.read(f"{path}/{ROOT}")
    members = {*place.names(path)} - _OWN_FILES
    if text is None:  # the folder of an array or a group, before it has metadata
        return not members and place.directory is not None and (place.directory / path).is_dir()
    try:
        document = json.loads(text)
        if document["node_type"] == "array":
            return is_left_over(document)
        # A group gets its attributes after it has been created.
        ours = is_left_over(document) or not document["attributes"]
    except (ValueError, KeyError, TypeError):  # damaged
        return False
    return ours and all(_holds_only_remains(place, f"{path}/{name}") for name in members)
