"""The layer, and gpsa(), on the kernels: the same function as without them."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tcnn_model import GPSA, AttentionStatistics, gpsa, kernels
from tcnn_model.gpsa.positional import Axis, gaussian_position
from tests.tcnn_model.cases import CASES
from tests.tcnn_model.helpers import disturb, random, relative_error
from tests.tcnn_model.kernels.dense import DEVICE


@pytest.mark.parametrize("case", ["groups", "queries on padding", "1x1 amid padding"])
def test_layer_is_the_same_on_the_kernels(case: str) -> None:
    layer = disturb(CASES[case].gpsa()).to(DEVICE)
    x = random(2, layer.in_channels, *CASES[case].grid).to(DEVICE).requires_grad_()
    results = []
    for backend in ("blocks", "triton"):
        layer.backend = backend
        output = layer(x)
        upstream = random(*output.shape, seed=1).to(DEVICE)
        results.append((output, *torch.autograd.grad(output, [x, *layer.parameters()], upstream)))
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-11


def test_gradients_of_the_layer_are_the_numerical_ones() -> None:
    torch.manual_seed(0)
    layer = GPSA(2, 1, (1, 2), padding=(0, 1), qk_dim=1, backend="triton", dtype=torch.float64)
    disturb(layer).to(DEVICE)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def forward(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = random(1, 2, 1, 2).to(DEVICE).requires_grad_()
    assert torch.autograd.gradcheck(forward, (x, *parameters))


def test_channels_a_multiple_of_sixteen_bytes_take_the_short_way_out() -> None:
    torch.manual_seed(0)
    layer = disturb(GPSA(8, 5, 3, padding=1, dtype=torch.float64)).to(DEVICE)
    x = random(2, 8, 3, 5).to(DEVICE)
    plain, layer.backend = layer(x), "triton"
    assert relative_error(layer(x), plain) < 1e-12


@pytest.mark.parametrize("gradients", [False, True])
def test_statistics_are_those_without_kernels(gradients: bool) -> None:
    y, x = Axis(3, 2, 1, 3), Axis(5, 1, 1, 3)
    query, key, values = random(2, 2, 10, 3, seed=1), random(2, 2, 15, 3, seed=2), random(2, 1, 15, 7, seed=3)
    position, gate = gaussian_position(torch.tensor([0.5, 2.0]).double(), random(2, 2)), torch.tensor([0.3, 0.8])
    tensors = [t.to(DEVICE).requires_grad_(gradients) for t in (query, key, values, position, gate.double())]
    plain, ours = (gpsa(*tensors, y=y, x=x, backend=b, statistics=True) for b in ("blocks", "triton"))
    assert relative_error(ours[0], plain[0]) < 1e-13
    for field in fields(AttentionStatistics):
        actual, expected = (getattr(result[1], field.name) for result in (ours, plain))
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12, msg=field.name)


def test_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not kernels.available(torch.device("cpu"))
    layer = GPSA(2, 3, 3, padding=1, backend="triton")
    with pytest.raises(ValueError, match="backend='triton' needs Triton and a CUDA device; the tensors are on cpu"):
        layer(torch.zeros(1, 2, 5, 7))


def test_no_images() -> None:
    layer = GPSA(3, 5, 3, padding=1, backend="triton").to(DEVICE)
    assert layer(torch.zeros(0, 3, 5, 7, device=DEVICE)).shape == (0, 5, 5, 7)
