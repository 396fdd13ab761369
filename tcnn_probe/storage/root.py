"""The root ``zarr.json``, which describes a recording
and its number of marks; a mark writes it last.
"""

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
"""Attributes that a recording writes itself;
a user's attributes of these names would be lost or misread.
"""
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
        """Read the root at a place.

        StoreError for something else, a recording of another schema version, or damaged metadata.
        """
        text = place.root()
        return cls() if text is None else cls.parse(text, place)

    @classmethod
    def parse(cls, text: bytes, place: Place) -> "Root":
        """Read the text of a root; StoreError as for :meth:`read`."""
        try:
            document = json.loads(text)
            attributes = document["attributes"]
            version = attributes[VERSION]
        except (LookupError, TypeError, ValueError) as error:
            raise place.something_else(f"a {ROOT} of something else, or a damaged one") from error
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{place.name} has schema version {version!r}, expected {SCHEMA_VERSION}"
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
    def growing(self) -> dict[str, Mapping[str, Any]]:
        """Metadata of the arrays over the marks, by path."""
        return {
            path: about
            for path, about in self.documents.items()
            if is_recorded(about) and about["dimension_names"][0] == self.along
        }

    @cached_property
    def scalars(self) -> set[str]:
        """Names of the scalars that were given to ``mark()``."""
        return {
            path
            for path, about in self.growing.items()
            if "/" not in path and about["attributes"].get("description") == GIVEN
        } - {self.along}

    @property
    def names(self) -> set[str]:
        """Names of everything that the recording has at the root of its store."""
        arrays = [path for path, about in self.documents.items() if is_recorded(about)]
        return {path.split("/")[0] for path in arrays}

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
            if not is_recorded(about) or parent != path:
                continue
            dims = about["dimension_names"]
            if full_name in self.growing:
                if full_name in self.scalars or name == self.along:
                    continue
                text = {
                    key: about["attributes"].get(key, "")
                    for key in ("units", "long_name", "description")
                }
                variables[name] = Variable(
                    (*dims[1:],), **text, dtype=str(np.dtype(about["data_type"]))
                )
            elif dims == [name] and name != "layer":
                sizes[name] = about["shape"][0]
        layers, coords = (json.loads(attributes.get(name, "{}")) for name in (LAYERS, COORDS))
        return Group(variables, layers, sizes, coords)


def is_recorded(document: Mapping[str, Any]) -> bool:
    """Return whether this is the metadata of an array of a recording,
    and not of one that a user has added.
    """
    if document["node_type"] != "array" or not document.get("dimension_names"):
        return False
    # Older recordings keep maps in shards.
    return document["codecs"][-1]["name"] in ("crc32c", "sharding_indexed")


def tables(group: Group) -> dict[str, str]:
    """Return the attributes of a group: its layers
    and the labels along its dimensions, as JSON, and coordinates.
    """
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
