"""On a GPU: recordings, interventions, conversions and training as on the CPU, with and without the
kernels of Triton, whose own tests are in tcnn_model/kernels.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tcnn_model
import tcnn_model.models
import tcnn_probe
from tcnn_model.training.__main__ import main

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
GPU = "cuda"
# Side of the images, and the network.
NETWORKS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "ViT with registers": (
        64,
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, reg_tokens=2, depth=3),
    ),
    "BEiT": (64, lambda: timm.create_model("beit_base_patch16_224", img_size=64, depth=2)),
    "EVA-02": (56, lambda: timm.create_model("eva02_tiny_patch14_224", img_size=56, depth=2)),
    "Swin": (
        112,
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=112, depths=(2, 2), num_heads=(3, 6)
        ),
    ),
    "T-CNN": (64, lambda: tcnn_model.reparameterize(timm.create_model("resnet18"))),
    "PatchConvNet": (64, lambda: timm.create_model("patchconvnet_s60", depth=3)),
    "ConViT": (224, lambda: timm.create_model("convit_tiny", depth=3, local_up_to_layer=2)),
}


@pytest.fixture(autouse=True)
def products_in_full_precision() -> Iterator[None]:
    convolutions = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.fixture(params=["blocks", "kernels"])
def statistics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Switch the kernels on, and fail if they differ from the blocks, which is warned of."""
    monkeypatch.setenv("TCNN_PROBE_TRITON", str(int(request.param == "kernels")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield request.param


def example(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network, in which attention is peaked, and four images."""
    torch.manual_seed(0)
    side, create = NETWORKS[name]
    model = create().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("qkv.weight", "qk.weight", ".query", ".key")):
            nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
    return model, torch.randn(4, 3, side, side)


def recorded(model: nn.Module, *batches: Tensor, forwards: int = 1, **options: Any) -> xr.Dataset:
    """Record one epoch of each number of equal forwards."""
    with tcnn_probe.record(model, **options) as recorder, torch.inference_mode():
        for epoch in range(forwards):
            for batch in batches:
                model(batch)
            recorder.mark(epoch=epoch)
    return recorder.dataset


def check(actual: xr.Dataset, expected: xr.Dataset, tolerance: float) -> None:
    """Check all variables of numbers, up to a tolerance relative to the largest."""
    assert set(actual.variables) == set(expected.variables)
    for name, variable in expected.data_vars.items():
        if variable.dtype.kind == "f":
            largest = max(1.0, float(np.abs(variable).max()))
            np.testing.assert_allclose(
                actual[name], variable, atol=tolerance * largest, rtol=0, err_msg=name
            )


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:entropy collapse")
def test_recordings_in_float64_are_those_of_the_cpu(name: str) -> None:
    model, x = (each.double() for each in example(name))
    options: dict[str, Any] = {"health": True, "images": 2}
    expected = recorded(model, x, **options)
    check(recorded(model.to(GPU), x.to(GPU), **options), expected, 1e-8)


@pytest.mark.parametrize("name", NETWORKS)
def test_recordings_in_float32_are_those_of_the_cpu(name: str, statistics: str) -> None:
    model, x = example(name)
    expected = recorded(copy.deepcopy(model).double(), x.double())
    # The kernels give the second forward of each shape.
    actual = recorded(model.to(GPU), x.to(GPU), forwards=2)
    for epoch in range(2):
        check(actual.isel(epoch=[epoch]), expected, 2e-4)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_bfloat16_is_recorded_as_the_model_computes_it(
    name: str, way: str, statistics: str
) -> None:
    """In bfloat16 the networks themselves differ from float64, by a few hundredths."""
    model, x = example(name)
    expected = recorded(copy.deepcopy(model).double(), x.double())
    model = model.to(GPU)
    if way == "bfloat16":
        actual = recorded(model.bfloat16(), x.to(GPU).bfloat16(), forwards=2)
    else:
        with torch.autocast(GPU, torch.bfloat16):
            actual = recorded(model, x.to(GPU), forwards=2)
    for epoch in range(2):
        measured = actual.entropy.isel(epoch=epoch)
        np.testing.assert_allclose(measured, expected.entropy.isel(epoch=0), atol=0.1)


def test_epochs_on_both_devices() -> None:
    """A model that moves is recorded on."""
    model, x = (each.double() for each in example("ViT with registers"))
    with tcnn_probe.record(model) as recorder, torch.inference_mode():
        model(x)
        recorder.mark(epoch=0)
        model.to(GPU)(x.to(GPU))
        recorder.mark(epoch=1)
    first, second = (recorder.dataset.isel(epoch=[epoch]) for epoch in range(2))
    check(second, first, 1e-8)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models(mode: str, statistics: str) -> None:
    """Graphs of CUDA, which reuse the memory of their results, are recorded eagerly."""
    model, x = (each.to(GPU) for each in example("ViT with registers"))
    plain = recorded(model, x)
    with torch.inference_mode():
        logits = model(x)
        compiled = torch.compile(model, mode=mode)
        for _ in range(3):
            torch.testing.assert_close(compiled(x).clone(), logits, rtol=1e-3, atol=1e-3)
        with tcnn_probe.record(model) as recorder:
            compiled(x)
            recorder.mark(epoch=0)
        for _ in range(3):
            torch.testing.assert_close(compiled(x).clone(), logits, rtol=1e-3, atol=1e-3)
    check(recorder.dataset, plain, 2e-4)


@pytest.mark.parametrize("name", ["ViT with registers", "Swin", "T-CNN"])
def test_interventions(name: str) -> None:
    model, x = (each.double() for each in example(name))
    on_gpu, moved = copy.deepcopy(model).to(GPU), x.to(GPU)
    for mode in ("zero", "uniform", "mean", "convolutional", "static", "salient", "shuffled"):
        others = None if mode in ("zero", "uniform") else x.flip(0, 3)
        others_on_gpu = None if others is None else others.to(GPU)
        with tcnn_probe.ablate(model, mode=mode, images=others), torch.inference_mode():
            expected = model(x)
        with tcnn_probe.ablate(on_gpu, mode=mode, images=others_on_gpu), torch.inference_mode():
            torch.testing.assert_close(on_gpu(moved).cpu(), expected, msg=mode)


def test_maps_importance_and_saliency() -> None:
    model, x = (each.double() for each in example("ViT with registers"))
    labels = torch.arange(len(x))
    on_gpu, moved = copy.deepcopy(model).to(GPU), x.to(GPU)
    for layer, expected in tcnn_probe.attention_maps(model, x).items():
        actual = tcnn_probe.attention_maps(on_gpu, moved)[layer]
        check(actual.to_dataset(), expected.to_dataset(), 1e-6)
    expected = tcnn_probe.head_importance(model, [(x, labels)])
    actual = tcnn_probe.head_importance(on_gpu, [(moved, labels.to(GPU))])
    np.testing.assert_allclose(actual, expected, atol=1e-8)
    for method in ("class_attention", "rollout", "integrated_gradients"):
        expected = tcnn_probe.saliency(model, x, labels, method)
        actual = tcnn_probe.saliency(on_gpu, moved, labels.to(GPU), method)
        np.testing.assert_allclose(actual, expected, atol=1e-6 * float(expected.max()))


def test_conversions() -> None:
    model, x = (each.double() for each in example("ViT with registers"))
    kernels = tcnn_probe.head_kernels(model, x)
    expected = tcnn_model.convolve(model, kernels)(x)
    model, x = model.to(GPU), x.to(GPU)
    converted = tcnn_model.convolve(model, tcnn_probe.head_kernels(model, x))
    torch.testing.assert_close(converted(x).cpu(), expected)
    cnn = timm.create_model("resnet18").eval().double()
    start: dict[str, Any] = {"locality_strength": 30.0, "gating": 40.0}
    on_gpu = tcnn_model.reparameterize(copy.deepcopy(cnn).to(GPU), **start)
    torch.testing.assert_close(on_gpu(x).cpu(), tcnn_model.unstride(cnn)(x.cpu()))


@pytest.mark.parametrize("amp", [False, True])
def test_fine_tuning(amp: bool, statistics: str) -> None:
    """A T-CNN learns its pictures, and each validation is recorded."""
    torch.manual_seed(0)
    labels = torch.arange(64) % 2
    pictures = torch.randn(64, 3, 32, 32) + (2.0 * labels - 1)[:, None, None, None]
    loader = DataLoader(TensorDataset(pictures, labels), 16, shuffle=True)
    model = tcnn_model.reparameterize(timm.create_model("resnet10t", num_classes=2))
    with tcnn_probe.record(model) as recorder:
        for result in tcnn_model.finetune(
            model,
            loader,
            loader,
            epochs=3,
            warmup_epochs=0,
            lr=1e-3,
            device=GPU,
            amp=amp,
            progress=False,
        ):
            recorder.mark(epoch=result.epoch, top1=result.top1)
    assert next(model.parameters()).device.type == GPU
    assert recorder.dataset.sizes["epoch"] == 4
    assert float(recorder.dataset.top1[-1]) > 0.9
    assert np.isfinite(recorder.dataset.entropy).all()


def test_the_command_trains_and_records(tmp_path: Path) -> None:
    """On the first GPU, which nobody has to name."""
    arguments = ["resnet10t", "--epochs", "1", "--warmup-epochs", "0", "--limit", "64"]
    arguments += ["--img-size", "64", "--reparameterize-at", "0", "--amp", "bfloat16"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    heads = tcnn_probe.open(tmp_path / "run" / "recording.zarr")["heads"]
    assert heads.sizes["epoch"] == 2
    assert np.isfinite(heads.entropy).all()
