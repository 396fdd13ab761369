"""After each ablation torch is as a fresh interpreter has it."""

from collections.abc import Iterator

import pytest

from tests.tcnn_probe.contracts.helpers import clean


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert clean()
