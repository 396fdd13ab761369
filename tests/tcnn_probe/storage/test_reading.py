"""The store as its reader meets it, with xarray alone or with :func:`tcnn_probe.open`."""

import json
import os
import subprocess
import sys
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
        assert dict(tree[MAPS].sizes) == {"epoch": 2, "layer": 2, "image": 2, "head": 5, "y": 3, "x": 11}
        assert json.loads(tree["heads"].attrs["layers"]) == LAYERS
        assert tree[MAPS].saliency.sel(epoch=3, layer="層", head=4, image=17).values.shape == (3, 11)
        assert not tree[MAPS].saliency._in_memory  # read when looked at


def test_attributes(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0, top1=0.5)
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.attrs == dict(store.attrs)
    assert (ds.attrs["made_by"], ds.attrs["tcnn_probe_schema"], ds.attrs["along"]) == ("a test", 3, "epoch")
    assert ds.entropy.attrs["units"] == "nat"
    assert ds.top1.attrs["description"] == "As given to mark()."
    assert "kernel tap" in ds["head"].attrs["description"]
    assert list(json.loads(xr.open_zarr(tmp_path / "run.zarr", group="layer_scale").attrs["layers"])) == ["a.ls1", ""]
    assert store.groups == GROUPS


def test_plain_metadata(tmp_path: Path) -> None:
    """Strict JSON, a fill that no value has, and a checksum on every chunk."""
    add(create(tmp_path / "run.zarr"), 0, top1=0.5)
    kinds = set()
    for name in tmp_path.rglob("zarr.json"):
        about = json.loads(name.read_text(), parse_constant=pytest.fail)
        if about["node_type"] == "array":
            codecs = about["codecs"]
            if codecs[0]["name"] == "sharding_indexed":
                assert codecs[0]["configuration"]["index_codecs"][-1]["name"] == "crc32c"
                codecs = codecs[0]["configuration"]["codecs"]
            assert [codec["name"] for codec in codecs] == ["bytes", "zstd", "crc32c"]
            dtype = about["data_type"]
            kinds.add((dtype if isinstance(dtype, str) else dtype["name"], about["fill_value"]))
    assert kinds == {("int64", -1), ("float64", "NaN"), ("float16", "NaN"), ("fixed_length_utf32", "")}


PLOT = """
import sys, warnings
sys.modules |= dict.fromkeys(("torch", "timm", "captum", "tcnn_model"))
warnings.simplefilter("error")
import xarray as xr
ds = xr.open_zarr(sys.argv[1])
assert ds.layer.dtype == ds.layer.astype(str).dtype == "<U6"
mesh = ds.entropy.isel(epoch=-1).plot()
print(*(label.get_text() for label in mesh.axes.get_yticklabels()))
mesh.figure.clear()
lines = ds.gate.sel(layer="層").plot.line(x="epoch")
print(*(line.get_ydata()[-1].item() for line in lines))
scales = xr.open_zarr(sys.argv[1], group="layer_scale").scale
scales.isel(epoch=0).plot(x="channel")
import tcnn_probe
assert tcnn_probe.open(sys.argv[1])["heads"].gate.identical(ds.gate)
"""


def test_read_and_plotted_without_torch_and_timm(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    for mark in (0, 1):
        add(store, mark)
    command = [sys.executable, "-c", PLOT, tmp_path / "run.zarr"]
    env = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    ticks, drawn = run.stdout.splitlines()
    assert ticks.split() == list(LAYERS)
    np.testing.assert_array_equal([float(y) for y in drawn.split()], values(1)[""]["gate"][2])


@pytest.mark.parametrize("kept", [True, False])
def test_dataset_taken_before_further_marks_keeps_its_own(tmp_path: Path, kept: bool) -> None:
    store = create(None if kept else tmp_path / "run.zarr")
    early = {}
    for mark in range(4):
        add(store, mark)
        early[mark + 1] = store.dataset()
    for count, ds in early.items():
        assert ds.epoch.values.tolist() == list(range(count))
        np.testing.assert_array_equal(ds.gate, [values(mark)[""]["gate"] for mark in range(count)])
