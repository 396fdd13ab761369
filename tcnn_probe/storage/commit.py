"""The root ``zarr.json``: what a recording is, and how many marks of it are committed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tcnn_probe.schema import COORDINATES, SCHEMA_VERSION, Group, Variable
from tcnn_probe.storage.chunks import (
    GIVEN,
    Document,
    coordinates,
    is_map,
    new_array,
    own_document,
    own_length,
    with_length,
)
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.place import ROOT, Place

__all__ = ["ALONG", "LAYERS", "VERSION", "Root", "given", "marks_variable", "new_recording", "parsed"]

VERSION = "tcnn_probe_schema"
ALONG = "along"
LAYERS = "layers"
COORDS = "coords"


@dataclass(frozen=True)
class Root:
    """The root metadata of a recording.

    Args:
        attributes: of the root group.
        documents: for the path of each array and further group its ``zarr.json``, with the committed lengths.
        text: the object itself.
    """

    attributes: Mapping[str, Any]
    documents: Mapping[str, Document]
    text: bytes

    @classmethod
    def of(cls, attributes: Mapping[str, Any], documents: Mapping[str, Document]) -> "Root":
        """The root to be written."""
        consolidated = {"kind": "inline", "must_understand": False, "metadata": documents}
        document = {
            "attributes": attributes,
            "zarr_format": 3,
            "consolidated_metadata": consolidated,
            "node_type": "group",
        }
        return cls(attributes, documents, json.dumps(document, allow_nan=False).encode())

    @classmethod
    def read(cls, place: Place) -> "Root | None":
        """What is at a place, None if it is vacant.

        Raises:
            StoreError: something else, or a recording of another schema version.
        """
        text = place.root()
        if text is None:
            return None
        document = parsed(text, place)
        version = document["attributes"][VERSION]
        if version != SCHEMA_VERSION:
            older = isinstance(version, int) and version < SCHEMA_VERSION
            advice = f"tcnn_probe.migrate({place.name!r}) upgrades it" if older else "it needs a newer tcnn_probe"
            raise StoreError(f"{place.name} has schema version {version}, expected {SCHEMA_VERSION}: {advice}")
        root = cls(document["attributes"], document["consolidated_metadata"]["metadata"], text)
        lengths = {path: root.documents[path]["shape"][0] for path in root.growing}
        if len(set(lengths.values())) != 1 or root.along not in lengths:
            raise StoreError(f"{place.name} has arrays of unequal lengths along {root.along!r}: {lengths}")
        return root

    @property
    def along(self) -> str:
        """Name of the marks' coordinate."""
        return self.attributes.get(ALONG, "epoch")

    @property
    def length(self) -> int:
        """How many marks are committed."""
        return self.documents[self.along]["shape"][0]

    @property
    def growing(self) -> list[str]:
        """Paths of the arrays over the marks."""
        arrays = {path: about for path, about in self.documents.items() if about["node_type"] == "array"}
        return [path for path, about in arrays.items() if (about.get("dimension_names") or [None])[0] == self.along]

    @property
    def scalars(self) -> list[str]:
        """Names of the root variables that came with marks."""
        return [path for path in self.growing if path != self.along and given(self.documents[path])]

    def groups(self) -> dict[str, Group]:
        """The groups as they were created; units, names and descriptions as stored."""
        attributes = {"": {LAYERS: "{}", **self.attributes}}
        for path, about in self.documents.items():
            if about["node_type"] == "group" and LAYERS in about.get("attributes", {}):
                attributes[path] = about["attributes"]
        return {path: self._group(path, about) for path, about in attributes.items()}

    def _group(self, path: str, attributes: Mapping[str, Any]) -> Group:
        prefix = f"{path}/" if path else ""
        variables, sizes, maps = {}, {}, False
        for name, about in self.documents.items():
            if about["node_type"] != "array" or not name.startswith(prefix) or "/" in name.removeprefix(prefix):
                continue
            short = name.removeprefix(prefix)
            dims = about.get("dimension_names") or []
            if dims[:1] == [self.along]:
                if short != self.along and not (path == "" and given(about)):
                    text = {key: about["attributes"].get(key, "") for key in ("units", "long_name", "description")}
                    variables[short] = Variable(tuple(dims[1:]), **text, dtype=about["data_type"])
                    maps |= is_map(about)
            elif dims == [short] and short != "layer":
                sizes[short] = about["shape"][0]
        layers, coords = (json.loads(attributes.get(name, "{}")) for name in (LAYERS, COORDS))
        return Group(variables, layers, sizes, maps, coords)


def parsed(text: bytes, place: Place) -> dict[str, Any]:
    """The root metadata of a zarr group, of any schema version.

    Raises:
        StoreError: it is none, or not that of a recording.
    """
    try:
        document = json.loads(text)
        if document["node_type"] == "group" and VERSION in document["attributes"]:
            document["consolidated_metadata"]["metadata"].items()
            return document
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise place.something_else() from error
    raise place.something_else()


def given(document: Document) -> bool:
    """Whether an array holds a scalar that came with a mark."""
    return document["attributes"].get("description") == GIVEN and len(document["shape"]) == 1


def new_recording(groups: Mapping[str, Group], attrs: Mapping[str, Any], along: str) -> tuple[Root, dict[str, bytes]]:
    """A recording without marks.

    Returns:
        Its root, and every object of it, the root's own included.
    """
    objects: dict[str, bytes] = {}
    documents: dict[str, Document] = {}
    attributes: dict[str, Any] = {**attrs, VERSION: SCHEMA_VERSION, ALONG: along, **_tables(groups[""])}
    for path in groups:
        for inner in [*_parents(path), path] if path else []:
            documents.setdefault(inner, _group_document({}))
        if path:
            documents[path] = _group_document(_tables(groups[path]))
    for path, group in groups.items():
        prefix = f"{path}/" if path else ""
        arrays = {along: new_array(marks_variable(along), (), along)}
        for name, variable in group.variables.items():
            arrays[name] = new_array(variable, group.shape(name), along, maps=group.maps)
        documents |= {prefix + name: about for name, about in arrays.items()}
        for key, data in coordinates(group).items():
            objects[prefix + key] = data
            if key.endswith("/zarr.json"):
                documents[prefix + key.removesuffix("/zarr.json")] = json.loads(data)
    root = Root.of(attributes, documents)
    growing = set(root.growing)
    for path, about in documents.items():
        own = with_length(about, own_length(about, 0)) if path in growing else about
        objects |= own_document(path, own)
    objects[ROOT] = root.text
    return root, objects


def marks_variable(along: str, dtype: str = "int64") -> Variable:
    """The marks' own coordinate."""
    about = COORDINATES.get(along, {"long_name": along, "description": GIVEN})
    return Variable((), "", **about, dtype=dtype)


def _group_document(attributes: dict[str, Any]) -> Document:
    return {"attributes": attributes, "zarr_format": 3, "node_type": "group"}


def _tables(group: Group) -> dict[str, str]:
    layers = {name: dict(about) for name, about in group.layers.items()}
    coords = {name: list(labels) for name, labels in group.coords.items()}
    tables = {LAYERS: layers} | ({COORDS: coords} if coords else {})
    return {name: json.dumps(table, allow_nan=False) for name, table in tables.items()}


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
