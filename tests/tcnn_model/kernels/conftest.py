"""Fixtures of the kernels, which run in Triton's interpreter without a GPU (see
tests/conftest.py).
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Fail, rather than skip, if the kernels cannot run:
    tests that silently did not run would prove nothing.
    """
    if not torch.cuda.is_available():
        triton = pytest.importorskip("triton", reason="no Triton on this platform")
        if (
            not triton.knobs.runtime.interpret
            or type(triton.language.sum).__name__ == "JITFunction"
        ):
            pytest.fail(
                "Triton was imported before TRITON_INTERPRET=1 was set, see tests/conftest.py"
            )
        if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
            pytest.skip(
                "before Triton 3.7 its interpreter lacks float64 products, or loops with NumPy 2.4"
            )


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Use tiles that are small enough for every loop over blocks to run more than once."""
    from tcnn_model.kernels import launch

    with launch.using_blocks(launch.Blocks(16, 16, 32)):
        yield


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill results with NaN, so that elements that no kernel writes are found."""
    from tcnn_model.kernels import launch

    empty = launch.empty
    monkeypatch.setattr(
        launch,
        "empty",
        lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")),
    )
