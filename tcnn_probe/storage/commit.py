"""The root ``zarr.json``, which describes a recording and its number of marks; replacing it commits a mark."""

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
"""Name of the node of a tree with the arrays of the root group."""

UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that invalid metadata can raise when they are read."""

# The cost of opening a recording grows with these, so they are limited for crafted roots. Recordings have a few hundred
# arrays.
MOST_ARRAYS = 4000
COORDINATE_BYTES = 256 * 2**20
COORDINATE_CHUNKS = 2**18

# JSON attributes that the recorder writes and that are read when a recording is opened, continued or shown.
_JSON = {"images": list, "image_hashes": dict, "missing": dict, "unsupported": dict}

_METADATA = re.compile(rf"(?:(.+)/)?(?:{re.escape(ROOT)}|\.{re.escape(ROOT)}\.partial)")
_CHUNK = re.compile(r"(.+?)/c(?:/\d+)*(?:/\.\d+\.partial)?")


@dataclass(frozen=True)
class Root:
    """The root metadata of a recording."""

    attributes: Mapping[str, Any]  # of the root group
    # The zarr.json of each array and of each other group, by path, with the committed lengths.
    documents: Mapping[str, Document]
    text: bytes  # the object as stored
    # Labels of coordinates that are not stored yet.
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        attributes: Mapping[str, Any],
        documents: Mapping[str, Document],
        **labels: Any,
    ) -> "Root":
        """Create a root to be written; ValueError if it could not be read again."""
        consolidated = {
            "kind": "inline",
            "must_understand": False,
            "metadata": documents,
        }
        document = _group_document(attributes) | {"consolidated_metadata": consolidated}
        # NaN is not valid JSON, and other readers would refuse the whole recording.
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
        """Create the root of a recording without marks, whose marks will have this dtype."""
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
                # zarr needs every parent group.
                documents.setdefault("/".join(parts[:count]), _group_document({}))
            # The document of the root group is the object that contains all of these.
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
        # The user's attributes come first, so that they cannot replace the fixed ones.
        root = cls.of(
            {**attrs, **fixed, **_tables(groups[""])}, documents, labels=labels
        )
        root._check_sizes()
        return root

    @staticmethod
    def is_at(place: Place) -> bool:
        """Return True for a recording of any schema version, even a damaged one; StoreError for something else."""
        text = place.root()
        # The text is not parsed, because even a damaged root of ours must be told from a user's file.
        if text is not None and VERSION not in text.decode(errors="replace"):
            raise place.something_else(f"a {ROOT} of something else")
        return text is not None

    @classmethod
    def read(cls, place: Place) -> "Root | None":
        """Read the root at a place; None if the place is empty.

        StoreError for something else, a recording of another schema version, or a damaged recording.
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
        """Sizes of the chunks of all arrays; an error of ``UNREADABLE`` if no recording has such chunks."""
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
        """Names of the scalars that were given to ``mark()``."""
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
        """The groups as they were created, with units, names and descriptions as stored."""
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
        """Wrap a store so that its chunks are checked against this root when they are read."""
        return CheckedStore(store, self.sizes, self.attributes.get(IDENTITY, ""))

    def with_mark(self, scalars: Iterable[str], attrs: Mapping[str, Any]) -> "Root":
        """Return the root that commits one more mark, with these scalars and attributes."""
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
        """Return the root with groups added to a recording that had only scalars: earlier marks get fill values.

        ValueError if a variable has the name of a scalar.
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
        # The identity is kept, because this is the same recording and open readers remain valid.
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
        """Raise an error of ``UNREADABLE`` if no recording has such metadata."""
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
        """Raise ValueError if opening would take much memory or time before any value is needed."""
        # xarray reads the labels of dimensions when it opens a recording.
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
        # Many small chunks cost as much as a few large ones, because each is a request.
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
    """Return True for a text that may be a part of a path; such a text cannot lead out of the store."""
    return (
        bool(text)
        and not text.startswith(".")
        and not {*text} & {*"/\\\0"}
        and text != ROOT
    )


def check_names(groups: Mapping[str, Group], along: str) -> None:
    """Check that each name is used once, and that no group lies inside another one.

    Raises:
        ValueError: A path or name is used twice, or a group lies inside another one.
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
    # In an xarray tree, children and variables of a node share one namespace.
    duplicates = [path for path in nodes if nodes.count(path) > 1]
    nested = [
        path for path in groups if any(path.startswith(f"{node}/") for node in nodes)
    ]
    if duplicates or nested:
        raise ValueError(
            f"expected distinct names, none of them inside another, got {duplicates + nested}"
        )


def check_replaceable(place: Place) -> None:
    """Raise StoreError if a place holds something that its recording has not written, as replacing would delete it."""
    try:
        documents = json.loads(place.root() or b"")["consolidated_metadata"]["metadata"]
        arrays = {
            path for path, about in documents.items() if _is_recorded_array(about)
        }
    except (
        UNREADABLE
    ):  # the root is damaged, so only files that every recording has are recognised
        documents, arrays = {}, set[str]()
    if place.directory is None:
        paths = dict.fromkeys(run(listed(place.store.list)), True)
    else:
        paths = dict(entries(place.directory))
    metadata = {
        match.group(1) or "" for path in paths if (match := _METADATA.fullmatch(path))
    }
    # A mark that was killed may have left arrays of new scalars, or folders for their metadata. Other arrays are
    # created with the recording, never by a mark.
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


def _is_recorded_array(about: Document) -> bool:
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
    """Write the arrays of a mark, then the root that commits it, if the precondition holds.

    Values are given by path: those of the mark, or those of all marks for a new array; an array without values gets its
    fill value. StoreError if the chunk to which the mark is added is damaged, or if the precondition does not hold.
    """
    known = {} if old is None else old.documents
    # Metadata are written before chunks, so that remains of a killed mark can be told from the user's files.
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
    # The identity is not checked, because this recorder holds the lock and nobody else replaces the recording.
    checked = store if old is None else CheckedStore(store, old.sizes, "")
    for path, about in new.growing.items():
        row = values.get(path)
        writes.append(
            _append(store, checked, path, about, row)
            if path in known
            else _begin(store, path, about, row)
        )
    await all_of(writes)
    # The root is written last: until then no reader sees the mark.
    await put_if(store, ROOT, new.text, precondition)


async def _begin(
    store: Store, path: str, document: Document, row: np.ndarray | None
) -> None:
    """Write all rows of a new array, or its last row after fill values."""
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

    Rows beyond the committed ones are ignored: remains of a killed run are overwritten.
    """
    before = document["shape"][0] - 1
    begins_chunk = (
        before % document["chunk_grid"]["configuration"]["chunk_shape"][0] == 0
    )
    # A chunk that begins with this row has no earlier rows that need to be read and checked.
    array = open_array(store if begins_chunk else checked, path, document)
    value = float(document["fill_value"]) if row is None else row[None]
    await array.setitem((slice(before, before + 1), ...), value)


def documents_beside(
    store: Store, documents: Mapping[str, Document]
) -> list[Coroutine[Any, Any, None]]:
    """Return coroutines that write ``zarr.json`` of arrays and groups, for readers without consolidated metadata."""
    return [
        put(store, f"{path}/{ROOT}", json.dumps(about).encode())
        for path, about in documents.items()
    ]


async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines, and raise the first error only after all have ended, so that none writes later."""
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
