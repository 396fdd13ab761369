"""Rounding: GPSA in a narrower type against itself and against the literal equations in float64."""

import copy

import pytest
import torch
from torch import Tensor

from tcnn_model import GPSA
from tcnn_model.gpsa.reference import gpsa_reference
from tests.tcnn_model.helpers import disturb, random


def _layer() -> GPSA:
    torch.manual_seed(0)
    return disturb(GPSA(17, 13, 3, stride=(2, 1), padding=1, dtype=torch.float64))


def _reference(layer: GPSA, x: Tensor) -> Tensor:
    parameters = {name: p for name, p in layer.named_parameters() if name != "raw_locality"}
    geometry = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    output = gpsa_reference(x, locality_strength=layer.locality_strength, **parameters, **geometry)
    return output.reshape(len(x), layer.out_channels, -(-x.shape[2] // 2), x.shape[3])


def _rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


@pytest.mark.parametrize("seed", range(3))
def test_float32_error_is_that_of_the_literal_equations(seed: int) -> None:
    layer, x = _layer(), random(2, 17, 7, 11, seed=seed)
    exact, narrow = _reference(layer, x), copy.deepcopy(layer).float()
    error, literal = _rms(narrow(x.float()) - exact), _rms(_reference(narrow, x.float()) - exact)
    assert 0 < error <= 2 * literal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_half_error_is_that_of_rounding_the_inputs(dtype: torch.dtype, seed: int) -> None:
    layer, x = _layer(), random(2, 17, 7, 11, seed=seed)
    narrow = copy.deepcopy(layer).to(dtype)
    output = narrow(x.to(dtype))
    assert output.dtype == dtype
    exact = _reference(layer, x)
    rounding = _rms(_reference(copy.deepcopy(narrow).double(), x.to(dtype).double()) - exact)
    assert 0 < _rms(output - exact) <= 3 * rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients(dtype: torch.dtype) -> None:
    layer, x = _layer(), random(2, 17, 7, 11)
    narrow = copy.deepcopy(layer).to(dtype)
    rounded = copy.deepcopy(narrow).double()
    narrow(x.to(dtype)).square().mean().backward()
    for each, inputs in ((layer, x), (rounded, x.to(dtype).double())):
        _reference(each, inputs).square().mean().backward()
    for name, parameter in layer.named_parameters():
        exact = parameter.grad
        rounding = _rms(rounded.get_parameter(name).grad - exact) + torch.finfo(dtype).eps * _rms(exact)
        assert _rms(narrow.get_parameter(name).grad - exact) <= 3 * rounding, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_positions_reach_across_large_maps(dtype: torch.dtype) -> None:
    """Squared distances overflow float16 at 256 pixels and lose whole pixels in bfloat16."""
    layer = GPSA(1, 1, (1, 3), padding=(0, 1), locality_strength=20.0, gating=20.0, dtype=dtype)
    x = random(1, 1, 1, 521).to(dtype)
    expected = torch.nn.functional.conv2d(x.double(), layer.weight.double(), layer.bias.double(), padding=(0, 1))
    assert _rms(layer(x) - expected) <= 2 * torch.finfo(dtype).eps * _rms(expected)


def test_autocast_forward_and_backward() -> None:
    layer, x = _layer().float(), random(2, 17, 7, 11, dtype=torch.float32)
    exact = _reference(copy.deepcopy(layer).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    narrow = copy.deepcopy(layer).bfloat16().double()
    rounding = _rms(_reference(narrow, x.bfloat16().double()) - exact)
    assert _rms(output - exact) <= 3 * rounding
    output.float().square().mean().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().max()) > 0, name


def test_content_attention_survives_large_features_in_half() -> None:
    layer = GPSA(5, 3, 3, padding=1, dtype=torch.float16)
    assert bool(layer(random(1, 5, 7, 11).half() * 1000).isfinite().all())
