"""Recordings of schema version 1 become ones of version 2, in place."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.errors import ZarrUserWarning

from tcnn_probe.schema import Group, Variable
from tcnn_probe.storage import EpochStore, StoreError, migrate, open_recording
from tests.tcnn_probe.storage.crashes import Crash, crash_at_write

LAYERS = {"a.conv": {"kind": "gpsa", "heads": 5}, "b.conv": {"kind": "gpsa", "heads": 3}}
GROUPS = {
    "": Group(
        {
            "gate": Variable(("layer", "head"), "1", "gate", "The gate."),
            "images": Variable(("layer",), "1", "images", "How many."),
        },
        LAYERS,
        {"head": 5},
    )
}


def gate(epoch: int) -> np.ndarray:
    found = 1000.0 * epoch + 10 * np.arange(2)[:, None] + np.arange(5)
    found[1, 3:] = np.nan
    return found


def version_1(path: Path, epochs: int, *, killed: bool = False) -> None:
    """What version 1 wrote: one group, arrays resized by one with each epoch, then consolidated."""
    attrs = {"made_by": "version 1", "tcnn_probe_schema": 1, "layers": json.dumps(LAYERS)}
    layer = {"long_name": "layer", "description": "Name of the module in the model."}
    coords = {
        "layer": ("layer", np.array(list(LAYERS), dtype=object), layer),
        "head": ("head", np.arange(5), {"long_name": "head"}),
    }
    xr.Dataset(coords=coords, attrs=attrs).to_zarr(path, zarr_format=3, consolidated=False, mode="w")
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    given = "As given to mark()."
    arrays = {
        "epoch": ((), "int64", -1, {"long_name": "epoch", "description": given}),
        "gate": ((2, 5), "float64", np.nan, GROUPS[""].variables["gate"].attrs),
        "images": ((2,), "float64", np.nan, GROUPS[""].variables["images"].attrs),
        "top1": ((), "float64", np.nan, {"long_name": "top1", "description": given}),
    }
    for name, (shape, dtype, fill, about) in arrays.items():
        group.create_array(
            name,
            shape=(0, *shape),
            chunks=(256, *shape),
            dtype=dtype,
            fill_value=fill,
            dimension_names=("epoch", "layer", "head")[: 1 + len(shape)],
            attributes=dict(about),
        )
    consolidate(path)
    for epoch in range(epochs + killed):
        row = {"epoch": epoch, "gate": gate(epoch), "images": gate(epoch)[:, 0], "top1": epoch / 7}
        for name, value in row.items():
            array = group[name]
            array.resize((epoch + 1, *array.shape[1:]))
            array[epoch] = value
        if epoch < epochs:
            consolidate(path)


def consolidate(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ZarrUserWarning)
        zarr.consolidate_metadata(path)


def assert_holds(path: Path, epochs: int) -> None:
    ds = xr.open_zarr(path)
    assert ds.epoch.values.tolist() == list(range(epochs))
    assert ds.layer.values.tolist() == list(LAYERS)
    np.testing.assert_array_equal(ds.gate, np.array([gate(epoch) for epoch in range(epochs)]).reshape(-1, 2, 5))
    np.testing.assert_array_equal(ds.top1, np.arange(epochs) / 7)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("epochs", [0, 3])
def test_migrated_and_continued(tmp_path: Path, epochs: int, killed: bool) -> None:
    path = tmp_path / "run.zarr"
    version_1(path, epochs, killed=killed)
    with pytest.raises(StoreError, match=r"version 1, expected 2: tcnn_probe.migrate\('.*run.zarr'\) upgrades it"):
        EpochStore(path)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p != path / "zarr.json"}
    migrate(path)
    assert before == {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p != path / "zarr.json"}
    assert_holds(path, epochs)
    assert open_recording(path)["heads"].sizes["epoch"] == epochs

    store = EpochStore(path)
    store.check(GROUPS)
    assert store.groups == GROUPS
    assert store.attrs["made_by"] == "version 1"
    assert store.marks == tuple(range(epochs))
    for epoch in (epochs, epochs + 1):
        row = {"gate": gate(epoch), "images": gate(epoch)[:, 0]}
        store.append(epoch, {"": row}, {"top1": epoch / 7})
    store.close()
    assert_holds(path, epochs + 2)


def test_what_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    version_1(path, 2)
    migrate(path)
    with crash_at_write(0) as asked:
        migrate(path)
    assert asked == []


def test_crash_at_every_write(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    version_1(path, 2)
    number = 0
    while True:
        with crash_at_write(number) as asked:
            try:
                migrate(path)
                break
            except Crash:
                number += 1
        assert_holds(path, 2)
        assert xr.open_zarr(path).attrs["tcnn_probe_schema"] == 1
    assert asked == ["zarr.json"]
    assert_holds(path, 2)


def test_unknown_version(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    version_1(path, 1)
    text = (path / "zarr.json").read_text()
    (path / "zarr.json").write_text(text.replace('"tcnn_probe_schema": 1', '"tcnn_probe_schema": 3'))
    with pytest.raises(StoreError, match=r"run.zarr has schema version 3, expected one of \[1, 2\]"):
        migrate(path)


def test_no_recording(tmp_path: Path) -> None:
    xr.Dataset({"gate": ("epoch", np.arange(3.0))}).to_zarr(tmp_path / "run.zarr", zarr_format=3, consolidated=False)
    with pytest.raises(StoreError, match="holds something else than a recording"):
        migrate(tmp_path / "run.zarr")
