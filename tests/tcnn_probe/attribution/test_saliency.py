"""Inputs and results of saliency(): labels, targets,
batches, several methods, a user's own method, errors.
"""

import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe import attribution
from tests.tcnn_probe.attribution.models import (
    CONVOLVED,
    Linear,
    OneBlock,
    bright,
    patchconvnet,
)

# There are five images, so that the last of batches of three is smaller.
IMAGES = torch.randn(5, 2, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_result_has_dimensions_coordinates_and_attributes() -> None:
    model = patchconvnet()
    x = torch.randn(2, 3, *CONVOLVED)
    maps = tcnn_probe.saliency(model, x)
    assert maps.name == "saliency"
    assert maps.dims == ("image", "y", "x")
    assert maps.shape == (2, *CONVOLVED)
    assert maps.image.values.tolist() == [0, 1]
    assert maps.target.dims == ("image",)
    assert maps.target.values.tolist() == model(x).argmax(1).tolist()
    assert {
        "method": "class_attention",
        "units": "1",
        "layer": "pool.block.attn",
    }.items() <= maps.attrs.items()
    assert "Touvron" in maps.attrs["source"]
    assert maps.attrs["torch_version"] == torch.__version__.split("+")[0]
    by_captum = tcnn_probe.saliency(
        Linear(), IMAGES, method="integrated_gradients", baseline=torch.zeros(1, 7, 11)
    )
    assert by_captum.attrs["captum_version"]
    assert by_captum.attrs["source"].endswith("; by captum's IntegratedGradients")
    assert json.loads(by_captum.attrs["options"]) == {
        "n_steps": 32,
        "baseline": "of shape (1, 7, 11)",
    }


OPTIONS = {"integrated_gradients": {"n_steps": 3}, "occlusion": {"window": 5}}


@pytest.mark.parametrize(
    "method", ["class_attention", "gradcam", "integrated_gradients", "occlusion"]
)
def test_batch_size_does_not_matter(method: str) -> None:
    attends = method == "class_attention"
    model, x = (
        (patchconvnet("_multi", 3), torch.randn(3, 3, *CONVOLVED))
        if attends
        else (OneBlock(), bright())
    )
    batch_sizes: list[int] = []
    # Batches are counted in the model, where memory is allocated.
    next(model.children()).register_forward_pre_hook(
        lambda module, inputs: batch_sizes.append(len(inputs[0]))
    )
    options = OPTIONS.get(method, {})
    together = tcnn_probe.saliency(model, x, method=method, **options)
    for batch_size in (1, 2):
        batch_sizes.clear()
        maps = tcnn_probe.saliency(model, x, method=method, batch_size=batch_size, **options)
        # Other batch sizes change the order of float32 sums.
        np.testing.assert_allclose(maps, together, atol=1e-5 * abs(together).max().item())
        assert max(batch_sizes) == batch_size
    batch_sizes.clear()
    method_options = {method: options} if options else {}
    tcnn_probe.faithfulness(model, x, [method], batch_size=2, steps=2, options=method_options)
    assert max(batch_sizes) == 2


def test_any_form_of_targets_and_images() -> None:
    model = Linear()
    x = IMAGES[:3]
    predicted = model(x).argmax(1)
    maps = tcnn_probe.saliency(model, x, method="input_x_gradient", batch_size=2)
    for targets in (predicted, predicted.tolist(), predicted.numpy()):
        np.testing.assert_array_equal(
            tcnn_probe.saliency(model, x, targets, "input_x_gradient"), maps
        )
    next_class = (int(predicted[0]) + 1) % 3
    of_next_class = tcnn_probe.saliency(model, x, next_class, "input_x_gradient")
    assert of_next_class.target.values.tolist() == [next_class] * 3
    assert not np.allclose(of_next_class[0], maps[0])
    # Images are converted to the model's dtype: here a float32 array for a float64 model.
    single = tcnn_probe.saliency(model, x.float().numpy(), predicted, "input_x_gradient")
    assert single.dtype == "float64"


def red(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """First channel, times the class."""
    assert not model.training
    # A method may differentiate, whatever the mode of the caller.
    assert torch.is_grad_enabled()
    return x[:, 0] * target[:, None, None]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_users_own_method(mode: type) -> None:
    with mode():
        maps = tcnn_probe.saliency(Linear(), IMAGES, [2, 0, 1, 1, 2], red, batch_size=3)
        tcnn_probe.faithfulness(Linear(), IMAGES, red, metrics="deletion_auc")
    np.testing.assert_array_equal(maps, IMAGES[:, 0] * torch.tensor([2, 0, 1, 1, 2])[:, None, None])
    assert {
        "method": "red",
        "definition": "First channel, times the class.",
    }.items() <= maps.attrs.items()


def test_several_methods(tmp_path: Path) -> None:
    model = patchconvnet()
    x = torch.randn(2, 3, *CONVOLVED)
    methods = ["class_attention", "gradcam", "Saliency", red]
    maps = tcnn_probe.saliency(model, x, method=methods, gradcam={"layer": "blocks.0.conv1"})
    layers = {
        "class_attention": "pool.block.attn",
        "gradcam": "blocks.0.conv1",
        "Saliency": "",
        "red": "",
    }
    assert {name: map_of_method.attrs["layer"] for name, map_of_method in maps.items()} == layers
    for name, options in {
        "class_attention": {},
        "gradcam": {"layer": "blocks.0.conv1"},
    }.items():
        alone = tcnn_probe.saliency(model, x, method=name, **options).rename(name)
        xr.testing.assert_identical(maps[name].drop_attrs(), alone.drop_attrs())
    # Attributes have to be plain JSON to be stored.
    maps.to_zarr(tmp_path / "maps.zarr", consolidated=False)
    with xr.open_zarr(tmp_path / "maps.zarr", consolidated=False) as read:
        xr.testing.assert_identical(read.load(), maps)


def test_an_unsupported_method_of_several_is_left_out() -> None:
    model = Linear()
    with pytest.warns(RuntimeWarning) as warnings:
        maps = tcnn_probe.saliency(
            model, IMAGES, method=["class_attention", red, "rollout", "gradcam"]
        )
    assert [*maps.data_vars] == ["red"]
    reasons = [
        "no layer has a map of class attention",
        "no attention was seen",
        "no layer gives a feature map",
    ]
    for warning, name, reason in zip(
        warnings, ("class_attention", "rollout", "gradcam"), reasons, strict=True
    ):
        assert str(warning.message).startswith(f"{name!r} is left out: {reason}")
        # The warning points to the line of the caller, not to a line of the library.
        assert warning.filename == __file__
    with pytest.raises(ValueError, match="no layer has a map of class attention"):
        tcnn_probe.saliency(model, IMAGES, method=["class_attention", "rollout"])


class Heads(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum((2, 3)), x.mean((2, 3))


def flat(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return x[:, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"images": IMAGES[0, 0]},
            ValueError,
            r"\(B, C, H, W\), .*got shape \(7, 11\)",
        ),
        ({"target": 3}, ValueError, "targets from 0 to 2, got 3"),
        (
            {"target": [0, 1]},
            ValueError,
            r"expected one target, or 5, one for each image; got shape \(2,\)",
        ),
        ({"target": 1.0}, TypeError, "class indices for targets, got torch.float32"),
        ({"target": "cat"}, TypeError, "class indices for targets, got 'cat'"),
        (
            {"method": "grad_cam"},
            ValueError,
            r"one of \['class_attention', .*got 'grad_cam'",
        ),
        ({"method": "grad_cam"}, ValueError, "did you mean 'gradcam'"),
        ({"method": []}, ValueError, r"expected a method.*got \[\]"),
        (
            {"method": ["occlusion", "occlusion"]},
            ValueError,
            "different names, got 'occlusion' twice",
        ),
        (
            {"method": ["occlusion"], "gradcam": {}},
            ValueError,
            "options for 'gradcam', which is not one of the methods",
        ),
        (
            {"method": ["occlusion"], "occlusion": 3},
            TypeError,
            "the options of each, as in .*got occlusion=3",
        ),
        (
            {"method": ["occlusion"], "layer": "a"},
            TypeError,
            r"gradcam=\{'layer': ...\}; got layer='a'",
        ),
        (
            {"method": "rollout", "layer": "a"},
            TypeError,
            "'rollout' has no option 'layer'",
        ),
        ({"method": red, "strength": 3}, TypeError, "'red' is your own function"),
        (
            {"method": flat},
            TypeError,
            r"'flat' to give a tensor of shape \(5, 7, 11\), got shape \(5, 11\)",
        ),
        ({"batch_size": 0}, ValueError, "integer from 1 for batch_size, got 0"),
        (
            {"model": Heads()},
            TypeError,
            r"a score for each class, shape \(5, K\), got tuple",
        ),
        ({"model": torch.sum}, TypeError, "expected a torch.nn.Module, got builtin"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tcnn_probe.saliency(
            **({"model": Linear(), "images": IMAGES, "method": "occlusion"} | arguments)
        )


def test_modules_do_not_hide_functions_of_the_same_name() -> None:
    """An imported module replaces a function of its name in the package,
    unless the package has imported it before.
    """
    for package in (attribution, tcnn_probe.evaluation, tcnn_probe.plot):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
        # Names of classes and constants have capitals.
        functions = [name for name in package.__all__ if name.islower()]
        assert all(inspect.isfunction(getattr(package, name)) for name in functions)
