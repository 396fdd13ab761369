"""The store of one recording: created or resumed, extended mark by mark, read, closed."""

import json
import math
import operator
from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import numpy as np
import xarray as xr
import zarr

from tcnn_probe.schema import Group, Variable
from tcnn_probe.storage.chunks import GIVEN, new_array, own_document, with_length
from tcnn_probe.storage.columns import Column, column
from tcnn_probe.storage.commit import Root, marks_variable, new_recording
from tcnn_probe.storage.compaction import delete_other_layout, rewrite_maps
from tcnn_probe.storage.comparison import difference
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.place import ROOT, Place, Target, find
from tcnn_probe.storage.reading import HEADS, open_dataset, open_tree
from tcnn_probe.storage.writer import Writer

__all__ = ["EpochStore"]

Mark = int | float


class EpochStore:
    """The marks of one recording; one writer at a time.

    Opens what is there. A recording is resumed: what a killed run left unfinished is deleted. Where nothing is there,
    nothing is made before :meth:`create`.

    Args:
        target: path of a directory, ".zarr" by custom; a URL; a zarr store; or None to keep everything in memory.
        along: name of the marks' coordinate.
        queue_bytes: how much may wait for the background writer, at most; see :meth:`append`.

    Raises:
        StoreError: something else is there, a recording of another schema version, or one along another coordinate.
            Nothing is changed then.
    """

    def __init__(self, target: Target, *, along: str = "epoch", queue_bytes: int = 256 * 2**20) -> None:
        self._place = find(target)
        self._along = along
        self._root = Root.read(self._place)
        self._columns: dict[str, Column] = {}
        self._committed: tuple[Mark, ...] = ()
        self._attempted: bytes | None = None
        self._closed = False
        if self._root is not None:
            if self._root.along != along:
                raise StoreError(f"{self._place.name} has its marks along {self._root.along!r}, expected {along!r}")
            _clear_leftovers(self._place, self._root)
            marks = zarr.open_group(self._place.objects.store, mode="r", use_consolidated=True)[along]
            self._committed = tuple(np.asarray(marks[:]).tolist())  # type: ignore[index]
        self._groups = None if self._root is None else self._root.groups()
        self._writer = Writer(queue_bytes)

    @property
    def groups(self) -> Mapping[str, Group] | None:
        """The groups as stored, None before they are created."""
        return None if self._groups is None else MappingProxyType(self._groups)

    @property
    def attrs(self) -> Mapping[str, Any] | None:
        """The attributes of the root as stored, None before it is created."""
        return None if self._root is None else MappingProxyType(dict(self._root.attributes))

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks so far, ascending, with those that are queued."""
        pending = self._writer.pending  # looked at first: a mark that is committed meanwhile is in both
        last = self._committed[-1] if self._committed else -math.inf
        return (*self._committed, *(mark for mark in pending if mark > last))

    def create(self, groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
        """Make a recording without marks. A process that is killed meanwhile leaves none.

        Args:
            groups: by path; "" is the root, others are such as "layer_scale" or "maps/6x14x14".
            attrs: of the root, plain JSON.

        Raises:
            StoreError: there is a recording already, or a directory cannot be made.
            ValueError: there is no root group, a name is used twice, or an attribute is not plain JSON.
        """
        if self._root is not None:
            raise StoreError(f"{self._place.name} holds a recording already")
        _check_names(groups, self._along)
        try:
            root, objects = new_recording(groups, attrs, self._along)
        except TypeError as error:
            raise ValueError(f"expected attributes that are plain JSON: {error}") from error
        self._place.fill(objects)
        self._root, self._groups = root, root.groups()

    def check(self, groups: Mapping[str, Group]) -> None:
        """Whether the recording that is there is one of the same groups.

        Raises:
            StoreError: it is not; the first difference is named.
        """
        if (found := difference(self._existing().groups(), groups)) is not None:
            raise StoreError(f"{self._place.name} is a recording of something else ({found}): choose another path")

    def append(
        self,
        mark: Mark,
        values: Mapping[str, Mapping[str, np.ndarray]],
        scalars: Mapping[str, float],
        *,
        attrs: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> None:
        """Commit one mark.

        Args:
            mark: later than every one there. Whether the first is an integer decides how all are stored.
            values: for each group and each of its variables, of the shape :meth:`Group.shape` gives.
            scalars: further root variables. One that is new is NaN for the marks before; one that is missing is NaN
                for this mark.
            attrs: of the root, plain JSON, in place of those of the same names.
            wait: whether the mark is to be durable when this returns. Otherwise its values are copied to a queue, from
                which a thread writes them in order; where the queue is full, this blocks. An error is then raised by
                the next call, and nothing after the mark that failed is written: the marks have no holes.

        Raises:
            StoreError: the mark is not later, or no integer where integers are stored; something else writes to the
                store; or the store is closed or was not created.
            ValueError: values are missing, too many, or of another shape; a scalar has the name of something else.
            WriteError: an earlier mark that was not waited for could not be written.
            OSError: and whatever else the store raises. The marks before are as they were; the same mark can be tried
                again.
        """
        self._existing()
        if self._closed:
            raise StoreError(f"{self._place.name} was closed: open it again to continue it")
        mark = self._as_stored(mark)
        rows = self._rows(values, scalars)
        rows |= {self._path(group, self._along): np.array(mark) for group in self._groups or {}}
        about = dict(attrs or {})
        size = sum(row.nbytes for row in rows.values())
        self._writer.put(mark, size, lambda: self._write(mark, rows, set(scalars), about), wait=wait)

    def flush(self) -> None:
        """Wait until every mark is durable.

        Raises:
            WriteError: one could not be written.
        """
        self._writer.flush()

    def close(self) -> None:
        """Wait until every mark is durable, and give back the spare room of the arrays. May be called again.

        What is there can still be read.

        Raises:
            WriteError: a mark could not be written, and no call has said so yet.
        """
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        root, objects = self._root, self._place.objects
        if root is None or self._place.objects.get(ROOT) != root.text:
            return
        with suppress(OSError):  # a full disk: the room is seen by none who read the root's metadata
            for path in root.growing:
                for key, own in own_document(path, root.documents[path]).items():
                    if objects.get(key) != own:
                        objects.put({key: own})

    def dataset(self) -> xr.Dataset:
        """The root group: the committed marks, read when looked at."""
        self._existing()
        return open_dataset(self._place.objects.store)

    def tree(self) -> xr.DataTree:
        """All groups: the committed marks, read when looked at. See :func:`open_recording` for what is where."""
        self._existing()
        return open_tree(self._place.objects.store)

    def _existing(self) -> Root:
        if self._root is None:
            raise StoreError(f"{self._place.name} holds nothing yet: create() comes first")
        return self._root

    def _path(self, group: str, name: str) -> str:
        return f"{group}/{name}" if group else name

    def _as_stored(self, mark: object) -> Mark:
        there = self.marks
        if isinstance(mark, Integral):
            number: Mark = operator.index(mark)
        elif isinstance(mark, Real) and math.isfinite(mark):
            number = float(mark)
        else:
            raise StoreError(f"expected a finite number for {self._along!r}, got {mark!r}")
        if there and isinstance(there[0], int) and isinstance(number, float):
            raise StoreError(f"expected an integer for {self._along!r} as for the marks before, got {mark!r}")
        if there and isinstance(there[0], float):
            number = float(number)
        if there and number <= there[-1]:
            raise StoreError(f"expected {self._along!r} later than the last mark, {there[-1]}, got {mark!r}")
        return number

    def _rows(
        self, values: Mapping[str, Mapping[str, np.ndarray]], scalars: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Copies of the values, by path and as stored."""
        groups = self._groups or {}
        if extra := [path for path in values if path not in groups]:
            raise ValueError(f"expected values for the groups {list(groups)}, got also {extra}")
        rows: dict[str, np.ndarray] = {}
        for path, group in groups.items():
            given = values.get(path, {})
            if given.keys() != group.variables.keys():
                raise ValueError(
                    f"group {path!r}: expected the variables {sorted(group.variables)}, got {sorted(given)}"
                )
            for name, value in given.items():
                row = np.array(value, dtype=group.variables[name].dtype)
                if row.shape != group.shape(name):
                    raise ValueError(f"{self._path(path, name)}: expected shape {group.shape(name)}, got {row.shape}")
                rows[self._path(path, name)] = row
        documents = self._existing().documents
        for name, scalar in scalars.items():
            if "/" in name or name == HEADS or (name in documents and name not in self._existing().scalars):
                raise ValueError(
                    f"{name!r} is the name of something else in the recording: give the scalar another one"
                )
            rows[name] = np.array(float(scalar))
        return rows

    def _write(self, mark: Mark, rows: Mapping[str, np.ndarray], scalars: set[str], attrs: Mapping[str, Any]) -> None:
        """In the writer's thread: every object of the mark, then the root."""
        root, objects = self._unchanged(), self._place.objects
        if (rewritten := rewrite_maps(self._place, root, compacted=False)) is not root:
            root = self._root = rewritten
            self._columns = {}
        columns = self._columns_for(root, mark)
        for name in sorted(scalars - columns.keys()):
            objects.delete_folder(name)  # what a mark that failed has left under the name
            columns[name] = column(name, new_array(Variable((), "", name, GIVEN), (), self._along), objects)
        try:
            written: dict[str, bytes] = {}
            for path, each in columns.items():
                written |= each.row(root.length, rows.get(path, each.fill_value))
            objects.put(written)
            lengths = {path: with_length(each.document, root.length + 1) for path, each in columns.items()}
            new = Root.of({**root.attributes, **attrs}, {**root.documents, **lengths})
            self._attempted = new.text
            objects.put({ROOT: new.text})
        except BaseException:
            for each in columns.values():
                each.forget()
            raise
        self._columns, self._root, self._committed = columns, new, (*self._committed, mark)

    def _columns_for(self, root: Root, mark: Mark) -> dict[str, Column]:
        objects = self._place.objects
        columns = dict(self._columns) or {path: column(path, root.documents[path], objects) for path in root.growing}
        if not root.length:  # the first mark decides on the dtype of its coordinate
            about = new_array(
                marks_variable(self._along, "int64" if isinstance(mark, int) else "float64"), (), self._along
            )
            for group in self._groups or {}:
                path = self._path(group, self._along)
                columns[path] = column(path, about, objects)
        return columns

    def _unchanged(self) -> Root:
        """The root as this store left it.

        A root that was written and reported as failed is taken as not written: its mark is written again.
        """
        root = self._existing()
        there = self._place.objects.get(ROOT)
        if there not in (root.text, self._attempted):
            found = json.loads(there)["consolidated_metadata"]["metadata"][self._along]["shape"][0] if there else 0
            raise StoreError(
                f"another recorder writes to this store: expected {root.length} marks in it, found {found}"
                + (", and other metadata" if found == root.length else "")
            )
        return root


