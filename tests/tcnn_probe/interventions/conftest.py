"""Check after each test that torch is in the state of a new interpreter."""

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
    """Run with and without fused attention, as set in timm."""
    set_fused_attn(request.param, experimental=request.param)  # Swin needs this flag
    yield request.param
    # This is timm's default.
    set_fused_attn(True)
