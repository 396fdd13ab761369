"""Recordings as xarray shows them, read when looked at."""

import os
from typing import Any, cast

import xarray as xr
from zarr.abc.store import Store

from tcnn_probe.storage.commit import UNREADABLE, Root
from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.names import HEADS
from tcnn_probe.storage.place import Place, find

__all__ = ["existing", "numbers", "open_dataset", "open_recording", "open_tree"]


def open_recording(target: str | os.PathLike[str] | Store) -> xr.DataTree:
    """Open one recording, see :func:`~tcnn_probe.storage.runs.open_recordings`."""
    place = find(target, writable=False)
    existing(place)
    try:
        return open_tree(place.store)
    except UNREADABLE as error:
        raise StoreError(f"{place.name} has damaged metadata: {error!r}") from error


def existing(place: Place) -> Root:
    """Give the root of a recording that is to be read; StoreError if nothing is there, or something else."""
    root = Root.read(place)
    if root is None:
        raise StoreError(f"{place.name} holds no recording: nothing is there")
    return root


def open_dataset(store: Store) -> xr.Dataset:
    """Open the root group: numbers of heads, and scalars."""
    return xr.open_zarr(store, chunks=None, consolidated=True)


def open_tree(store: Store) -> xr.DataTree:
    """Open all groups, from one look at the root, so that all are of the same marks."""
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


def numbers(tree: xr.DataTree) -> xr.Dataset:
    """Heads and scalars of an opened recording in one dataset, as ``xr.open_zarr`` gives them."""
    heads = tree[HEADS].to_dataset() if HEADS in tree.children else xr.Dataset()
    return heads.assign(tree.to_dataset().data_vars).assign_attrs(tree.attrs | heads.attrs)
