"""What is recorded, against brute force on each layer's own input."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import GPSA, gpsa_layers
from tests.tcnn_probe.networks import Branches, Chain, inputs_of, scatter, small_resnet
from tests.tcnn_probe.oracle import gpsa_statistics, gpsa_statistics_of_qk

MEASURED = ("entropy", "content_entropy", "positional_entropy", "attention_distance")


def images(count: int = 7, channels: int = 2) -> Tensor:
    return torch.randn(count, channels, 5, 11, generator=torch.Generator().manual_seed(3))


def record_epoch(model: nn.Module, x: Tensor, split: Sequence[int] = (7,)) -> xr.Dataset:
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for batch in x.split(list(split)):
            model(batch)
        recorder.mark(epoch=0)
    return recorder.dataset.load()


def assert_layer(ds: xr.Dataset, layer: str, expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """The last epoch holds the means over images of ``expected``, and NaN for heads that the layer has not."""
    for name in MEASURED:
        got, mean = ds[name].sel(layer=layer).values[-1], expected[name].mean(0).numpy()
        np.testing.assert_allclose(got[: len(mean)], mean, rtol=tolerance, atol=tolerance, err_msg=name)
        assert np.isnan(got[len(mean) :]).all()


@pytest.mark.parametrize("split", [(7,), (3, 4), (1,) * 7])
def test_means_over_images_equal_brute_force_whatever_the_batches(split: tuple[int, ...]) -> None:
    model, x = Chain(), images()
    ds = record_epoch(model, x, split)
    for name, seen in inputs_of(model, ["near", "far"], x).items():
        assert_layer(ds, name, gpsa_statistics(model.get_submodule(name), seen))
    assert ds.images.values.tolist() == [[7, 7]]
    assert ds.nonfinite_images.values.tolist() == [[0, 0]]


def test_batches_change_nothing() -> None:
    model, x = Chain(), images()
    whole = record_epoch(model, x)
    for split in ((3, 4), (1,) * 7):
        for name in MEASURED:
            np.testing.assert_allclose(record_epoch(model, x, split)[name], whole[name], rtol=1e-6, atol=1e-6)


def test_reparameterized_resnet() -> None:
    model, x = small_resnet(), torch.randn(5, 1, 71, 103)
    ds = record_epoch(model, x, (2, 3))
    layers = gpsa_layers(model)
    assert ds.layer.values.tolist() == list(layers) == [f"layer4.{block}.conv{n}" for block in (0, 1) for n in (1, 2)]
    for name, seen in inputs_of(model, list(layers), x).items():
        assert seen.shape[2:] == (5, 7)
        assert_layer(ds, name, gpsa_statistics(layers[name], seen))


def test_parameters_are_those_of_the_layers_as_marked() -> None:
    model = Chain()
    with tcnn_probe.record(model) as recorder:
        for epoch in range(3):
            model(images())
            model.far.gating.data += 1
            model.near.center.data *= 1.5
            recorder.mark(epoch=epoch)
            for name, layer in gpsa_layers(model).items():
                row = recorder.dataset.sel(layer=name, epoch=epoch, head=slice(0, layer.heads - 1))
                alpha = layer.locality_strength.detach()
                np.testing.assert_allclose(row.gate, torch.sigmoid(layer.gating.detach()), rtol=1e-6)
                np.testing.assert_allclose(row.locality_strength, alpha, rtol=1e-6)
                np.testing.assert_allclose(row.attention_span, 1 / alpha, rtol=1e-6)
                np.testing.assert_array_equal(row.center_y, layer.center[:, 0].detach())
                np.testing.assert_array_equal(row.center_x, layer.center[:, 1].detach())
    assert recorder.dataset.sizes == {"epoch": 3, "layer": 2, "head": 25}
    for name in ("gate", "locality_strength", "attention_span", "center_y", "center_x"):
        assert np.isnan(recorder.dataset[name].sel(layer="near", head=slice(9, None))).all()


def test_each_epoch_starts_anew() -> None:
    model, first, second = Chain(), images(3), 2 * images(2)
    with tcnn_probe.record(model) as recorder:
        for epoch, x in enumerate((first, second)):
            model(x)
            recorder.mark(epoch=epoch)
    assert_layer(recorder.dataset, "near", gpsa_statistics(model.near, second))
    assert_layer(recorder.dataset.isel(epoch=slice(1)), "near", gpsa_statistics(model.near, first))
    assert recorder.dataset.images.values.tolist() == [[3, 3], [2, 2]]


def test_training_forwards_are_ignored() -> None:
    model, x = Chain(), images()
    with tcnn_probe.record(model) as recorder:
        model.train()(9 * x)
        model.eval()(x)
        model.train()(9 * x)
        recorder.mark(epoch=0)
    assert_layer(recorder.dataset, "near", gpsa_statistics(model.near, x))
    assert recorder.dataset.images.values.tolist() == [[7, 7]]


@pytest.mark.parametrize("modes", list(permutations([torch.no_grad, torch.inference_mode, nullcontext])))
def test_gradient_modes_mix_within_an_epoch(modes: tuple[type[AbstractContextManager[None]], ...]) -> None:
    model, x = Chain(), images()
    with tcnn_probe.record(model) as recorder:
        for mode, batch in zip(modes, x.split([1, 2, 4]), strict=True):
            with mode():
                model(batch)
        recorder.mark(epoch=0)
    assert_layer(recorder.dataset, "near", gpsa_statistics(model.near, x))


def test_recording_changes_neither_outputs_nor_gradients_nor_random_numbers() -> None:
    def run(model: Chain, x: Tensor) -> list[Tensor]:
        torch.manual_seed(5)
        output = model(x)
        output.square().sum().backward()
        return [output, *(p.grad for p in model.parameters()), torch.rand(3)]

    bare, recorded, x = Chain(), Chain(), images()
    with tcnn_probe.record(recorded):
        for expected, got in zip(run(bare, x), run(recorded, x), strict=True):
            assert torch.equal(expected, got)


def test_layer_called_by_keyword() -> None:
    model, near, far = Branches(), images(3), images(4)
    with tcnn_probe.record(model) as recorder:
        model(near=near, far=far)
        recorder.mark(epoch=0)
    assert_layer(recorder.dataset, "near", gpsa_statistics(model.near, near))
    assert_layer(recorder.dataset, "far", gpsa_statistics(model.far, far))
    assert recorder.dataset.images.values.tolist() == [[3, 4]]


def test_layer_called_twice_counts_twice() -> None:
    layer = scatter(GPSA(2, 2, 3, padding=1))
    model, x = nn.Sequential(layer, nn.Tanh(), layer).eval(), images(3)
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(x)
        recorder.mark(epoch=0)
        seen = torch.cat([x, layer(x).tanh()])
    assert_layer(recorder.dataset, "0", gpsa_statistics(layer, seen))
    assert recorder.dataset.images.values.tolist() == [[6]]


def test_input_is_the_one_that_reached_the_layer() -> None:
    model, x = nn.Sequential(scatter(GPSA(2, 2, 3, padding=1))).eval(), images(3)
    model[0].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    assert_layer(record_epoch(model, x, (3,)), "0", gpsa_statistics(model[0], 3 * x))


def test_images_of_different_sizes() -> None:
    model = nn.Sequential(scatter(GPSA(2, 2, 3, padding=1))).eval()
    small, large = images(3), torch.randn(2, 2, 13, 7)
    with tcnn_probe.record(model) as recorder:
        model(small), model(large)
        recorder.mark(epoch=0)
    parts = [gpsa_statistics(model[0], x) for x in (small, large)]
    assert_layer(recorder.dataset, "0", {name: torch.cat([p[name] for p in parts]) for name in MEASURED})


def test_empty_batch_counts_for_nothing() -> None:
    model, x = Chain(), images()
    assert_layer(record_epoch(model, x, (0, 7)), "near", gpsa_statistics(model.near, x))


def test_float64_model() -> None:
    model, x = Chain().double(), images().double()
    ds = record_epoch(model, x, (3, 4))
    for name, seen in inputs_of(model, ["near", "far"], x).items():
        assert_layer(ds, name, gpsa_statistics(model.get_submodule(name), seen), tolerance=1e-11)


def test_autocast() -> None:
    model, x = nn.Sequential(scatter(GPSA(2, 3, 3, padding=1, qk_dim=4))).eval(), images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ds = record_epoch(model, x, (3, 4))
        seen = model[0].gated_attention(x)
    assert seen.query.dtype == torch.bfloat16
    assert_layer(ds, "0", gpsa_statistics_of_qk(model[0], x, seen.query, seen.key))


def test_bfloat16_model() -> None:
    model, x = nn.Sequential(scatter(GPSA(2, 3, 3, padding=1, qk_dim=4))).eval().bfloat16(), images().bfloat16()
    seen = model[0].gated_attention(x)
    assert_layer(record_epoch(model, x), "0", gpsa_statistics_of_qk(model[0], x, seen.query, seen.key))
