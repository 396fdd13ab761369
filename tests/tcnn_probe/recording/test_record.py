"""record(): which layers, which models, and what the recording says about itself."""

import json
import re
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tcnn_probe.probes.gated import VARIABLES
from tests.tcnn_probe.networks import Branches, Chain, small_resnet

IMAGES = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    return small_resnet()


FIRST, SECOND = ["layer4.0.conv1", "layer4.0.conv2"], ["layer4.1.conv1", "layer4.1.conv2"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, FIRST + SECOND),
        ("layer4.1.conv2", ["layer4.1.conv2"]),
        ("layer4.1", SECOND),
        ("*.conv1", ["layer4.0.conv1", "layer4.1.conv1"]),
        (("layer4.1.conv2", "layer4.0"), [*FIRST, "layer4.1.conv2"]),
        (lambda name, module: name.endswith("2") and isinstance(module, GPSA), ["layer4.0.conv2", "layer4.1.conv2"]),
    ],
    ids=["all", "name", "container", "glob", "several", "predicate"],
)
def test_layers(resnet: nn.Module, layers: Any, expected: list[str]) -> None:
    with tcnn_probe.record(resnet, layers=layers) as recorder, torch.no_grad():
        resnet(torch.randn(1, 1, 71, 103))
        recorder.mark(epoch=0)
    assert list(recorder.layers) == expected
    assert recorder.dataset.layer.values.tolist() == expected


def test_recorder_by_its_own_name() -> None:
    with tcnn_probe.Recorder(Chain()) as recorder:
        assert recorder.layers == ("near", "far")
        assert recorder.epochs == ()


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "unknown name": (Chain, {"layers": "nearr"}, ValueError, r"no layers match 'nearr'; did you mean 'near'"),
    "unknown glob": (Chain, {"layers": ["near", "layer4.*"]}, ValueError, r"match 'layer4\.\*'"),
    "no names": (Chain, {"layers": []}, ValueError, "layers is empty"),
    "predicate": (Chain, {"layers": lambda name, module: False}, ValueError, "chose none of the 5 layers"),
    "unknown probe": (Chain, {"probes": ["softmacks"]}, ValueError, "no probe 'softmacks'; did you mean 'softmax'"),
    "no probes": (Chain, {"probes": []}, ValueError, "probes is empty"),
    "no probe": (Chain, {"probes": [3]}, TypeError, "expected a tcnn_probe.Probe or the name of one, got 3"),
    "unknown time": (Chain, {"when": "validation"}, ValueError, "expected when='eval', 'train' or 'always', got 'vali"),
    "no forward": (Chain, {"every": 0}, ValueError, "expected a positive integer for every, got 0"),
    "half an image": (Chain, {"max_images": 0.5}, ValueError, "a positive integer for max_images, got 0.5"),
    "negative image": (Chain, {"images": [3, -1]}, ValueError, r"numbers of images from 0, got \[3, -1\]"),
    "no image": (Chain, {"images": ["first"]}, TypeError, r"the numbers of some, got \['first'\]"),
    "layer as mark": (Chain, {"along": "layer"}, ValueError, "'epoch' or 'step', for along; got 'layer'"),
    "alone": (Chain, {"distributed": True}, RuntimeError, "init_process_group"),
    "no module": (lambda: torch.ones(2), {}, TypeError, "expected a torch.nn.Module, got Tensor"),
    "a class": (lambda: Chain, {}, TypeError, "expected a torch.nn.Module, got type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    make, arguments, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        tcnn_probe.record(make(), tmp_path / "run.zarr", **arguments)
    assert not list(tmp_path.iterdir())


def test_compiled_models_are_refused(tmp_path: Path) -> None:
    model = Chain()
    with pytest.raises(TypeError, match="compiled"):
        tcnn_probe.record(torch.compile(model, backend="eager"), tmp_path / "run.zarr")
    model.compile(backend="eager")
    with pytest.raises(TypeError, match="compiled"):
        tcnn_probe.record(model, tmp_path / "run.zarr")
    assert not list(tmp_path.iterdir())


def marked(model: nn.Module, x: torch.Tensor = IMAGES, **options: Any) -> xr.Dataset:
    with tcnn_probe.record(model, **options) as recorder, torch.no_grad():
        model(x)
        recorder.mark(epoch=0)
    return recorder.dataset


NO_ATTENTION: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a convolution": (
        lambda: nn.Conv2d(2, 1, 3),
        {},
        r"no attention was seen in Conv2d.*reparameterize\(model\) turns the last convolutions",
    ),
    "not there": (
        lambda: nn.Sequential(Chain(), nn.ReLU()),
        {"layers": ["0", "1"]},
        "asked for '1', of which nothing was recorded: no attention was seen there",
    ),
}


