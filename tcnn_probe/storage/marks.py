"""Writing of a mark: every array is extended, and the root that commits this is prepared."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import zarr

from tcnn_probe.schema import COORDINATES, Group, Variable
from tcnn_probe.storage.arrays import require_labels, require_variable, write_rows
from tcnn_probe.storage.checked import CheckedStore
from tcnn_probe.storage.root import GIVEN, LAYERS, Root, is_recorded, join, tables

__all__ = ["Mark", "write_mark"]

Mark = int | float


def write_mark(
    store: CheckedStore,
    root: Root | None,
    along: str,
    marks: Sequence[Mark],
    groups: Mapping[str, Group],
    rows: Mapping[str, Any],
    attrs: Mapping[str, Any],
) -> bytes:
    """Write all arrays of a mark; return the root, which is still to be committed.

    Args:
        store: Store to write to.
        root: Committed root; None for the first mark.
        along: Name of the marks' coordinate.
        marks: All marks, with the new one.
        groups: Groups of the recording; those that are new, or have new layers, are created or
            extended.
        rows: Values of the mark by path; scalars of earlier marks that have none get NaN.
        attrs: Attributes of the root to replace.
    """
    before = len(marks) - 1
    committed = {} if root is None else root.groups
    # Chunks of fill values are written too, because a missing chunk is an error. zarr warns of text
    # of fixed width and of consolidated metadata, which its specification does not include yet, and
    # of the lock.
    writes_all = zarr.config.set({"array.write_empty_chunks": True})
    with writes_all, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top = zarr.open_group(store, mode="a", use_consolidated=False)
        nodes = _undo_remains(top, root)
        top.update_attributes({**attrs})
        written: list[tuple[zarr.Array[Any], Any]] = []
        for path, group in groups.items():
            node = _require_group(top, path, tables(group))
            stored = nodes.get(join(path, along))
            written.append((_coordinate(node, along, marks, stored), marks[-1]))
            for name, variable in group.variables.items():
                row, stored = group.shape(name), nodes.get(join(path, name))
                array = require_variable(
                    node, name, variable, row, along, before, stored, maps=group.maps
                )
                written.append((array, rows[join(path, name)]))
            layers = {"layer": [*group.layers]} if group.layers else {}
            ranges = {name: range(size) for name, size in group.sizes.items()}
            changed = committed.get(path) != group
            for name, labels in {**layers, **ranges, **group.coords}.items():
                stored = nodes.get(join(path, name))
                require_labels(node, name, labels, stored, changed=changed)
        scalars = [name for name in rows if "/" not in name]
        scalars += [] if root is None else root.scalars
        for name in {*scalars} - groups[""].variables.keys():
            if name in nodes and (root is None or name not in root.documents):
                raise ValueError(f"{name!r} is the name of something else there")
            scalar = Variable((), "", name, GIVEN)
            stored = nodes.get(name)
            array = require_variable(top, name, scalar, (), along, before, stored)
            written.append((array, rows.get(name)))
        write_rows(written, len(marks))
        zarr.consolidate_metadata(store)
    return store.text


def _require_group(top: zarr.Group, path: str, attributes: Mapping[str, Any]) -> zarr.Group:
    """Return a group with these attributes, which is created with the groups around it."""
    node, parts = top, path.split("/") if path else []
    for part in parts:
        node = node.require_group(part)
    if not attributes.items() <= dict(node.attrs).items():
        node.update_attributes({**attributes})
    return node


def _coordinate(
    node: zarr.Group, along: str, marks: Sequence[Mark], stored: Any
) -> zarr.Array[Any]:
    """Return the array of the marks, with those before this one."""
    text: dict[str, Any] = {"long_name": along, "description": GIVEN}
    text |= COORDINATES.get(along, {})
    dtype = "float64" if isinstance(marks[0], float) else "int64"
    before = marks[:-1]
    variable = Variable((), "", **text, dtype=dtype)
    array = require_variable(node, along, variable, (), along, len(before), stored)
    if stored is None and before:
        array[:] = before
    return array


def _undo_remains(top: zarr.Group, root: Root | None) -> dict[str, Any]:
    """Delete arrays and groups that a killed mark has created,
    and layers that it has added to others.

    Return the arrays and groups that are there, by path.
    """
    nodes: dict[str, Any] = {}
    committed = {} if root is None else root.documents
    growing = {} if root is None else root.growing
    for path, node in [*top.members(max_depth=None)]:
        is_array = isinstance(node, zarr.Array)
        document: Mapping[str, Any] = node.metadata.to_dict()
        written = is_recorded(document) if is_array else LAYERS in node.attrs
        if written and path not in committed:
            if path in top:
                del top[path]
            continue
        nodes[path] = node
        if isinstance(node, zarr.Array) and path in growing:
            # The length along the marks is that of this mark anyway.
            shape = (node.shape[0], *growing[path]["shape"][1:])
            if node.shape != shape:
                node.resize(shape)
    return nodes
