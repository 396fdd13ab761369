"""Statistics of gated positional attention equal brute force,
for any geometry and size of blocks.
"""

import pytest
import torch
from torch import Tensor

from tcnn_model import GPSA, GatedAttention
from tcnn_model.gpsa import blocks
from tcnn_model.gpsa.statistics import measure
from tcnn_probe.attention.gated import _mean_squared_radius, gated_means
from tests.tcnn_probe.networks import scatter
from tests.tcnn_probe.oracle import gpsa_statistics, gpsa_statistics_of_qk

pytestmark = pytest.mark.numerical

GEOMETRIES = {
    "same size": {"kernel_size": 3, "padding": 1},
    "no padding": {"kernel_size": 3, "padding": 0},
    "stride": {"kernel_size": 3, "padding": 1, "stride": 2},
    "queries on padding": {"kernel_size": 2, "padding": 2},
    "different axes": {
        "kernel_size": (3, 2),
        "padding": (2, 0),
        "stride": (1, 2),
        "dilation": (1, 3),
    },
}


def make(geometry: str, qk_dim: int | None = None) -> tuple[GPSA, Tensor]:
    layer = scatter(GPSA(5, 3, **GEOMETRIES[geometry], qk_dim=qk_dim))
    return layer, torch.randn(3, 5, 7, 11)


def means_of(attention: GatedAttention, images: int) -> dict[str, Tensor]:
    radius = _mean_squared_radius(attention).expand(images, -1)
    return {**gated_means(measure(attention)), "mean_squared_radius": radius}


# A few queries, or all heads at a time.
@pytest.mark.parametrize("elements", [250, 10**6])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_statistics_equal_brute_force(
    geometry: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positional logits reach -8,000, which float64 represents to 1e-12."""
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS_CPU", elements)
    layer, x = make(geometry)
    attention = layer.double().gated_attention(x.double().requires_grad_())
    got = means_of(attention, len(x))
    expected = gpsa_statistics(layer, x)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert not got[name].requires_grad
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"])
def test_projections_in_any_dtype_are_followed_by_float32(
    dtype: torch.dtype | str,
) -> None:
    """Statistics are computed in float32, with logits that err by a few eps of their terms."""
    layer, x = make("stride", qk_dim=3)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        attention = (
            layer.gated_attention(x)
            if dtype == "autocast"
            else layer.to(dtype).gated_attention(x.to(dtype))
        )
        got = gated_means(measure(attention))
    assert dtype == torch.float32 or attention.query.dtype in (
        torch.bfloat16,
        torch.float16,
    )
    query, key = (
        projected.detach().double().abs() for projected in (attention.query, attention.key)
    )
    size = (query @ key.mT).max() / 3**0.5
    rounding = 4 * torch.finfo(torch.float32).eps * (1 + size)
    expected = gpsa_statistics_of_qk(layer, x, attention.query, attention.key)
    for name, value in expected.items():
        if name == "mean_squared_radius":  # follows from parameters alone
            continue
        assert got[name].dtype == torch.float32
        difference = (got[name] - value).abs()
        assert (difference <= rounding * (1 + value)).all()


def test_reference_attention_is_neither_uniform_nor_local() -> None:
    expected = gpsa_statistics(*make("same size"))
    uniform = torch.log(torch.tensor(77.0))
    assert (expected["content_entropy"] < 0.96 * uniform).all()
    assert expected["content_entropy"].std(0).min() > 0.01  # images differ
    assert expected["positional_entropy"].min() < 0.1
    assert expected["positional_entropy"].max() > 0.6 * uniform
    assert expected["attention_distance"].max() > 2 * expected["attention_distance"].min()
