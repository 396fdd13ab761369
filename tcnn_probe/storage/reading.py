"""Reading of recordings: opening them with xarray, and the examples."""

from importlib.resources import files
from typing import Any, cast

import xarray as xr
from zarr.abc.store import Store
from zarr.storage import ZipStore

from tcnn_probe.schema import StoreError
from tcnn_probe.storage.place import Source, find
from tcnn_probe.storage.root import HEADS, Root

__all__ = ["load_example", "numbers", "open_dataset", "open_recording", "open_tree"]

_EXAMPLES = {"tcnn": "example.zip", "vit": "example_vit.zip"}


def open_recording(target: Source) -> xr.DataTree:
    """Open a single recording, see :func:`~tcnn_probe.storage.runs.open_recordings`."""
    place = find(target, writable=False)
    root = Root.read(place)
    if root.text is None:
        raise StoreError(f"{place.name} holds no recording: nothing is there, or a file")
    return open_tree(root.checked(place))


def open_dataset(store: Store) -> xr.Dataset:
    """Open the root group: numbers of heads, and scalars."""
    # The default of chunks would use dask if it is installed; users who want dask call
    # `tree.chunk()`.
    return xr.open_zarr(store, chunks=None, consolidated=True)


def open_tree(store: Store) -> xr.DataTree:
    """Open all groups with a single read of the root, so that all have the same marks."""
    groups = xr.open_groups(cast("Any", store), engine="zarr", chunks=None, consolidated=True)
    for group in groups.values():
        for values in group.variables.values():
            # netCDF has no float16, so copies of maps are in float32.
            if values.dtype == "float16":
                values.encoding["dtype"] = "float32"
    root = groups.pop("/")
    along = root.attrs["along"]
    # In a tree, children must be aligned with their parents, so variables with layers cannot stay
    # at the root.
    of_model = [name for name, values in root.variables.items() if values.dims == (along,)]
    top = root.drop_vars(root.variables.keys() - set(of_model))
    top.attrs = {key: value for key, value in root.attrs.items() if key != "layers"}
    groups["/"] = top
    if set(root.data_vars) - set(of_model):
        groups[f"/{HEADS}"] = heads = root.drop_vars(set(of_model) - {along})
        # Enough for health, scalars and plots to take this node alone.
        heads.attrs = {"layers": root.attrs["layers"], "along": along}
    return xr.DataTree.from_dict(groups)


def numbers(tree: xr.DataTree) -> xr.Dataset:
    """Return heads and scalars of a recording as one dataset, as ``xr.open_zarr`` does."""
    heads = tree[HEADS].to_dataset() if HEADS in tree.children else xr.Dataset()
    return heads.assign(tree.to_dataset().data_vars).assign_attrs(tree.attrs | heads.attrs)


def load_example(name: str = "tcnn") -> xr.DataTree:
    """Open an example recording, which comes with the package, for example to try plots.

    ::

        heads = tcnn_probe.load_example("vit")["heads"].dataset
        print(tcnn_probe.head_types(heads).isel(epoch=-1).to_pandas())

    "tcnn" is of a Transformed CNN: EfficientNet-Lite0 with ImageNet's weights was reparameterized
    and fine-tuned on 1,200 photographs of Imagenette, at 128 x 128 pixels. Numbers of heads are
    from 400 other photographs, and from the one whose maps are kept, scikit-learn's ``china.jpg``.
    ``docs/scripts/example.py`` made it.

    "vit" is of a small vision transformer with a class token, which learned scikit-learn's
    handwritten digits, 8 x 8 pixels in 4 x 4 patches, from random weights to an accuracy of 0.96.
    In the end half of its heads are content heads. Numbers of heads are from 360 digits that it was
    not trained on, and maps from three of these, ``load_digits().images[tree.attrs["digits"]]``.
    ``docs/scripts/example_vit.py`` made it.

    The attributes of the tree give the options of the training.

    Args:
        name: "tcnn" or "vit".

    Returns:
        A tree of lazily loaded groups, as :func:`tcnn_probe.open` returns it.

    Raises:
        ValueError: There is no example of this name.
    """
    if name not in _EXAMPLES:
        raise ValueError(f"expected one of {list(_EXAMPLES)}, got {name!r}")
    path = files("tcnn_probe.storage") / _EXAMPLES[name]
    return open_recording(ZipStore(str(path), mode="r"))
