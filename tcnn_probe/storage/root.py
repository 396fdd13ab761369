"""The root ``zarr.json``, which describes a recording; a mark writes it last."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tcnn_probe.schema import SCHEMA_VERSION, Group, StoreError, Variable
from tcnn_probe.storage.checked import CheckedStore
from tcnn_probe.storage.place import ROOT, Place

__all__ = [
    "ALONG",
    "BY_RUN",
    "COORDS",
    "GIVEN",
    "HEADS",
    "IDENTITY",
    "LAYERS",
    "OWN_ATTRIBUTES",
    "VERSION",
    "Root",
    "is_left_over",
    "is_recorded",
    "join",
    "tables",
]

VERSION, ALONG, LAYERS, COORDS = "tcnn_probe_schema", "along", "layers", "coords"
IDENTITY = "recording_id"
BY_RUN = ("missing", "unsupported")
"""Attributes with a table for each run, if several recordings are opened together."""
OWN_ATTRIBUTES = frozenset(
    [VERSION, ALONG, LAYERS, COORDS, IDENTITY, *BY_RUN, "images", "image_hashes", "weights"]
)
"""Attributes that a recording writes itself, and users must not."""
GIVEN = "As given to mark()."
"""Description of scalars, which tells them from recorded variables."""
HEADS = "heads"
"""Name of the node of a tree with the arrays of the root group."""


@dataclass(frozen=True)
class Root:
    """The committed metadata of a recording; empty before its first mark."""

    # Of the root group.
    attributes: Mapping[str, Any] = field(default_factory=dict)
    # Of each array and other group.
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # The object as stored; None if there is none.
    text: bytes | None = None

    @classmethod
    def read(cls, place: Place) -> "Root":
        """Read the root at a place, see :meth:`parse`."""
        return cls.parse(place.root(), place)

    @classmethod
    def parse(cls, text: bytes | None, place: Place) -> "Root":
        """Read the text of a root; None gives an empty one.

        StoreError for something else, a recording of another schema version, or damaged metadata.
        """
        if text is None:
            return cls()
        try:
            document = json.loads(text)
            attributes = document["attributes"]
            version = attributes[VERSION]
        except (LookupError, TypeError, ValueError) as error:
            raise place.something_else(f"a {ROOT} of something else, or a damaged one") from error
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{place.name} has schema version {version!r}, expected {SCHEMA_VERSION}: read it "
                "with the version of tcnn_probe that wrote it, or record anew, at another path"
            )
        try:
            root = cls(attributes, document["consolidated_metadata"]["metadata"], text)
            assert root.length >= 0
        except (LookupError, TypeError) as error:
            raise StoreError(
                f"{place.name} has damaged metadata ({error!r}). Those of a copy need "
                "zarr.consolidate_metadata and the dimension of marks, as after "
                "isel(epoch=[-1])"
            ) from error
        return root

    def checked(self, place: Place, *, writes: bool = False) -> CheckedStore:
        """Return the store for reading this recording, or for writing it under its lock."""
        identity = "" if writes else self.attributes.get(IDENTITY, "")
        return CheckedStore(place.store, self.documents, identity)

    @property
    def along(self) -> str:
        """Name of the marks' coordinate."""
        return self.attributes.get(ALONG, "")

    @property
    def length(self) -> int:
        """Number of committed marks."""
        return self.documents[self.along]["shape"][0]

    @cached_property
    def scalars(self) -> set[str]:
        """Names of the scalars that were given to ``mark()``."""
        return {
            path
            for path, about in self.documents.items()
            if "/" not in path
            and is_recorded(about)
            and about["attributes"].get("description") == GIVEN
        } - {self.along}

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups as they were created, with units, names and descriptions as stored."""
        groups = {"": self._group("", self.attributes)}
        for path, about in self.documents.items():
            if about["node_type"] == "group" and LAYERS in about["attributes"]:
                groups[path] = self._group(path, about["attributes"])
        return groups

    def _group(self, path: str, attributes: Mapping[str, Any]) -> Group:
        variables, sizes = {}, {}
        for full_name, about in self.documents.items():
            parent, _, name = full_name.rpartition("/")
            if not is_recorded(about) or parent != path or name in (self.along, "layer"):
                continue
            dims = about["dimension_names"]
            if dims == [name]:
                sizes[name] = about["shape"][0]
            elif dims[0] == self.along and full_name not in self.scalars:
                text = {
                    key: about["attributes"].get(key, "")
                    for key in ("units", "long_name", "description")
                }
                dtype = str(np.dtype(about["data_type"]))
                variables[name] = Variable((*dims[1:],), **text, dtype=dtype)
        layers, coords = (json.loads(attributes.get(name, "{}")) for name in (LAYERS, COORDS))
        return Group(variables, layers, sizes, coords)


def is_recorded(document: Mapping[str, Any]) -> bool:
    """Return whether these are the metadata of a recorded array, and not of a user's."""
    if document["node_type"] != "array" or not document.get("dimension_names"):
        return False
    # Older recordings keep maps in shards.
    return document["codecs"][-1]["name"] in ("crc32c", "sharding_indexed")


def is_left_over(document: Mapping[str, Any]) -> bool:
    """Return whether an array or group that the root lacks may be of a mark that was killed."""
    if document["node_type"] == "group":
        return LAYERS in document["attributes"]
    # New recordings have no shards, so another sharded array is the user's.
    return is_recorded(document) and document["codecs"][-1]["name"] == "crc32c"


def tables(group: Group) -> dict[str, str]:
    """Return a group's attributes: its layers and labels, as JSON, and its coordinates."""
    layers = {name: dict(about) for name, about in group.layers.items()}
    coords = {name: list(labels) for name, labels in group.coords.items()}
    texts = {LAYERS: layers} | ({COORDS: coords} if coords else {})
    tables = {name: json.dumps(table, allow_nan=False) for name, table in texts.items()}
    named = [name for name, variable in group.variables.items() if variable.is_coordinate]
    # By this attribute of the CF conventions xarray knows which variables are coordinates.
    return tables | ({"coordinates": " ".join(named)} if named else {})


def join(group: str, name: str) -> str:
    """Return the path of a variable of a group."""
    return f"{group}/{name}" if group else name
