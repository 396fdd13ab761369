"""Recordings as xarray shows them, read when looked at."""

import os
from typing import Any, cast

import xarray as xr
from zarr.abc.store import Store

from tcnn_probe.storage.commit import Root
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.place import find

__all__ = ["HEADS", "open_dataset", "open_recording", "open_tree"]

HEADS = "heads"


def open_recording(target: str | os.PathLike[str] | Store) -> xr.DataTree:
    """Open a recording for reading; nothing of it is changed. Another process may be writing to it.

    Args:
        target: path, URL or zarr store of a recording.

    Returns:
        A tree of lazily loaded groups, all over the same marks. At its root are the attributes and the scalars that
        came with marks; in "heads" the numbers of each head, which are the root group of the store; under their own
        paths, such as "maps/6x14x14", the other groups. (They have other layers and heads than the numbers, and a
        :class:`xarray.DataTree` holds below a node only what is aligned with it.)

    Raises:
        StoreError: nothing is there, or no recording, or one of another schema version.
    """
    place = find(target, writable=False)
    root = Root.read(place)
    if target is None or root is None:
        raise StoreError(f"{place.name} holds no recording: nothing is there")
    return open_tree(place.objects.store)


def open_dataset(store: Store) -> xr.Dataset:
    """The root group: numbers of heads, and scalars."""
    return xr.open_zarr(store, chunks=None, consolidated=True)


def open_tree(store: Store) -> xr.DataTree:
    """See :func:`open_recording`."""
    # All groups from one look at the root, so that all are of the same marks.
    groups = xr.open_groups(cast("Any", store), engine="zarr", chunks=None, consolidated=True)
    root = groups.pop("/")
    along = root.attrs["along"]
    of_model = [name for name, about in root.variables.items() if about.dims == (along,)]
    top = root.drop_vars(root.variables.keys() - set(of_model))
    top.attrs = {key: value for key, value in root.attrs.items() if key != "layers"}
    groups["/"] = top
    if set(root.data_vars) - set(of_model):
        groups[f"/{HEADS}"] = heads = root.drop_vars(set(of_model) - {along})
        heads.attrs = {"layers": root.attrs["layers"]}
    return xr.DataTree.from_dict(groups)
