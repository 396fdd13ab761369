"""Recordings of older schema versions brought up to date, in place."""

import json
import os
from collections.abc import Callable
from typing import Any

from zarr.abc.store import Store

from tcnn_probe.schema import SCHEMA_VERSION
from tcnn_probe.storage.commit import ALONG, VERSION, parsed
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.place import ROOT, find

__all__ = ["migrate"]


def migrate(target: str | os.PathLike[str] | Store) -> None:
    """Bring a recording of an older schema version up to date; one that is up to date is left as it is.

    The recorded values are not touched: the root metadata is replaced, in one step, so that a run killed meanwhile
    leaves the old recording or the new one.

    Args:
        target: path, URL or zarr store of a recording that nothing is writing to.

    Raises:
        StoreError: no recording is there, or one of a version that is not known.
    """
    place = find(target)
    text = place.root()
    if target is None or text is None:
        raise StoreError(f"{place.name} holds no recording: nothing is there")
    document = parsed(text, place)
    while (version := document["attributes"][VERSION]) != SCHEMA_VERSION:
        if version not in _MIGRATIONS:
            raise StoreError(
                f"{place.name} has schema version {version}, expected one of {[*_MIGRATIONS, SCHEMA_VERSION]}"
            )
        document = _MIGRATIONS[version](document)
    migrated = json.dumps(document, allow_nan=False).encode()
    if json.loads(text) != document:
        place.objects.put({ROOT: migrated})


def _from_1(document: dict[str, Any]) -> dict[str, Any]:
    """1 had one group, no spare capacity, and marks along "epoch"; its arrays are as they are in 2."""
    return {**document, "attributes": {**document["attributes"], VERSION: 2, ALONG: "epoch"}}


_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
