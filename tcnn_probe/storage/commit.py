"""The root ``zarr.json``, which says what a recording is and how many marks it has; replacing it commits a mark."""

import asyncio
import json
import re
import uuid
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from zarr.abc.store import Store

from tcnn_probe.schema import COORDINATES, SCHEMA_VERSION, Group, StoreError, Variable
from tcnn_probe.storage.chunks import (
    CheckedStore,
    ChunkSize,
    Document,
    array_document,
    is_map,
    label_document,
    open_array,
    with_length,
)
from tcnn_probe.storage.directory import LOCK, entries
from tcnn_probe.storage.place import (
    ROOT,
    ROOT_BYTES,
    UNFINISHED,
    Place,
    get,
    listed,
    put,
    put_if,
    run,
)

__all__ = [
    "HEADS",
    "UNREADABLE",
    "Root",
    "all_of",
    "check_names",
    "check_replaceable",
    "commit",
    "documents_beside",
    "is_name",
]

VERSION, ALONG, LAYERS, COORDS, REPACKED = (
    "tcnn_probe_schema",
    "along",
    "layers",
    "coords",
    "repacked",
)
IDENTITY = "recording_id"
GIVEN = "As given to mark()."
HEADS = "heads"
"""Where a tree has the numbers of the root."""

UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of metadata that are not as they should be."""

# What opening costs grows with these, so a crafted root must not choose them. Recordings have a few hundred arrays.
MOST_ARRAYS = 4000
COORDINATE_BYTES = 256 * 2**20
COORDINATE_CHUNKS = 2**18

# Attributes of the recorder, in JSON, that are read when a recording is opened, continued or shown.
_JSON = {"images": list, "image_hashes": dict, "missing": dict, "unsupported": dict}

_METADATA = re.compile(rf"(?:(.+)/)?(?:{re.escape(ROOT)}|\.{re.escape(ROOT)}\.partial)")
_CHUNK = re.compile(r"(.+?)/c(?:/\d+)*(?:/\.\d+\.partial)?")


@dataclass(frozen=True)
class Root:
    """The root metadata of a recording."""

    attributes: Mapping[str, Any]  # of the root group
    # zarr.json of each array and further group by path, with the committed lengths.
    documents: Mapping[str, Document]
    text: bytes  # the object as stored
    # Labels of the coordinates that are not stored yet.
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        attributes: Mapping[str, Any],
        documents: Mapping[str, Document],
        **labels: Any,
    ) -> "Root":
        """Make the root to be written; ValueError if it could not be read again."""
        consolidated = {
            "kind": "inline",
            "must_understand": False,
            "metadata": documents,
        }
        document = _group_document(attributes) | {"consolidated_metadata": consolidated}
        # NaN is no JSON, and other readers would refuse the whole recording.
        text = json.dumps(document, allow_nan=False).encode()
        if len(text) > ROOT_BYTES or len(documents) > MOST_ARRAYS:
            raise ValueError(
                f"expected at most {MOST_ARRAYS} arrays and {ROOT_BYTES} bytes of metadata and attributes, "
                f"got {len(documents)} and {len(text)}"
            )
        return cls(attributes, documents, text, **labels)

    @classmethod
    def new(
        cls,
        groups: Mapping[str, Group],
        attrs: Mapping[str, Any],
        along: str,
        dtype: str,
    ) -> "Root":
        """Make the root of a recording without marks, which are to be of this dtype."""
        documents: dict[str, Document] = {}
        labels: dict[str, np.ndarray] = {}
        mark = Variable(
            (),
            "",
            **COORDINATES.get(along, {"long_name": along, "description": GIVEN}),
            dtype=dtype,
        )
        for path, group in groups.items():
            parts = path.split("/")
            for count in range(1, len(parts)):
                # zarr looks for every group on the way.
                documents.setdefault("/".join(parts[:count]), _group_document({}))
            # That of the root is the object in which all of these are.
            documents |= {path: _group_document(_tables(group))} if path else {}
            documents[_join(path, along)] = array_document(mark, (), along)
            for name, variable in group.variables.items():
                documents[_join(path, name)] = array_document(
                    variable, group.shape(name), along, maps=group.maps
                )
            layers = {"layer": [*group.layers]} if group.layers else {}
            ranges = {name: range(size) for name, size in group.sizes.items()}
            for name, values in {**layers, **ranges, **group.coords}.items():
                inner = _join(path, name)
                documents[inner], labels[inner] = label_document(name, values)
        fixed = {IDENTITY: uuid.uuid4().hex, VERSION: SCHEMA_VERSION, ALONG: along}
        # The user's attributes come first, and replace none of these.
        root = cls.of(
            {**attrs, **fixed, **_tables(groups[""])}, documents, labels=labels
        )
        root._check_sizes()
        return root

    @staticmethod
    def is_at(place: Place) -> bool:
        """Return True for a recording, of any schema version, damaged or not; StoreError for something else."""
        text = place.root()
        # The text is not parsed, because a damaged root of ours must also be told from a file of the user's.
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
            raise place.something_else(
                f"a {ROOT} of something else, or a damaged one"
            ) from error
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{place.name} has schema version {version!r}, expected {SCHEMA_VERSION}"
            )
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
        """Number of committed marks."""
        return self.documents[self.along]["shape"][0]

    @cached_property
    def arrays(self) -> dict[str, Document]:
        """The documents of all arrays."""
        return {
            path: about
            for path, about in self.documents.items()
            if about["node_type"] == "array"
        }

    @cached_property
    def sizes(self) -> dict[str, ChunkSize]:
        """Sizes of the chunks of all arrays; one of ``UNREADABLE`` if they are not cut as a recording's are."""
        return {path: ChunkSize.of(about) for path, about in self.arrays.items()}

    @cached_property
    def growing(self) -> dict[str, Document]:
        """The documents of the arrays over the marks."""
        return {
            path: about
            for path, about in self.arrays.items()
            if about["dimension_names"][0] == self.along
        }

    @cached_property
    def scalars(self) -> set[str]:
        """Names of the numbers that came with marks."""
        marked = {
            path
            for path, about in self.growing.items()
            if about["attributes"].get("description") == GIVEN
        }
        return {
            path
            for path in marked
            if "/" not in path and len(self.documents[path]["shape"]) == 1
        } - {self.along}

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups as they were created; units, names and descriptions as stored."""
        attributes = {"": self.attributes}
        for path, about in self.documents.items():
            if about["node_type"] == "group" and LAYERS in about["attributes"]:
                attributes[path] = about["attributes"]
        members: dict[str, dict[str, Document]] = {path: {} for path in attributes}
        for path, about in self.arrays.items():
            parent, _, name = path.rpartition("/")
            if (
                parent in members
                and path not in self.scalars
                and name not in (self.along, "layer")
            ):
                members[parent][name] = about
        return {
            path: self._group(path, members[path], about)
            for path, about in attributes.items()
        }

    def checked(self, store: Store) -> CheckedStore:
        """Wrap a store with this root, so that what is read of it is what the root says."""
        return CheckedStore(store, self.sizes, self.attributes.get(IDENTITY, ""))

    def with_mark(self, scalars: Iterable[str], attrs: Mapping[str, Any]) -> "Root":
        """Return the root that commits a further mark, which came with these numbers and attributes."""
        documents = dict(self.documents)
        for name in [name for name in scalars if name not in documents]:
            documents[name] = array_document(
                Variable((), "", name, GIVEN), (), self.along
            )
        growing = Root(self.attributes, documents, b"").growing
        documents |= {
            path: with_length(about, self.length + 1) for path, about in growing.items()
        }
        return Root.of({**self.attributes, **attrs}, documents, labels=self.labels)

    def with_groups(self, groups: Mapping[str, Group]) -> "Root":
        """Return the root of the same marks with groups, of which there were none: fill values so far.

        ValueError if a name is that of a scalar.
        """
        new = Root.new(
            groups, self.attributes, self.along, self.documents[self.along]["data_type"]
        )
        if clashes := sorted(
            new.documents.keys() & self.documents.keys() - {self.along}
        ):
            raise ValueError(
                f"{clashes[0]!r} was given to mark() before, and is now recorded"
            )
        growing = {
            path: with_length(about, self.length) for path, about in new.growing.items()
        }
        # The same recording goes on: readers from before are not refused.
        attributes = {**new.attributes, IDENTITY: self.attributes.get(IDENTITY, "")}
        return Root.of(
            attributes,
            {**new.documents, **growing, **self.documents},
            labels=new.labels,
        )

    def _group(
        self, path: str, members: Mapping[str, Document], attributes: Mapping[str, Any]
    ) -> Group:
        variables, sizes, maps = {}, {}, False
        for name, about in members.items():
            dims = tuple(about["dimension_names"])
            if dims[0] == self.along:
                text = {
                    key: about["attributes"].get(key, "")
                    for key in ("units", "long_name", "description")
                }
                variables[name] = Variable(
                    dims[1:], **text, dtype=str(np.dtype(about["data_type"]))
                )
                maps |= is_map(about)
            elif dims == (name,):
                sizes[name] = about["shape"][0]
        layers, coords = (
            json.loads(attributes.get(name, "{}")) for name in (LAYERS, COORDS)
        )
        if not all(
            isinstance(table, dict) for table in (layers, *layers.values(), coords)
        ):
            raise TypeError(f"{path!r} has no layer table")
        group = Group(variables, layers, sizes, maps, coords)
        for name in variables:
            if self.documents[_join(path, name)]["shape"] != [
                self.length,
                *group.shape(name),
            ]:
                raise ValueError(
                    f"{_join(path, name)} has a shape that does not fit its dimensions"
                )
        return group

    def _check(self, store: Store) -> None:
        """Raise one of ``UNREADABLE`` for what no recording writes."""
        if len(self.documents) > MOST_ARRAYS:
            raise ValueError(
                f"it has {len(self.documents)} arrays and groups, expected {MOST_ARRAYS} at most"
            )
        for path, about in self.documents.items():
            try:
                _check_document(store, path, about)
            except UNREADABLE as error:
                raise ValueError(f"{path!r}: {error}") from error
        self._check_sizes()
        lengths = {path: about["shape"][0] for path, about in self.growing.items()}
        if len(set(lengths.values())) != 1 or not all(
            _join(path, self.along) in lengths for path in self.groups
        ):
            raise ValueError(
                f"its arrays have unequal lengths along {self.along!r}: {lengths}"
            )
        for name, kind in _JSON.items():
            value = json.loads(self.attributes.get(name, json.dumps(kind())))
            if not isinstance(value, kind):
                raise TypeError(f"its attribute {name!r} is no {kind.__name__}")
            # Reasons by layer, for each variable.
            if name == "missing" and not all(
                isinstance(reasons, dict) for reasons in value.values()
            ):
                raise TypeError(f"its attribute {name!r} holds no tables")

    def _check_sizes(self) -> None:
        """Refuse arrays that take much memory or time before any of their values is looked at."""
        # xarray reads the labels of dimensions when a recording is opened.
        labels = [
            path
            for path, about in self.arrays.items()
            if about["dimension_names"] == [path.split("/")[-1]]
        ]
        coordinates = [self.sizes[path] for path in labels]
        total, chunks = (
            sum(size.array for size in coordinates),
            sum(size.chunks for size in coordinates),
        )
        # Many small chunks cost as much as a few large ones: each is a request.
        if total > COORDINATE_BYTES or chunks > COORDINATE_CHUNKS:
            raise ValueError(f"its coordinates take {total} bytes in {chunks} chunks")


def _check_document(store: Store, path: str, about: Document) -> None:
    """Raise one of ``UNREADABLE`` for an array or group that no recording writes."""
    if not all(is_name(part) for part in path.split("/")):
        raise ValueError("this is not a path in a recording")
    if about["node_type"] == "array":
        ChunkSize.of(about)
        shape = open_array(store, path, about).shape
        if len(shape) != len(about["dimension_names"]) or list(shape) != about["shape"]:
            raise ValueError("it has a shape that its names do not fit")
    elif about["node_type"] != "group":
        raise ValueError(f"it is a {about['node_type']!r}")


def is_name(text: str) -> bool:
    """Return True for a text that may be a part of a path, never for one that leads out of the store."""
    return (
        bool(text)
        and not text.startswith(".")
        and not {*text} & {*"/\\\0"}
        and text != ROOT
    )


def check_names(groups: Mapping[str, Group], along: str) -> None:
    """Require names that are used once, and groups that lie directly in the root, not in each other.

    Raises:
        ValueError: A path or name stands for two things, or a group lies inside another one.
    """
    nodes = [HEADS, *(path for path in groups if path)]
    for path, group in groups.items():
        names = [
            along,
            *(["layer"] if group.layers else []),
            *group.sizes,
            *group.variables,
        ]
        nodes += [_join(path, name) for name in names]
    # A tree of xarray has the children of a node beside its variables, under the same names.
    duplicates = [path for path in nodes if nodes.count(path) > 1]
    nested = [
        path for path in groups if any(path.startswith(f"{node}/") for node in nodes)
    ]
    if duplicates or nested:
        raise ValueError(
            f"expected distinct names, none of them inside another, got {duplicates + nested}"
        )


def check_replaceable(place: Place) -> None:
    """Refuse to delete what a recording has not written: StoreError for anything that its root does not speak of."""
    try:
        documents = json.loads(place.root() or b"")["consolidated_metadata"]["metadata"]
        arrays = {path for path, about in documents.items() if _is_cut_here(about)}
    except (
        UNREADABLE
    ):  # damaged: only what every recording has can be told from the user's
        documents, arrays = {}, set[str]()
    if place.directory is None:
        paths = dict.fromkeys(run(listed(place.store.list)), True)
    else:
        paths = dict(entries(place.directory))
    metadata = {
        match.group(1) or "" for path in paths if (match := _METADATA.fullmatch(path))
    }
    # A mark that was killed may have left scalars behind, and folders in which their metadata were being written.
    # Only scalars: other arrays are made with the recording, and never by a mark alone.
    arrays |= {path for path in metadata - documents.keys() if _is_scalar(place, path)}
    folders = {
        folder.as_posix()
        for path in arrays
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents)
    }
    for path, regular in paths.items():
        match, chunk = _METADATA.fullmatch(path), _CHUNK.fullmatch(path)
        known = path in folders | {LOCK, UNFINISHED} or (
            match is not None and (match.group(1) or "") in folders | {""}
        )
        if not regular or not (
            known or (chunk is not None and chunk.group(1) in arrays)
        ):
            raise StoreError(
                f"{place.name} holds more than a recording, and is not replaced: {path!r}"
            )


def _is_cut_here(about: Document) -> bool:
    """Return True for an array that is stored as a recording's are.

    The root also names the arrays and groups of a user who adds to the store with xarray, or copies of a recording.
    """
    try:
        return about["node_type"] == "array" and bool(ChunkSize.of(about))
    except UNREADABLE:
        return False


def _is_scalar(place: Place, path: str) -> bool:
    text = run(get(place.store, f"{path}/{ROOT}" if path else ROOT))
    return bool(path) and "/" not in path and (text is None or GIVEN.encode() in text)


async def commit(
    store: Store,
    old: Root | None,
    new: Root,
    values: Mapping[str, np.ndarray],
    precondition: dict[str, Any] | None = None,
) -> None:
    """Write a mark: first everything that it consists of, then the root that counts it, if the condition holds.

    Values are by path, of the mark, or of all marks for a new array; an array that has none gets its fill value.
    StoreError if the chunk to which the mark is added is damaged, or the condition does not hold.
    """
    known = {} if old is None else old.documents
    # Written before the chunks, so that what a killed mark leaves behind can be told from the user's own files.
    await all_of(
        documents_beside(
            store,
            {path: about for path, about in new.documents.items() if path not in known},
        )
    )
    labels = {path: values for path, values in new.labels.items() if path not in known}
    writes = [
        open_array(store, path, new.documents[path]).setitem(..., labels[path])
        for path in labels
    ]
    # This recorder holds the lock, so nobody else replaces anything in the recording.
    checked = store if old is None else CheckedStore(store, old.sizes, "")
    for path, about in new.growing.items():
        row = values.get(path)
        writes.append(
            _append(store, checked, path, about, row)
            if path in known
            else _begin(store, path, about, row)
        )
    await all_of(writes)
    # The root last: until then the mark is not there for any reader.
    await put_if(store, ROOT, new.text, precondition)


async def _begin(
    store: Store, path: str, document: Document, row: np.ndarray | None
) -> None:
    """Write all rows of a new array, or its last row and fill values before it."""
    before, fill = document["shape"][0] - 1, float(document["fill_value"])
    array = open_array(store, path, document)
    if row is not None and row.ndim == len(document["shape"]):
        await array.setitem(..., row)
        return
    if before:
        await open_array(store, path, with_length(document, before)).setitem(..., fill)
    await array.setitem(
        (slice(before, before + 1), ...), fill if row is None else row[None]
    )


async def _append(
    store: Store, checked: Store, path: str, document: Document, row: np.ndarray | None
) -> None:
    """Write the last row of an array.

    Chunks are as good as not there beyond the rows that are committed: what a killed run has left is written over.
    """
    before = document["shape"][0] - 1
    begins_chunk = (
        before % document["chunk_grid"]["configuration"]["chunk_shape"][0] == 0
    )
    # A chunk that begins with this row has no earlier rows to read and check.
    array = open_array(store if begins_chunk else checked, path, document)
    value = float(document["fill_value"]) if row is None else row[None]
    await array.setitem((slice(before, before + 1), ...), value)


def documents_beside(
    store: Store, documents: Mapping[str, Document]
) -> list[Coroutine[Any, Any, None]]:
    """Write the objects beside the chunks of arrays, for those who read without the root's metadata."""
    return [
        put(store, f"{path}/{ROOT}", json.dumps(about).encode())
        for path, about in documents.items()
    ]


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
