"""Rounding of GPSA in narrower dtypes, against the literal equations
in float64 for the same narrow inputs.
"""

import copy

import pytest
import torch
from torch import Tensor

from tcnn_model import GPSA
from tests.tcnn_model.dense import terms
from tests.tcnn_model.equations import gpsa_reference
from tests.tcnn_model.numerics import assert_rounding, disturb, random, relative_error

pytestmark = pytest.mark.numerical
HALVES = [torch.float16, torch.bfloat16]


def _layer() -> GPSA:
    torch.manual_seed(0)
    return disturb(GPSA(3, 5, 3, stride=(2, 1), padding=1, dtype=torch.float64))


def _reference(layer: GPSA, x: Tensor) -> Tensor:
    return gpsa_reference(layer, x).unflatten(2, (-(-x.shape[2] // 2), x.shape[3]))


@torch.no_grad()
def _terms(layer: GPSA, x: Tensor) -> Tensor:
    """Return the sums of absolute terms of a layer's output, taken through all its matrix products.

    They are a hundred times the output. Errors of up to a tenth of their eps were seen in float32
    and a fortieth in half precision, so c is a quarter.
    """
    absolute = copy.deepcopy(layer)
    for name in ("query", "key", "value", "weight", "bias"):
        getattr(absolute, name).abs_()
    attention = layer.gated_attention(x)
    sizes = absolute.gated_attention(x.abs())
    tensors = {
        "query": attention.query,
        "key": attention.key,
        "values": absolute.values(x.abs()),
        "position": attention.position,
        "gate": attention.gate,
    }
    # The upstream gradient is a placeholder, as only the terms of the output are used.
    upstream = x.new_zeros(*attention.query.shape[:3], x.shape[1])
    mixed = terms(tensors, attention.y, attention.x, upstream, sizes=(sizes.query, sizes.key))
    return absolute.combine(mixed["output"], attention)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_rounding_of_the_output(dtype: torch.dtype, seed: int) -> None:
    narrow = _layer().to(dtype)
    x = random(2, 3, 7, 11, seed=seed, dtype=dtype)
    output = narrow(x)
    rounded = copy.deepcopy(narrow).double()
    assert output.dtype == dtype
    assert_rounding(
        output,
        _reference(rounded, x.double()),
        _terms(rounded, x.double()),
        0.25,
        dtype,
        "output",
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_of_gradients_in_half_precision(dtype: torch.dtype) -> None:
    """The bound is 32 eps of the largest, and a wrong sign gives 2;
    test_functional.py has bounds for the core.
    """
    narrow = _layer().to(dtype)
    x = random(2, 3, 7, 11, dtype=dtype)
    rounded = copy.deepcopy(narrow).double()
    narrow(x).float().square().mean().backward()
    _reference(rounded, x.double()).square().mean().backward()
    for name, parameter in narrow.named_parameters():
        assert (
            relative_error(parameter.grad, rounded.get_parameter(name).grad)
            < 32 * torch.finfo(dtype).eps
        ), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_positions_reach_across_large_maps(dtype: torch.dtype) -> None:
    """Squared distances overflow float16 at 256 pixels and lose whole pixels in bfloat16."""
    layer = GPSA(1, 1, (1, 3), padding=(0, 1), locality_strength=20.0, gating=20.0, dtype=dtype)
    x = random(1, 1, 1, 521).to(dtype)
    weight = layer.weight.double()
    bias = layer.bias.double()
    # Gates and strengths of 20 make the layer a plain convolution, so torch's convolution in
    # float64 is the oracle.
    exact = torch.nn.functional.conv2d(x.double(), weight, bias, padding=(0, 1))
    bound = torch.nn.functional.conv2d(x.double().abs(), weight.abs(), bias.abs(), padding=(0, 1))
    assert_rounding(layer(x), exact, bound, 4, dtype, "output")


def test_autocast_forward_and_backward() -> None:
    layer = _layer().float()
    x = random(2, 3, 7, 11, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    exact, bound = (
        function(copy.deepcopy(layer).double(), x.double()) for function in (_reference, _terms)
    )
    assert_rounding(output, exact, bound, 0.25, torch.bfloat16, "output")
    output.float().square().mean().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().max()) > 0, name


def test_content_attention_survives_large_features_in_half() -> None:
    layer = GPSA(5, 3, 3, padding=1, dtype=torch.float16)
    # The products of such features exceed 65504, the largest number of float16.
    assert bool(layer(random(1, 5, 7, 11).half() * 1000).isfinite().all())
