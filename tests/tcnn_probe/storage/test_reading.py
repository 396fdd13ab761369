"""The store as its reader meets it, with xarray alone or with :func:`tcnn_probe.open`."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tcnn_probe.storage import open_recording
from tests.tcnn_probe.storage.tables import GROUPS, LAYERS, MAPS, add, create, values


def test_tree(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    for mark in (2, 3):
        add(store, mark, top1=mark / 7)
    for tree in (store.tree(), open_recording(tmp_path / "run.zarr")):
        assert set(tree.groups) == {"/", "/heads", "/layer_scale", "/maps", f"/{MAPS}"}
        assert tree.attrs["made_by"] == "a test"
        assert set(tree.dataset.data_vars) == {"top1"}
        assert dict(tree["heads"].sizes) == {"epoch": 2, "layer": 3, "head": 5}
        assert dict(tree[MAPS].sizes) == {
            "epoch": 2,
            "layer": 2,
            "image": 2,
            "head": 5,
            "y": 3,
            "x": 11,
        }
        assert json.loads(tree["heads"].attrs["layers"]) == LAYERS
        assert tree[MAPS].saliency.sel(
            epoch=3, layer="層", head=4, image=17
        ).values.shape == (3, 11)
        assert not tree[MAPS].saliency._in_memory  # read when looked at


def test_attributes(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0, top1=0.5)
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.attrs == dict(store.attrs)
    assert ds.attrs["made_by"] == "a test"
    assert ds.attrs["tcnn_probe_schema"] == 3
    assert ds.attrs["along"] == "epoch"
    assert ds.entropy.attrs["units"] == "nat"
    assert ds.top1.attrs["description"] == "As given to mark()."
    assert "kernel tap" in ds["head"].attrs["description"]
    assert list(
        json.loads(
            xr.open_zarr(tmp_path / "run.zarr", group="layer_scale").attrs["layers"]
        )
    ) == ["a.ls1", ""]
    assert store.groups == GROUPS


def test_plain_metadata(tmp_path: Path) -> None:
    """Strict JSON, a fill that no value has, and a checksum on every chunk."""
    add(create(tmp_path / "run.zarr"), 0, top1=0.5)
    kinds = set()
    for name in tmp_path.rglob("zarr.json"):
        # Python alone reads NaN and Infinity, which are no JSON.
        about = json.loads(name.read_text(), parse_constant=pytest.fail)
        if about["node_type"] == "array":
            codecs = about["codecs"]
            expected = ["bytes", "crc32c"]
            if codecs[0]["name"] == "sharding_indexed":
                expected = ["bytes", "zstd", "crc32c"]
                assert (
                    codecs[0]["configuration"]["index_codecs"][-1]["name"] == "crc32c"
                )
                codecs = codecs[0]["configuration"]["codecs"]
            assert [codec["name"] for codec in codecs] == expected
            dtype = about["data_type"]
            kinds.add(
                (
                    dtype if isinstance(dtype, str) else dtype["name"],
                    about["fill_value"],
                )
            )
    assert kinds == {
        ("int64", -1),
        ("float64", "NaN"),
        ("float16", "NaN"),
        ("fixed_length_utf32", ""),
    }


@pytest.mark.parametrize("in_memory", [True, False])
def test_dataset_taken_before_further_marks_keeps_its_own(
    tmp_path: Path, in_memory: bool
) -> None:
    store = create(None if in_memory else tmp_path / "run.zarr")
    early = {}
    for mark in range(4):
        add(store, mark)
        early[mark + 1] = store.dataset()
    for count, ds in early.items():
        assert ds.epoch.values.tolist() == list(range(count))
        np.testing.assert_array_equal(
            ds.gate, [values(mark)[""]["gate"] for mark in range(count)]
        )
