import pytest
import torch
from torch import Tensor

from tcnn_model import GPSA
from tcnn_model.gpsa import blocks
from tcnn_probe.attention.statistics import gated_attention_statistics
from tests.tcnn_model.helpers import LargestTensor
from tests.tcnn_probe.networks import scatter
from tests.tcnn_probe.oracle import gpsa_statistics, gpsa_statistics_of_qk

GEOMETRIES = {
    "same size": {"kernel_size": 3, "padding": 1},
    "no padding": {"kernel_size": 3, "padding": 0},
    "wide padding": {"kernel_size": 3, "padding": 2},
    "stride": {"kernel_size": 3, "padding": 1, "stride": 2},
    "dilation": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "queries on padding": {"kernel_size": 2, "padding": 2},
    "different axes": {"kernel_size": (3, 2), "padding": (2, 0), "stride": (1, 2), "dilation": (1, 3)},
}


def assert_statistics(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(got[name].double(), value, **close, msg=f"{name}: {got[name]}, expected {value}")


def make(geometry: str = "same size", qk_dim: int | None = None) -> tuple[GPSA, Tensor]:
    layer = scatter(GPSA(5, 3, **GEOMETRIES[geometry], qk_dim=qk_dim))
    return layer, torch.randn(3, 5, 7, 11)


@pytest.mark.parametrize("elements", [1, 250, 10**6])  # one query, a few queries, all heads at a time
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_equal_brute_force(geometry: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS_CPU", elements)
    layer, x = make(geometry)
    got = gated_attention_statistics(layer.gated_attention(x))
    assert all(value.dtype == torch.float32 for value in got.values())
    assert_statistics(got, gpsa_statistics(layer, x))


def test_oracle_sees_attention_that_is_neither_uniform_nor_local() -> None:
    layer, x = make()
    expected = gpsa_statistics(layer, x)
    uniform = torch.log(torch.tensor(77.0))
    assert (expected["content_entropy"] < 0.96 * uniform).all()
    assert expected["content_entropy"].std(0).min() > 0.01  # images differ
    assert expected["positional_entropy"].min() < 0.1
    assert expected["positional_entropy"].max() > 0.6 * uniform
    assert expected["attention_distance"].max() > 2 * expected["attention_distance"].min()


@pytest.mark.parametrize("alpha", [0.05, 1.0, 40.0])
@pytest.mark.parametrize("gating", [-3.0, 0.0, 3.0])
def test_equal_brute_force_for_the_same_alpha_and_gate_in_all_heads(alpha: float, gating: float) -> None:
    torch.manual_seed(0)
    layer = GPSA(2, 3, 3, padding=1, locality_strength=alpha, gating=gating)
    x = 5 * torch.randn(2, 2, 5, 7)
    assert_statistics(gated_attention_statistics(layer.gated_attention(x)), gpsa_statistics(layer, x))


def test_float64_is_exact() -> None:
    layer, x = make()
    got = gated_attention_statistics(layer.double().gated_attention(x.double()))
    assert all(value.dtype == torch.float64 for value in got.values())
    assert_statistics(got, gpsa_statistics(layer, x), tolerance=1e-12)


@pytest.mark.parametrize("qk_dim", [3, 4])  # sqrt(3) is rounded, sqrt(4) is not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_nothing_after_the_projections(dtype: torch.dtype, qk_dim: int) -> None:
    layer, x = make("stride", qk_dim)
    attention = layer.to(dtype).gated_attention(x.to(dtype))
    got = gated_attention_statistics(attention)
    assert all(value.dtype == torch.float32 for value in got.values())
    assert_statistics(got, gpsa_statistics_of_qk(layer, x, attention.query, attention.key))


def test_autocast_does_not_reach_the_statistics() -> None:
    layer, x = make(qk_dim=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention = layer.gated_attention(x)
        got = gated_attention_statistics(attention)
    assert attention.query.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in got.values())
    assert_statistics(got, gpsa_statistics_of_qk(layer, x, attention.query, attention.key))


def test_low_precision_stays_near_the_float64_layer() -> None:
    layer, x = make()
    expected = gpsa_statistics(layer, x)
    got = gated_attention_statistics(layer.bfloat16().gated_attention(x.bfloat16()))
    assert_statistics(got, expected, tolerance=0.05)


def test_default_block_holds_few_weights_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = scatter(GPSA(2, 3, 3, padding=1))
    attention = layer.gated_attention(torch.randn(2, 2, 13, 17))
    whole = gated_attention_statistics(attention)
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS_CPU", 2**14)
    with LargestTensor() as largest:
        got = gated_attention_statistics(attention)
    assert largest.elements < 2 * 2**14
    assert_statistics(got, {name: value.double() for name, value in whole.items()})


def test_no_gradient_is_kept() -> None:
    layer, x = make()
    got = gated_attention_statistics(layer.gated_attention(x.requires_grad_()))
    assert not any(value.requires_grad for value in got.values())
