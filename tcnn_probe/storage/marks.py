"""Writing of a mark: every array is extended, and the root that commits this is prepared."""

import uuid
import warnings
from collections.abc import Mapping
from typing import Any

import zarr
from zarr.abc.store import Store

from tcnn_probe.schema import SCHEMA_VERSION, Group, Variable
from tcnn_probe.storage.arrays import GIVEN, create_group, create_variable, write_rows
from tcnn_probe.storage.checked import CheckedStore
from tcnn_probe.storage.root import (
    ALONG,
    IDENTITY,
    LAYERS,
    VERSION,
    Root,
    is_recorded,
    tables,
)

__all__ = ["write_mark"]

Mark = int | float


def write_mark(
    store: CheckedStore,
    root: Root | None,
    along: str,
    marks: list[Mark],
    rows: Mapping[str, Any],
    created: tuple[Mapping[str, Group], Mapping[str, Any]] | None,
    attrs: Mapping[str, Any],
) -> bytes:
    """Write all arrays of a mark; return the root, which is still to be committed.

    Args:
        store: Store to write to.
        root: Committed root; None for the first mark.
        along: Name of the marks' coordinate.
        marks: All marks, with the new one.
        rows: Values of the mark by path; arrays without a value get their fill value.
        created: Groups to create or to extend, and attributes of a new recording.
        attrs: Attributes of the root to replace.
    """
    before = marks[:-1]
    dtype = "float64" if isinstance(marks[0], float) else "int64"
    # Chunks of fill values are written too, because a missing chunk is an error. zarr warns of text of fixed width and
    # of consolidated metadata, which its specification does not include yet, and of the lock.
    writes_all = zarr.config.set({"array.write_empty_chunks": True})
    with writes_all, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if root is None:
            zarr.create_group(store)
        else:
            _undo_remains(store, root)
        if created is not None:
            groups, attributes = created
            identity = {} if root is None else root.attributes
            fixed = {
                IDENTITY: identity.get(IDENTITY, uuid.uuid4().hex),
                VERSION: SCHEMA_VERSION,
                ALONG: along,
            }
            for path, about in groups.items():
                # The user's attributes come first, so that they cannot replace the fixed ones.
                of_root = {} if path else {**attributes, **fixed}
                table = {**of_root, **tables(about)}
                committed = {} if root is None else root.documents
                create_group(store, path, about, along, table, before, dtype, committed)
        group = zarr.open_group(store, mode="r+", use_consolidated=False)
        group.update_attributes({**attrs})
        members = dict(group.members(max_depth=None))
        arrays = {
            path: array
            for path, array in members.items()
            if isinstance(array, zarr.Array) and _grows(array, along)
        }
        for name in rows.keys() - arrays.keys():
            if name in members:
                raise ValueError(
                    f"{name!r} is the name of something else there: give the scalar another one"
                )
            scalar = Variable((), "", name, GIVEN)
            arrays[name] = create_variable(
                group, name, scalar, (), along, marks=len(before)
            )
        last = {path: marks[-1] for path in arrays if path.split("/")[-1] == along}
        values = {**rows, **last}
        write_rows(
            [(array, values.get(path)) for path, array in arrays.items()], len(marks)
        )
        zarr.consolidate_metadata(store)
    return store.text


def _grows(array: zarr.Array[Any], along: str) -> bool:
    """Return whether this is an array of the recording over the marks."""
    document: Mapping[str, Any] = array.metadata.to_dict()
    return is_recorded(document) and document["dimension_names"][0] == along


def _undo_remains(store: Store, root: Root) -> None:
    """Delete arrays and groups that a killed mark has created, and layers that it has added to others."""
    group = zarr.open_group(store, mode="r+", use_consolidated=False)
    for path, node in [*group.members(max_depth=None)]:
        is_array = isinstance(node, zarr.Array)
        written = (
            is_recorded(node.metadata.to_dict()) if is_array else LAYERS in node.attrs
        )
        committed = root.documents.get(path)
        if committed is None and written and path in group:
            del group[path]
        elif committed is not None and written:
            if isinstance(node, zarr.Group):
                if dict(node.attrs) != committed["attributes"]:
                    node.update_attributes({**committed["attributes"]})
                continue
            # The length along the marks is that of the next mark anyway.
            length = node.shape[:1] if path in root.growing else ()
            shape = (*length, *committed["shape"][len(length) :])
            if node.shape != shape:
                node.resize(shape)