@pytest.mark.parametrize("case", NO_ATTENTION)
def test_nothing_found_is_told_by_mark(case: str, tmp_path: Path) -> None:
    make, options, message = NO_ATTENTION[case]
    model = make()
    with tcnn_probe.record(model.eval(), tmp_path / "run.zarr", **options) as recorder:
        model(IMAGES)
        with pytest.raises(RuntimeError, match=message):
            recorder.mark(epoch=0)
        with pytest.raises(RuntimeError, match=r"nothing is recorded yet: run a forward, then mark\(epoch=\.\.\.\)"):
            recorder.dataset  # noqa: B018
    assert not list(tmp_path.iterdir())


def test_every_variable_says_what_it_is() -> None:
    model = Branches()
    with tcnn_probe.record(model) as recorder:
        model(IMAGES, IMAGES)
        recorder.mark(epoch=0)
    ds = recorder.dataset
    units = {"gate": "1", "locality_strength": "pixel-2", "attention_span": "pixel2", "center_y": "pixel"}
    units |= {"center_x": "pixel", "attention_distance": "pixel", "uniform_distance": "pixel"}
    units |= {"images": "1", "nonfinite_images": "1"}
    units |= dict.fromkeys(("entropy", "content_entropy", "positional_entropy", "uniform_entropy"), "nat")
    assert {name: array.units for name, array in ds.data_vars.items()} == units
    assert {name for name, about in VARIABLES.items() if "image" not in about.dims} == set(units) - {
        "images",
        "nonfinite_images",
    }
    for array in (*ds.data_vars.values(), *ds.coords.values()):
        assert len(array.description) > 15
        assert array.long_name
    for name, array in ds.data_vars.items():
        of_layers = name.endswith("images") or name.startswith("uniform")
        assert array.dims == (("epoch", "layer") if of_layers else ("epoch", "layer", "head"))


def test_scalars_say_where_they_come_from() -> None:
    model = Chain()
    with tcnn_probe.record(model) as recorder:
        model(IMAGES)
        recorder.mark(epoch=0, top1=1.0)
    assert recorder.dataset.top1.attrs == {"long_name": "top1", "description": "As given to mark()."}


def test_provenance() -> None:
    model = timm.create_model("convit_tiny", img_size=32, depth=1, embed_dim=2).eval()
    attrs = marked(model, torch.randn(1, 3, 32, 32)).attrs
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", attrs["created_at"])
    assert attrs["creation_library"] == "tcnn_probe"
    assert attrs["creation_library_version"] == version("tcnn-probe")
    for package in ("torch", "timm", "xarray", "zarr"):
        assert attrs[f"{package}_version"] == version(package)
    assert attrs["model_class"] == "ConVit"
    assert attrs["model_architecture"] == "convit_tiny"
    assert attrs["tcnn_probe_schema"] == 2
    assert json.loads(attrs["layers"]) == {"blocks.0.attn": {"kind": "convit-gpsa", "heads": 4}}


def test_layer_table_and_class_of_a_model_of_ours() -> None:
    attrs = marked(Chain()).attrs
    assert attrs["model_class"] == "Chain"
    assert "model_architecture" not in attrs
    assert json.loads(attrs["layers"]) == {"near": {"kind": "gpsa", "heads": 9}, "far": {"kind": "gpsa", "heads": 25}}


def test_store_tells_neither_paths_nor_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Chain()
    with tcnn_probe.record(model, tmp_path / "somewhere" / "run.zarr") as recorder:
        model(IMAGES)
        recorder.mark(epoch=0, top1=1.0)
    files = list(tmp_path.rglob("*.json"))
    assert len(files) > len(VARIABLES)
    for file in files:
        text = file.read_text()
        for secret in (tmp_path, "somewhere", Path.home(), Path.cwd()):
            assert str(secret) not in text
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
        assert not re.search(r'"[^"]*file:|"/\w', text)