def _check_names(groups: Mapping[str, Group], along: str) -> None:
    """Every path and name stands for one thing, and no group lies inside another but the root."""
    if "" not in groups:
        raise ValueError("expected a root group, '', which may be without variables")
    nodes: list[str] = [path for path in groups if path]
    for path in nodes:
        parts = path.split("/")
        if not all(part and not part.startswith(".") for part in parts):
            raise ValueError(f"expected the path of a group such as 'maps/6x14x14', got {path!r}")
    for path, group in groups.items():
        names = [along, *(["layer"] if group.layers else []), *group.sizes, *group.variables]
        nodes += [f"{path}/{name}" if path else name for name in names]
    if any(path.split("/")[0] == HEADS for path in nodes):
        raise ValueError(f"expected other names than {HEADS!r}, under which the tree has the numbers of the root")
    twice = [path for path in nodes if nodes.count(path) > 1]
    inside = [path for path in groups if any(path.startswith(f"{node}/") for node in nodes)]
    if twice or inside:
        raise ValueError(f"expected every name to stand for one thing, got twice or in each other: {twice + inside}")


def _clear_leftovers(place: Place, root: Root) -> None:
    """Delete what a killed run had begun: temporary files, scalars of a mark without a commit, half-rewritten maps."""
    place.clear_partial()
    for name in set(place.objects.names("")) - {path.split("/")[0] for path in root.documents} - {ROOT}:
        own = place.objects.get(f"{name}/zarr.json")
        # Only what this library has made: a user may keep arrays of his own beside it.
        if own is not None and json.loads(own).get("attributes", {}).get("description") == GIVEN:
            place.objects.delete_folder(name)
    delete_other_layout(place, root)
