"""The recording that comes with the package, as documents and users draw it."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import tcnn_probe
from tcnn_probe.storage import EpochStore


def test_the_vision_transformer_has_the_maps_of_its_digits() -> None:
    tree = tcnn_probe.load_example("vit")
    assert tcnn_probe.health(tree) == tcnn_probe.health(tree["heads"].dataset)
    # The maps are of digits that anyone has.
    maps = tree["maps/4x4x4"].dataset
    assert maps.sizes["image"] == len(tree.attrs["digits"]) == 3
    of_class = maps.class_attention.sum(["y", "x"]) + maps.self_attention
    np.testing.assert_allclose(of_class, 1, atol=1e-5)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A recording of an earlier version, with maps in shards and without parts of selectivity."""
    with zipfile.ZipFile(Path(__file__).with_name("earlier.zip")) as file:
        file.extractall(tmp_path / "run.zarr")
    return tmp_path / "run.zarr"


def test_an_earlier_recording_is_typed_by_the_earlier_rule(earlier: Path) -> None:
    heads = tcnn_probe.open(earlier)["heads"].dataset
    with pytest.warns(FutureWarning, match="record it anew"):
        types = tcnn_probe.head_types(heads)
    assert (types.isel(epoch=0) == "convolutional").any()


def test_an_earlier_recording_is_continued(earlier: Path) -> None:
    """It keeps its layout and its variables."""
    before = {group.path: group.to_dataset().load() for group in tcnn_probe.open(earlier).subtree}
    layout = documents(earlier)
    store = EpochStore(earlier)
    rows = {}
    for path, group in store.groups.items():
        rows[path] = {
            name: np.full(group.shape(name), 0.5, about.dtype)
            for name, about in group.variables.items()
        }
    store.append(store.marks[-1] + 1, store.groups, rows, {})
    store.close()
    assert documents(earlier) == layout
    after = tcnn_probe.open(earlier)
    for path, ds in before.items():
        group = after[path].to_dataset().load()
        xr.testing.assert_identical(group.isel(epoch=slice(-1)), ds)
        for values in group.data_vars.values():
            last = values.isel(epoch=-1).values
            # No scalar was given.
            assert np.isnan(last) if path == "/" else (last == last.dtype.type(0.5)).all()


def documents(path: Path) -> dict[str, Any]:
    """Return the metadata of all arrays, but their lengths."""
    root = json.loads((path / "zarr.json").read_text())
    return {
        name: about | {"shape": about["shape"][1:]}
        for name, about in root["consolidated_metadata"]["metadata"].items()
        if about["node_type"] == "array"
    }


def test_an_unknown_example_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of \['tcnn', 'vit'\], got 'x'"):
        tcnn_probe.load_example("x")
