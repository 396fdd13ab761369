"""After each ablation torch is as a fresh interpreter has it."""

from collections.abc import Iterator

import pytest
from timm.layers import set_fused_attn

from tests.tcnn_probe.contracts.helpers import clean


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert clean()


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def fused(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Run with and without fused attention, as timm is asked to."""
    set_fused_attn(request.param, experimental=request.param)  # Swin needs experimental
    yield request.param
    # timm's default.
    set_fused_attn(True)
