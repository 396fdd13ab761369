"""A recording describes itself and its provenance, and reveals no secrets."""

import json
import re
import socket
from importlib.metadata import version
from pathlib import Path

import pytest
import timm
import torch

import tcnn_probe
from tcnn_probe.probes.anatomy import ANATOMY
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.networks import Chain

IMAGES = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0))


def test_every_variable_is_described() -> None:
    ds = recorded(Chain(), IMAGES).dataset
    names = {
        "1": ["gate", "max_logit", "images", "nonfinite_images", "translation_equivariance"],
        "cell": ["center_y", "center_x", "attention_distance", "uniform_distance"],
        "cell2": ["attention_span", "mean_squared_radius"],
        "cell-2": ["locality_strength"],
        "pixel": ["cell_pixels"],
        "nat": [
            *("entropy", "content_entropy", "positional_entropy", "uniform_entropy"),
            *("content_information", "content_part_information", "uniform_content_entropy"),
            *(ANATOMY.keys() - {"translation_equivariance"}),
        ],
    }
    units = {name: unit for unit, of_unit in names.items() for name in of_unit}
    assert ds.coords.keys() - ds.dims == {"uniform_distance", "cell_pixels"}
    ds = ds.reset_coords()
    assert {name: array.units for name, array in ds.data_vars.items()} == units
    for array in (*ds.data_vars.values(), *ds.coords.values()):
        # The description must be more than a repetition of the name.
        assert len(array.description) > 15
        assert 0 < len(array.long_name) < 60  # it labels axes
    for name, array in ds.data_vars.items():
        of_layers = name.endswith("images") or name.startswith(("uniform", "cell"))
        assert array.dims == (("epoch", "layer") if of_layers else ("epoch", "layer", "head"))


def test_provenance() -> None:
    model = timm.create_model("convit_tiny", img_size=32, depth=1, embed_dim=2).eval()
    attrs = recorded(model, torch.randn(1, 3, 32, 32)).dataset.attrs
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", attrs["created_at"])
    assert attrs["creation_library"] == "tcnn_probe"
    assert attrs["creation_library_version"] == version("tcnn-probe")
    for package in ("torch", "timm", "xarray", "zarr"):
        assert attrs[f"{package}_version"] == version(package)
    assert attrs["model_class"] == "ConVit"
    assert attrs["model_architecture"] == "convit_tiny"
    assert json.loads(attrs["layers"]) == {"blocks.0.attn": {"kind": "convit-gpsa", "heads": 4}}
    ours = recorded(Chain(), IMAGES).dataset.attrs
    assert ours["model_class"] == "Chain"
    assert "model_architecture" not in ours
    assert json.loads(ours["layers"]) == {
        "near": {"kind": "gpsa", "heads": 9},
        "far": {"kind": "gpsa", "heads": 25},
    }


def test_store_reveals_neither_paths_nor_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Chain()
    with tcnn_probe.Recorder(model, tmp_path / "somewhere" / "run.zarr") as recorder:
        model(IMAGES)
        recorder.mark(epoch=0, top1=1.0)
    metadata = list(tmp_path.rglob("*.json"))
    # In an empty or packed store the search below would find nothing.
    assert len(metadata) > 10
    for file in metadata:
        text = file.read_text()
        for secret in (tmp_path, "somewhere", Path.home(), Path.cwd()):
            assert str(secret) not in text
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
        # Any absolute path or file URL is searched for, not only those of this machine.
        assert not re.search(r'"[^"]*file:|"/\w', text)
