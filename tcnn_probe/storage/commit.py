"""The root ``zarr.json``, which says what a recording is and how many marks it has; to replace it is to commit one."""

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from zarr.abc.store import Store

from tcnn_probe.schema import COORDINATES, SCHEMA_VERSION, Group, Variable
from tcnn_probe.storage.chunks import Document, array_document, is_map, label_document, open_array, with_length
from tcnn_probe.storage.conditional import put_if
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.names import is_name
from tcnn_probe.storage.place import ROOT, Place, put

__all__ = [
    "GIVEN",
    "REPACKED",
    "UNREADABLE",
    "Root",
    "all_of",
    "commit",
    "documents_beside",
]

VERSION, ALONG, LAYERS, COORDS, REPACKED = "tcnn_probe_schema", "along", "layers", "coords", "repacked"
GIVEN = "As given to mark()."
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What metadata raise that are not as they should be."""


@dataclass(frozen=True)
class Root:
    """The root metadata of a recording."""

    attributes: Mapping[str, Any]  # of the root group
    documents: Mapping[str, Document]  # zarr.json of each array and further group by path, with the committed lengths
    text: bytes  # the object as stored
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)  # of coordinates that are not stored yet

    @classmethod
    def of(cls, attributes: Mapping[str, Any], documents: Mapping[str, Document], **labels: Any) -> "Root":
        """Make the root to be written."""
        consolidated = {"kind": "inline", "must_understand": False, "metadata": documents}
        document = _group_document(attributes) | {"consolidated_metadata": consolidated}
        return cls(attributes, documents, json.dumps(document, allow_nan=False).encode(), **labels)

    @classmethod
    def new(cls, groups: Mapping[str, Group], attrs: Mapping[str, Any], along: str, dtype: str) -> "Root":
        """Make the root of a recording without marks, which are to be of this dtype."""
        documents: dict[str, Document] = {}
        labels: dict[str, np.ndarray] = {}
        mark = Variable((), "", **COORDINATES.get(along, {"long_name": along, "description": GIVEN}), dtype=dtype)
        for path, group in groups.items():
            parts = path.split("/")
            for count in range(1, len(parts)):
                documents.setdefault("/".join(parts[:count]), _group_document({}))
            documents |= {path: _group_document(_tables(group))} if path else {}
            documents[_join(path, along)] = array_document(mark, (), along)
            for name, variable in group.variables.items():
                documents[_join(path, name)] = array_document(variable, group.shape(name), along, maps=group.maps)
            ranges = {name: range(size) for name, size in group.sizes.items()}
            for name, values in {
                **({"layer": [*group.layers]} if group.layers else {}),
                **ranges,
                **group.coords,
            }.items():
                inner = _join(path, name)
                documents[inner], labels[inner] = label_document(name, values)
        attributes = {**attrs, VERSION: SCHEMA_VERSION, ALONG: along, **_tables(groups[""])}
        return cls.of(attributes, documents, labels=labels)

    @staticmethod
    def is_at(place: Place) -> bool:
        """Whether a recording is at a place, of any schema version, damaged or not; StoreError if something else is."""
        text = place.root()
        if text is not None and VERSION not in text.decode(errors="replace"):
            raise place.something_else(f"a {ROOT} of something else")
        return text is not None

    @classmethod
    def read(cls, place: Place) -> "Root | None":
        """Read the root at a place, None if nothing is there.

        StoreError for something else, a recording of another schema version, or a damaged one.
        """
        text = place.root()
        if text is None:
            return None
        try:
            document = json.loads(text)
            attributes = document["attributes"]
            version = attributes[VERSION]
        except UNREADABLE as error:
            raise place.something_else(f"a {ROOT} of something else, or a damaged one") from error
        if version != SCHEMA_VERSION:
            raise StoreError(f"{place.name} has schema version {version!r}, expected {SCHEMA_VERSION}")
        try:
            root = cls(attributes, document["consolidated_metadata"]["metadata"], text)
            root._check(place.store)
        except UNREADABLE as error:
            raise StoreError(f"{place.name} has damaged metadata: {error!r}") from error
        return root

    @property
    def along(self) -> str:
        """Name of the marks' coordinate."""
        return self.attributes[ALONG]

    @property
    def length(self) -> int:
        """How many marks are committed."""
        return self.documents[self.along]["shape"][0]

    @cached_property
    def arrays(self) -> dict[str, Document]:
        """The documents of all arrays."""
        return {path: about for path, about in self.documents.items() if about["node_type"] == "array"}

    @cached_property
    def growing(self) -> dict[str, Document]:
        """The documents of the arrays over the marks."""
        return {path: about for path, about in self.arrays.items() if about["dimension_names"][0] == self.along}

    @cached_property
    def scalars(self) -> set[str]:
        """Names of the numbers that came with marks."""
        given = {path for path, about in self.growing.items() if about["attributes"].get("description") == GIVEN}
        return {path for path in given if "/" not in path and len(self.documents[path]["shape"]) == 1} - {self.along}

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups as they were created; units, names and descriptions as stored."""
        attributes = {"": self.attributes}
        for path, about in self.documents.items():
            if about["node_type"] == "group" and LAYERS in about["attributes"]:
                attributes[path] = about["attributes"]
        return {path: self._group(path, about) for path, about in attributes.items()}

    def with_mark(self, scalars: Iterable[str], attrs: Mapping[str, Any]) -> "Root":
        """Give the root that commits one mark more, which came with these numbers and attributes."""
        documents = dict(self.documents)
        for name in [name for name in scalars if name not in documents]:
            documents[name] = array_document(Variable((), "", name, GIVEN), (), self.along)
        growing = Root(self.attributes, documents, b"").growing
        documents |= {path: with_length(about, self.length + 1) for path, about in growing.items()}
        return Root.of({**self.attributes, **attrs}, documents, labels=self.labels)

    def with_groups(self, groups: Mapping[str, Group]) -> "Root":
        """Give the root of the same marks with groups, of which there were none: fill values so far.

        ValueError if a name is that of a scalar.
        """
        new = Root.new(groups, self.attributes, self.along, self.documents[self.along]["data_type"])
        if taken := sorted(new.documents.keys() & self.documents.keys() - {self.along}):
            raise ValueError(f"{taken[0]!r} was given to mark() before, and is now recorded")
        growing = {path: with_length(about, self.length) for path, about in new.growing.items()}
        return Root.of(new.attributes, {**new.documents, **growing, **self.documents}, labels=new.labels)

    def _group(self, path: str, attributes: Mapping[str, Any]) -> Group:
        variables, sizes, maps, scalars = {}, {}, False, self.scalars
        for name, about in self.arrays.items():
            parent, _, short = name.rpartition("/")
            dims = tuple(about["dimension_names"])
            if parent != path or short in (self.along, "layer") or name in scalars:
                continue
            if dims[0] == self.along:
                text = {key: about["attributes"].get(key, "") for key in ("units", "long_name", "description")}
                variables[short] = Variable(dims[1:], **text, dtype=str(np.dtype(about["data_type"])))
                maps |= is_map(about)
            elif dims == (short,):
                sizes[short] = about["shape"][0]
        layers, coords = (json.loads(attributes.get(name, "{}")) for name in (LAYERS, COORDS))
        if not all(isinstance(table, dict) for table in (layers, *layers.values(), coords)):
            raise TypeError(f"the layer table of {path!r} is none")
        group = Group(variables, layers, sizes, maps, coords)
        for name in variables:
            if self.documents[_join(path, name)]["shape"] != [self.length, *group.shape(name)]:
                raise ValueError(f"{_join(path, name)} has another shape than its dimensions")
        return group

    def _check(self, store: Store) -> None:
        """Whether it is what a recording writes. Raises one of ``UNREADABLE`` if not."""
        for path, about in self.documents.items():
            if not all(is_name(part) for part in path.split("/")):
                raise ValueError(f"{path!r} is no path in a recording")
            if about["node_type"] == "array":
                shape = open_array(store, path, about).shape
                if len(shape) != len(about["dimension_names"]) or list(shape) != about["shape"]:
                    raise ValueError(f"{path} has other dimensions than names")
            elif about["node_type"] != "group":
                raise ValueError(f"{path} is a {about['node_type']!r}")
        lengths = {path: about["shape"][0] for path, about in self.growing.items()}
        if len(set(lengths.values())) != 1 or not all(_join(path, self.along) in lengths for path in self.groups):
            raise ValueError(f"its arrays have unequal lengths along {self.along!r}: {lengths}")


async def commit(
    store: Store,
    old: Root | None,
    new: Root,
    values: Mapping[str, np.ndarray],
    only: dict[str, Any] | None = None,
) -> None:
    """Write a mark: first everything that it consists of, then the root that counts it, if the condition holds.

    Values are by path, of the mark, or of all marks for a new array; an array that has none gets its fill value.
    StoreError if the chunk to which the mark is added is damaged, or the condition does not hold.
    """
    there = {} if old is None else old.documents
    writes = documents_beside(store, {path: about for path, about in new.documents.items() if path not in there})
    for path in new.labels.keys() - there.keys():
        writes.append(open_array(store, path, new.documents[path]).setitem(..., new.labels[path]))
    for path, about in new.growing.items():
        writes.append(_append(store, path, about, values.get(path), new=path not in there))
    await all_of(writes)
    await put_if(store, ROOT, new.text, only)


async def _append(store: Store, path: str, document: Document, row: np.ndarray | None, *, new: bool) -> None:
    """Write the last row of an array, or all of its rows; of a new array, the rows before it get the fill value.

    Chunks are as good as not there beyond the rows that are committed: what a killed run has left is written over.
    """
    before, fill = document["shape"][0] - 1, float(document["fill_value"])
    array = open_array(store, path, document)
    if row is not None and row.ndim == len(document["shape"]):
        await array.setitem(..., row)
        return
    if new and before:
        await open_array(store, path, with_length(document, before)).setitem(..., fill)
    try:
        await array.setitem((slice(before, before + 1), ...), fill if row is None else row[None])
    except ValueError as error:
        raise StoreError(f"the last chunk of {path!r} in {store} is damaged: {error}") from error


def documents_beside(store: Store, documents: Mapping[str, Document]) -> list[Coroutine[Any, Any, None]]:
    """Write the objects beside the chunks of arrays, for those who read without the root's metadata."""
    return [put(store, f"{path}/{ROOT}", json.dumps(about).encode()) for path, about in documents.items()]


async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all, and raise the first error when none is under way any more: it would land on what is done about it."""
    for ended in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


def _group_document(attributes: Mapping[str, Any]) -> Document:
    return {"attributes": attributes, "zarr_format": 3, "node_type": "group"}


def _tables(group: Group) -> dict[str, str]:
    layers = {name: dict(about) for name, about in group.layers.items()}
    coords = {name: list(labels) for name, labels in group.coords.items()}
    tables = {LAYERS: layers} | ({COORDS: coords} if coords else {})
    return {name: json.dumps(table, allow_nan=False) for name, table in tables.items()}


def _join(group: str, name: str) -> str:
    return f"{group}/{name}" if group else name
