"""Without a GPU the kernels run through Triton's interpreter, which tests/conftest.py chooses before it is imported."""

from collections.abc import Iterator
from types import ModuleType

import numpy
import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    """Fails rather than skips: tests that silently did not run would prove nothing."""
    if not torch.cuda.is_available():
        triton = pytest.importorskip("triton", reason="no Triton on this platform")
        if not triton.knobs.runtime.interpret or type(triton.language.sum).__name__ == "JITFunction":
            pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set, see tests/conftest.py")
        if _version(triton) < (3, 7) and _version(numpy) >= (2, 4):
            pytest.skip("the interpreter of Triton before 3.7 does not run loops with numpy 2.4")


def _version(package: ModuleType) -> tuple[int, int]:
    major, minor, *_ = package.__version__.split(".")
    return int(major), int(minor)


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Tiles so small that every loop over blocks runs more than once."""
    from tcnn_model.kernels import launch

    with launch.using_blocks(launch.Blocks(16, 16, 32)):
        yield


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results start as NaN, so that an element that no kernel wrote is seen."""
    from tcnn_model.kernels import launch

    empty = launch.empty
    monkeypatch.setattr(launch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
