"""Copies and selections of recordings, of one or several runs, in zarr and netCDF."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import xarray as xr

import tcnn_probe

# xarray and zarr warn of what zarr's specification does not have yet.
pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr (V3 specification|format 3 specification)")
ATTRS = {"augment": True, "flips": [True, False], "rates": [0.1, 2], "seed": 3}
NOT_OF_NETCDF = {
    "teacher": None,
    "classes": ["cat", "dog"],
    "schedule": {"warmup": [1, 2], "restarts": None},
}


def record_run(path: Path, scale: float = 1.0) -> None:
    torch.manual_seed(3)
    sizes = {"img_size": (48, 80), "embed_dim": 24, "depth": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    attrs = ATTRS | NOT_OF_NETCDF | {"scale": scale}
    options = {"health": True, "images": 2, "attrs": attrs}
    with tcnn_probe.record(model, path, **options) as recorder:
        images = scale * torch.randn(2, 3, 48, 80)
        for epoch in range(3):
            model(images)
            recorder.mark(epoch=epoch, loss=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording with maps, health and attributes of all kinds."""
    path = tmp_path_factory.mktemp("copies") / "run.zarr"
    record_run(path)
    return path


@pytest.fixture(params=["tcnn", "vit", "recorded", "runs"])
def tree(request: pytest.FixtureRequest, run: Path) -> xr.DataTree:
    """Gated heads, softmax heads with maps, attributes of all kinds, or several runs."""
    if request.param in ("tcnn", "vit"):
        return tcnn_probe.load_example(request.param)
    return tcnn_probe.open({"a": run, "b": run} if request.param == "runs" else run)


@pytest.mark.study(but=["vit"])
def test_every_group_goes_through_netcdf_and_back(tree: xr.DataTree, tmp_path: Path) -> None:
    for number, node in enumerate(tree.subtree):
        group, path = node.to_dataset(), tmp_path / f"{number}.nc"
        group.to_netcdf(path)
        copy = xr.load_dataset(path)
        xr.testing.assert_equal(copy, group)
        for name, value in group.attrs.items():
            np.testing.assert_array_equal(copy.attrs[name], value, name)


def test_attributes_are_stored_in_types_of_netcdf(run: Path) -> None:
    attrs = xr.open_zarr(run).attrs
    assert {name: attrs[name] for name in ATTRS} == ATTRS
    assert type(attrs["augment"]) is int
    assert "teacher" not in attrs
    for name in ("classes", "schedule"):
        assert json.loads(attrs[name]) == NOT_OF_NETCDF[name]


@pytest.mark.study
@pytest.mark.parametrize("selection", [{"epoch": [0]}, {"layer": [1]}, {"head": [0, 2]}])
def test_a_selection_is_a_recording(
    selection: dict[str, list[int]], run: Path, tmp_path: Path
) -> None:
    xr.open_zarr(run).isel(selection).to_zarr(tmp_path / "part.zarr")
    part = tcnn_probe.open(tmp_path / "part.zarr")
    heads = tcnn_probe.open(run)["heads"].to_dataset()
    xr.testing.assert_equal(
        part["heads"].to_dataset(), heads.isel(selection, missing_dims="ignore")
    )
    tcnn_probe.health(part)
    if "layer" in selection:
        model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=5)
        with pytest.raises(tcnn_probe.StoreError, match="a selection of the layers"):
            tcnn_probe.record(model, tmp_path / "part.zarr")


@pytest.mark.study
def test_health_of_one_of_several_runs(run: Path, tmp_path: Path) -> None:
    paths = {"a": run, "b": tmp_path / "b.zarr"}
    record_run(paths["b"], scale=300.0)
    tree = tcnn_probe.open(paths)
    message = r"one with {}.sel\(run=...\), of \['a', 'b'\]"
    with pytest.raises(ValueError, match=message.format("tree")):
        tcnn_probe.health(tree)
    with pytest.raises(ValueError, match=message.format("ds")):
        tcnn_probe.health(tree["heads"].dataset)
    for number, path in enumerate(paths.values()):
        alone = tcnn_probe.health(xr.open_zarr(path), max_logit=1e-3)
        for part in (tree.isel(run=number), tree["heads"].dataset.isel(run=number)):
            assert tcnn_probe.health(part, max_logit=1e-3) == alone
        assert len(alone) > 0
