"""What saliency() is given and gives: labels, targets, batches, several methods, one's own method, errors."""

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attribution.models import CONVOLVED, SIZE, Linear, patchconvnet, transformer

METHODS = list(tcnn_probe.attribution.METHODS)


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 2, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_labels() -> None:
    model, x = transformer("deit_tiny_patch16_224"), torch.randn(2, 3, *SIZE)
    maps = tcnn_probe.saliency(model, x)
    assert maps.dims == ("image", "y", "x")
    assert maps.shape == (2, *SIZE)
    assert maps.name == "saliency"
    assert maps.image.values.tolist() == [0, 1]
    assert maps.target.dims == ("image",)
    assert maps.target.values.tolist() == model(x).argmax(1).tolist()
    attrs = maps.attrs
    assert attrs["method"] == "class_attention"
    assert attrs["units"] == "1"
    assert "Touvron" in attrs["source"]
    assert json.loads(attrs["options"]) == {"interpolation": "bilinear"}
    assert attrs["torch_version"] == torch.__version__.split("+")[0]
    assert "captum_version" not in attrs
    assert tcnn_probe.saliency(Linear(), images(), method="input_x_gradient").attrs["captum_version"]


@pytest.mark.parametrize("method", METHODS)
def test_batches_do_not_matter(method: str) -> None:
    if method == "rollout":
        model, size = transformer("deit_tiny_patch16_224"), SIZE
    else:
        model, size = patchconvnet("_multi", 3), CONVOLVED
    x = torch.randn(5, 3, *size, generator=torch.Generator().manual_seed(3))
    alone, pairs, together = (tcnn_probe.saliency(model, x, method=method, batch_size=n) for n in (1, 2, 5))
    scale = abs(together).max()
    np.testing.assert_allclose(alone / scale, together / scale, atol=1e-5)
    np.testing.assert_allclose(pairs / scale, together / scale, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_no_more_images_at_once_than_the_batch_size(size: int) -> None:
    model, x = patchconvnet(), torch.randn(5, 3, *CONVOLVED)
    seen: list[int] = []
    model.stem.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    methods = [name for name in METHODS if name != "rollout"]
    tcnn_probe.saliency(model, x, method=methods, batch_size=size)
    tcnn_probe.faithfulness(model, x, ["class_attention", "gradcam"], batch_size=size, samples=3, steps=3)
    assert max(seen) == size


def test_targets() -> None:
    model, x = Linear(), images(3)
    predicted = model(x).argmax(1)
    own = tcnn_probe.saliency(model, x, method="input_x_gradient", batch_size=2)
    for given in (predicted, predicted.tolist(), predicted.numpy()):
        np.testing.assert_array_equal(tcnn_probe.saliency(model, x, given, "input_x_gradient"), own)
    other = (int(predicted[0]) + 1) % 3
    all_other = tcnn_probe.saliency(model, x, other, "input_x_gradient")
    assert all_other.target.values.tolist() == [other] * 3
    assert not np.allclose(all_other[0], own[0])


def test_images_as_an_array_in_another_dtype() -> None:
    model, x = Linear(), images(3)
    maps = tcnn_probe.saliency(model, x.float().numpy(), 1, "input_x_gradient")
    assert maps.dtype == "float64"
    np.testing.assert_allclose(maps, tcnn_probe.saliency(model, x, 1, "input_x_gradient"), rtol=1e-5, atol=1e-6)


def red(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """First channel, times the class."""
    assert not model.training
    assert torch.is_grad_enabled()
    return x[:, 0] * target[:, None, None]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_own_method(mode: type) -> None:
    x = images()
    with mode():
        maps = tcnn_probe.saliency(Linear(), x, [2, 0, 1, 1, 2], red, batch_size=3)
        tcnn_probe.faithfulness(Linear(), x, red, metrics="sensitivity")  # which captum computes under no_grad
    np.testing.assert_array_equal(maps, x[:, 0] * torch.tensor([2, 0, 1, 1, 2])[:, None, None])
    assert maps.attrs["method"] == "red"
    assert maps.attrs["definition"] == "First channel, times the class."


def test_several_methods() -> None:
    model, x = patchconvnet(), torch.randn(2, 3, *CONVOLVED)
    maps = tcnn_probe.saliency(
        model, x, method=["class_attention", "gradcam", "occlusion", red], gradcam={"layer": "blocks.0.conv1"}
    )
    layers = {"class_attention": "pool.block.attn", "gradcam": "blocks.0.conv1", "occlusion": "", "red": ""}
    assert {name: one.attrs["layer"] for name, one in maps.items()} == layers
    for name in ("class_attention", "occlusion"):
        alone = tcnn_probe.saliency(model, x, method=name).rename(name)
        xr.testing.assert_identical(maps[name].drop_attrs(), alone.drop_attrs())
    one = tcnn_probe.saliency(model, x, method="gradcam", layer="blocks.0.conv1")
    np.testing.assert_array_equal(maps.gradcam, one)
    assert maps.gradcam.attrs["units"] == "score of the class"


def test_survives_a_file(tmp_path: Path) -> None:
    maps = tcnn_probe.saliency(Linear(), images(), method=["input_x_gradient", "occlusion"])
    maps.to_zarr(tmp_path / "maps.zarr", consolidated=False)
    with xr.open_zarr(tmp_path / "maps.zarr", consolidated=False) as read:
        xr.testing.assert_identical(read.load(), maps)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (images()[0], ValueError, r"shape \(B, C, H, W\), B > 0, got shape \(2, 7, 11\)"),
        (images()[:0], ValueError, "B > 0, got shape"),
        ((images() * 255).to(torch.uint8), TypeError, "floating point and normalised, got torch.uint8"),
    ],
)
def test_bad_images(x: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tcnn_probe.saliency(Linear(), x, method="occlusion")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (3, ValueError, "targets from 0 to 2, got 3"),
        ([0, 1, 2, -1, 0], ValueError, "targets from 0 to 2, got -1"),
        ([0, 1], ValueError, r"expected one target, or 5: one an image; got shape \(2,\)"),
        (1.0, TypeError, "class indices for target, got torch.float32"),
        (True, TypeError, "class indices for target, got torch.bool"),
    ],
)
def test_bad_targets(target: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tcnn_probe.saliency(Linear(), images(), target, "occlusion")  # type: ignore[arg-type]


class Heads(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum((2, 3)), x.mean((2, 3))


def flat(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return x[:, 0, 0]


def none(model: nn.Module, x: Tensor, target: Tensor) -> None:
    return None


@pytest.mark.parametrize(
    ("model", "method", "options", "error", "message"),
    [
        (Linear(), "grad_cam", {}, ValueError, r"one of \['class_attention', .*got 'grad_cam'"),
        (Linear(), [], {}, ValueError, r"expected a method.*got \[\]"),
        (Linear(), 3, {}, ValueError, "expected a method.*got 3"),
        (Linear(), ["occlusion", "occlusion"], {}, ValueError, "different names, got 'occlusion' twice"),
        (Linear(), ["occlusion"], {"gradcam": {}}, ValueError, r"options for 'gradcam', which is none of the methods"),
        (Linear(), ["occlusion"], {"occlusion": 3}, TypeError, "options of each as a dict, got occlusion=3"),
        (Linear(), ["occlusion"], {"layer": "a"}, ValueError, r"name each one's layer: gradcam=\{'layer'"),
        (Linear(), "occlusion", {"layer": "a"}, TypeError, "'occlusion' has no option 'layer'"),
        (Linear(), "gradcam", {"n_steps": 3}, TypeError, "'gradcam' has no option 'n_steps'"),
        (Linear(), red, {"strength": 3}, TypeError, "'red' is a function of yours"),
        (Linear(), flat, {}, ValueError, r"method 'flat' to give shape \(5, 7, 11\), got \(5, 11\)"),
        (Linear(), none, {}, TypeError, "method 'none' to give a tensor, got NoneType"),
        (Linear(), "occlusion", {"batch_size": 0}, ValueError, "positive integer for batch_size, got 0"),
        (Heads(), "occlusion", {}, TypeError, r"a score for each class, shape \(5, K\), got tuple"),
        (nn.Identity(), "occlusion", {}, TypeError, r"got shape \(5, 2, 7, 11\)"),
        (torch.sum, "occlusion", {}, TypeError, "expected a torch.nn.Module, got builtin"),
    ],
)
def test_errors(model: nn.Module, method: object, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tcnn_probe.saliency(model, images(), method=method, **options)  # type: ignore[arg-type]


def test_names_are_functions_whatever_is_imported_first() -> None:
    """A module that is imported takes the place of a function of its name in the package, unless the package did it."""
    for package in (tcnn_probe.attribution, tcnn_probe.plot):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
        functions = [name for name in package.__all__ if name.islower()]
        assert all(inspect.isfunction(getattr(package, name)) for name in functions)


def test_without_captum() -> None:
    program = """
import sys
sys.modules["captum"] = None
import torch, tcnn_probe
from tests.tcnn_probe.attribution.models import Linear
model, x = Linear(), torch.randn(1, 2, 7, 11).double()
for call in (
    lambda: tcnn_probe.saliency(model, x, method="occlusion"),
    lambda: tcnn_probe.faithfulness(model, x, {"a": x[:, 0]}),
):
    try:
        call()
    except ModuleNotFoundError as error:
        assert "this needs captum: pip install captum" in str(error), error
    else:
        raise AssertionError("no error")
tcnn_probe.faithfulness(model, x, {"a": x[:, 0]}, metrics="deletion_auc")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
