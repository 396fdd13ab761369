"""Writing of a mark: every array is extended, and the root that commits this is prepared."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import zarr

from tcnn_probe.schema import COORDINATES, Group, Variable
from tcnn_probe.storage.arrays import create_variable, write_labels, write_rows
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
    *earlier, mark = marks
    # Chunks of fill values are written too, because a missing chunk is an error. zarr warns of text
    # of fixed width and of consolidated metadata, which its specification does not include yet, and
    # of the lock.
    writes_all = zarr.config.set({"array.write_empty_chunks": True})
    with writes_all, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top = zarr.open_group(store, mode="a", use_consolidated=False)
        arrays = _undo_remains(top, root)
        top.update_attributes({**attrs})
        extended: list[tuple[zarr.Array[Any], Any]] = []

        def extend(
            path: str, variable: Variable, row: Any, sizes: Sequence[int] = (), before: Any = None
        ) -> None:
            array = arrays.get(path)
            if array is None:
                shape = (len(earlier), *sizes)
                array = create_variable(top, path, variable, shape, along, before)
            extended.append((array, row))

        for path, group in groups.items():
            node = top
            # One by one, because a kill could leave a group without the one around it, which hides
            # it from the next recorder.
            for part in path.split("/") if path else ():
                node = node.require_group(part)
            if not (about := tables(group)).items() <= dict(node.attrs).items():
                node.update_attributes({**about})
            extend(join(path, along), _coordinate(along, mark), mark, before=earlier)
            for name, variable in group.variables.items():
                full = join(path, name)
                extend(full, variable, rows[full], group.shape(name))
            layers = {"layer": [*group.layers]} if group.layers else {}
            ranges = {name: range(size) for name, size in group.sizes.items()}
            is_stored = root is not None and root.groups.get(path) == group
            for name, labels in {**layers, **ranges, **group.coords}.items():
                if not is_stored:
                    write_labels(node, name, labels, arrays.get(join(path, name)))
        scalars = {name for name in rows if "/" not in name} | (root.scalars if root else set())
        for name in scalars - groups[""].variables.keys():
            extend(name, Variable((), "", name, GIVEN), rows.get(name))
        write_rows(extended, len(marks))
        zarr.consolidate_metadata(store)
    return store.text


def _coordinate(along: str, mark: Mark) -> Variable:
    """Return the description of the coordinate of marks."""
    text: dict[str, Any] = {"long_name": along, "description": GIVEN, **COORDINATES.get(along, {})}
    return Variable((), "", **text, dtype="float64" if isinstance(mark, float) else "int64")


def _undo_remains(top: zarr.Group, root: Root | None) -> dict[str, zarr.Array[Any]]:
    """Bring the arrays of a recording into the state of the committed root; return them by path.

    A killed mark may have extended some, and created others.
    """
    arrays: dict[str, zarr.Array[Any]] = {}
    committed = {} if root is None else root.documents
    for path, node in [*top.members(max_depth=None)]:
        if isinstance(node, zarr.Array):
            is_own = is_recorded(node.metadata.to_dict())
        else:
            is_own = LAYERS in node.attrs
        if is_own and path not in committed:
            del top[path]
        elif is_own and isinstance(node, zarr.Array):
            arrays[path] = node
            if [*node.shape] != committed[path]["shape"]:
                node.resize(committed[path]["shape"])
    return arrays
