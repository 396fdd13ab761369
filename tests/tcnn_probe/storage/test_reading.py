"""Reading a store with xarray alone or with :func:`tcnn_probe.open`."""

import json
from pathlib import Path

import numpy as np
import xarray as xr

from tcnn_probe.storage import open_recording
from tests.tcnn_probe.storage.tables import GROUPS, LAYERS, MAPS, add, create, values


def test_groups_and_attributes(tmp_path: Path) -> None:
    store = create(path := tmp_path / "run.zarr")
    for mark in (2, 3):
        add(store, mark, top1=mark / 7)
    assert store.groups == GROUPS
    for tree in (store.tree(), open_recording(path)):
        assert set(tree.groups) == {"/", "/heads", "/layer_scale", "/maps", f"/{MAPS}"}
        assert tree.attrs["made_by"] == "a test"
        assert set(tree.dataset.data_vars) == {"top1"}
        assert dict(tree["heads"].sizes) == {"epoch": 2, "layer": 3, "head": 5}
        assert json.loads(tree["heads"].attrs["layers"]) == LAYERS
        assert [*json.loads(tree["layer_scale"].attrs["layers"])] == ["a.ls1", ""]
        saliency = tree[MAPS].saliency
        assert not saliency._in_memory  # the values are read on access
        assert saliency.sizes == {"epoch": 2, "layer": 2, **GROUPS[MAPS].sizes}
        row = saliency.sel(epoch=3, layer="層", head=4, image=17)
        np.testing.assert_array_equal(row, values(3)[MAPS]["saliency"][1, 1, 4])
    ds = xr.open_zarr(path)
    assert ds.attrs == dict(store.attrs)
    assert (ds.attrs["tcnn_probe_schema"], ds.attrs["along"]) == (3, "epoch")
    assert ds.entropy.attrs["units"] == "nat"
    assert ds.top1.attrs["description"] == "As given to mark()."
    assert "kernel tap" in ds["head"].attrs["description"]


def test_a_dataset_keeps_its_marks_when_others_are_added(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    early = {}
    for mark in range(4):
        add(store, mark)
        early[mark + 1] = store.dataset()
    for count, ds in early.items():
        assert ds.epoch.values.tolist() == list(range(count))
        np.testing.assert_array_equal(ds.gate, [values(mark)[""]["gate"] for mark in range(count)])
