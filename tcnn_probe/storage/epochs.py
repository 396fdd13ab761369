"""The store of one recording: resumed or begun, extended mark by mark, read, closed."""

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
    """The marks of one recording; one writer at a time.

    Looks at what is there and changes nothing before :meth:`hold` or :meth:`append`. The mode "a" continues a recording
    that is there, "w" replaces it with the first mark, and "x" refuses it. StoreError if something else is there, or a
    recording that cannot be continued: of another schema version, along another coordinate, repacked, or damaged; or if
    the path cannot be written.
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
            # Checked here too: the first mark, which replaces it, comes only after an epoch of training.
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
        # Two recorders that add the same mark to a remote store must write different roots, so that each can recognise
        # its own.
        self._writer = (
            {} if target is None or directory else {"writer": uuid.uuid4().hex}
        )
        self._outdated = self._closed = False

    @property
    def name(self) -> str:
        """Name of the place, for people."""
        return self._place.name

    @property
    def groups(self) -> Mapping[str, Group] | None:
        """The groups as stored, None before the first mark."""
        return None if self._root is None else self._root.groups

    @property
    def attrs(self) -> Mapping[str, Any] | None:
        """The attributes of the root as stored, None before the first mark."""
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
        """Define the groups of a recording that is new, or has no layers yet: they are NaN for the marks before.

        It is made with the next mark; until then this may be said again. Paths of groups are "" for the root, and such
        as "layer_scale" or "maps/6x14x14". StoreError if there is a recording with layers already; ValueError if a name
        is used twice.
        """
        if self._root is not None and self.has_layers:
            raise StoreError(f"{self._place.name} holds a recording already")
        check_names(groups, self._along)
        Root.new(groups, attrs, self._along, "int64")
        self._created = (dict(groups), dict(attrs))

    def hold(self) -> None:
        """Become the one that writes to the recording, if there is one yet; :meth:`append` does it otherwise.

        A recording that is to be replaced is not held: this only checks that nobody writes to it. StoreError if
        somebody does, or if it is not as this one left it.
        """
        directory = self._place.directory
        if self._root is None:
            if self._replaces and directory is not None:
                Lock(directory, self._place.name).release()
            return
        self._check_unchanged()  # before anything is made there
        if directory is not None and not self._holds:
            self._lock = Lock(directory, self._place.name)
            try:
                # Checked again, because the former holder of the lock may have added a mark.
                self._check_unchanged()
            except BaseException:
                self._lock.release()
                raise
            # The former holder may have been killed while it closed the recording.
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
        """Commit one mark: it is durable when this returns.

        Args:
            mark: Number later than every mark before. If the first is an integer, all are stored as integers.
            values: Arrays by group and variable, of the shape that :meth:`Group.shape` gives.
            scalars: Further root variables, NaN for the marks that they do not come with.
            attrs: Attributes of the root, plain JSON, in place of those of the same names.

        StoreError if the mark is not later, or no integer where integers are stored; if another recorder writes to the
        store; if it was deleted, damaged or closed, or nothing was created. ValueError for values of another shape, and
        a scalar with the name of something else. After these and all that the store raises itself, the marks before are
        as they were, and the same mark can be tried again.
        """
        if self._closed:
            raise StoreError(
                f"{self._place.name} was closed: open it again to continue it"
            )
        mark = self._as_stored(mark)
        directory = self._place.directory
        # Read before the root is compared, so that a change in between is noticed when the root is written.
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
            check_replaceable(self._place)  # once more: an epoch may have passed
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
        # A store may write the root and report that it failed: this text is then taken for our own.
        self._attempted = new.text
        run(self._write(mark, new, rows, precondition))
        if len(self._marks) == 1:
            with suppress(Exception):  # harmless where it stays
                run(self._place.store.delete(UNFINISHED))

    def close(self) -> None:
        """Let others write. What is there can still be read; may be called again."""
        root = (
            self._root if self._outdated and not self._closed and self._holds else None
        )
        # A full disk: these are for those who read without the root's metadata.
        with suppress(OSError, StoreError):
            if root is not None:
                self._check_unchanged()
                run(all_of(documents_beside(self._store, root.growing)))
        self._closed = True
        if self._lock is not None:
            self._lock.release()

    def dataset(self) -> xr.Dataset:
        """Open the root group: the committed marks, read when looked at."""
        return open_dataset(self._existing().checked(self._place.store))

    def tree(self) -> xr.DataTree:
        """Open all groups, as :func:`open_recording` does: the committed marks, read when looked at."""
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
        """Return the marks of a recording that is to be continued."""
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
        # Inside the coroutine, because Ctrl-C may come before run() returns.
        self._committed(mark, new)

    def _committed(self, mark: Mark, new: Root) -> None:
        self._root = new
        self._marks = (*self._marks, mark)
        self._outdated = True
        self._replaces = False

    async def _deleted(self) -> dict[str, Any] | None:
        """Delete a recording where nothing can be renamed: the root first, so that no reader takes the rest for it."""
        store = self._place.store
        await put(store, UNFINISHED, b"")
        await store.delete(ROOT)
        for key in await listed(store.list):
            if key != UNFINISHED:
                await store.delete(key)
        self._replaces = False
        return await condition(store, ROOT)

    def _check_unchanged(self) -> None:
        """Refuse a root that is not as this store left it: StoreError.

        A root that was written and reported as failed is taken as not written: its mark is written again.
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
        """Return an integer if all marks before are, else a float; StoreError for a mark that is not later."""
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
        """Return the values by path and as stored."""
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
        """Return True if somebody else has an array or a group of this name in the store."""
        text = (
            run(get(self._place.store, f"{name}/{ROOT}"))
            if self._root is not None and is_name(name)
            else None
        )
        # Otherwise it is of a run that was killed.
        return text is not None and GIVEN not in text.decode(errors="replace")
