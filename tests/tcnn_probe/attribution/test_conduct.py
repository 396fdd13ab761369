"""The model, and torch, are afterwards as they were: also after an exception, and whatever the caller's mode is."""

import copy
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.attribution.models import CONVOLVED, patchconvnet, transformer
from tests.tcnn_probe.contracts.helpers import Trace

METHODS = list(tcnn_probe.attribution.METHODS)


def model_for(method: str) -> tuple[nn.Module, tuple[int, int]]:
    return (transformer("deit_tiny_patch16_224"), (24, 40)) if method == "rollout" else (patchconvnet(), CONVOLVED)


def busy(method: str) -> tuple[nn.Module, Tensor]:
    """With parts in training mode, frozen and unfrozen parameters, gradients and a hook of somebody else."""
    model, size = model_for(method)
    model.train()
    model.blocks[0].eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name)
        parameter.grad = torch.full_like(parameter, 0.5) if "weight" in name else None
    model.blocks.register_forward_hook(_nothing)
    return model, torch.randn(2, 3, *size)


def _nothing(*args: Any) -> None:
    pass


class Everything:
    """What could be changed of the model, torch's state, and the images."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.trace = Trace(model)
        self.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        self.images, self.needs_grad = images.clone(), images.requires_grad
        self.random = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002

    def check(self, model: nn.Module, images: Tensor) -> None:
        now = Everything(model, images)
        assert now.trace == self.trace
        for name, gradient in self.gradients.items():
            after = now.gradients[name]
            assert (gradient is None) == (after is None), name
            assert gradient is None or torch.equal(gradient, after), name
        assert torch.equal(now.images, self.images)
        assert now.needs_grad == self.needs_grad
        assert images.grad is None
        assert torch.equal(now.random[0], self.random[0])
        assert (now.random[1] == self.random[1]).all()


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left(method: str) -> None:
    model, x = busy(method)
    before = Everything(model, x)
    tcnn_probe.saliency(model, x, method=method)
    before.check(model, x)


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left_after_an_exception(method: str, calls: int) -> None:
    """In the middle of the forward that finds the targets, and of those of the method itself."""
    model, x = busy(method)
    count = 0

    def fail(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == calls:
            raise BrokenError

    (model.blocks[-1].conv2 if method != "rollout" else model.blocks[-1].mlp).register_forward_pre_hook(fail)
    before = Everything(model, x)
    few = {"class_attention", "rollout", "input_x_gradient"}
    if calls == 3 and method in few:
        tcnn_probe.saliency(model, x, method=method)
    else:
        with pytest.raises(BrokenError):
            tcnn_probe.saliency(model, x, method=method)
    before.check(model, x)


def test_nothing_is_left_by_faithfulness() -> None:
    model, x = busy("gradcam")
    before = Everything(model, x)
    masks = torch.zeros(2, *CONVOLVED, dtype=torch.bool)
    masks[:, 3:9] = True
    scores = tcnn_probe.faithfulness(model, x, ["class_attention", "gradcam"], masks=masks, samples=2, steps=3)
    assert set(scores) == set(tcnn_probe.attribution.METRICS)
    before.check(model, x)

    def broken(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        raise BrokenError

    with pytest.raises(BrokenError):
        tcnn_probe.faithfulness(model, x, broken)
    before.check(model, x)


def test_a_method_of_ones_own_that_goes_backward() -> None:
    model, x = busy("gradcam")
    before = Everything(model, x)

    def backward(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        model(x.requires_grad_()).gather(1, target[:, None]).sum().backward()
        assert x.grad is not None
        return x.grad.sum(1)

    tcnn_probe.saliency(model, x, method=backward)
    before.check(model, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", METHODS)
def test_whatever_mode_the_caller_is_in(method: str, mode: Any) -> None:
    model, size = model_for(method)
    x = torch.randn(2, 3, *size)
    outside = tcnn_probe.saliency(model, x, method=method)
    with mode():
        inside = tcnn_probe.saliency(model, x.clone(), method=method)
    np.testing.assert_array_equal(inside, outside)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_and_in_training_mode(method: str) -> None:
    """Dropout and stochastic depth are off."""
    model, size = model_for(method)
    x = torch.randn(2, 3, *size)
    usual = tcnn_probe.saliency(model, x, method=method)
    twin = copy.deepcopy(model).requires_grad_(False).train()
    for module in twin.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    np.testing.assert_allclose(tcnn_probe.saliency(twin, x, method=method), usual, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_half_precision(method: str) -> None:
    model, size = model_for(method)
    x = torch.randn(2, 3, *size)
    usual = tcnn_probe.saliency(model, x, 1, method=method)
    half = tcnn_probe.saliency(model.bfloat16(), x, 1, method=method)
    assert half.dtype == "float32"
    correlation = np.corrcoef(half.values.ravel(), usual.values.ravel())[0, 1]
    assert correlation > 0.9


def test_relus_in_place_and_a_layer_before_one() -> None:
    model = sharpen(timm.create_model("resnet10t", num_classes=3)).requires_grad_(False)
    x = torch.randn(2, 3, 32, 64)
    for layer in (None, "layer3.0.bn1"):
        assert (tcnn_probe.saliency(model, x, method="gradcam", layer=layer, relu_attributions=False) != 0).any()


@pytest.mark.parametrize("method", METHODS)
def test_not_recorded_by_others(method: str) -> None:
    """Nor is anything of their forwards lost."""
    model, size = model_for(method)
    x = torch.randn(2, 3, *size)
    probes = ["softmax", "class-attention", "gradient"] if method == "rollout" else ["class-attention", "gradient"]
    expected = tcnn_probe.saliency(model, x, method=method)
    datasets = []
    for meanwhile in (True, False):
        with tcnn_probe.record(model, probes=probes, when="always") as recorder:
            model(x)
            if meanwhile:
                np.testing.assert_array_equal(tcnn_probe.saliency(model, x, method=method), expected)
                tcnn_probe.faithfulness(model, x, [method], steps=2, samples=1)
            model(x[:1]).sum().backward()
            recorder.mark(epoch=0)
        datasets.append(recorder.tree.load())
    assert (
        int(datasets[0].dataset.images.max() if "images" in datasets[0].dataset else datasets[0]["heads"].images.max())
        == 3
    )
    xr.testing.assert_equal(*datasets)


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = patchconvnet(), torch.randn(2, 3, *CONVOLVED)
    for progress, shown in ((True, True), (False, False), (None, False)):
        tcnn_probe.saliency(model, x, progress=progress)
        assert ("saliency" in capsys.readouterr().err) == shown
        tcnn_probe.faithfulness(model, x, "class_attention", metrics="deletion_auc", progress=progress)
        assert ("faithfulness" in capsys.readouterr().err) == shown
