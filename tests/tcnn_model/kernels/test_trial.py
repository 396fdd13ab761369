"""The kernels of gated attention are tried only where they are switched on,
and only as long as they agree.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tcnn_model import Axis, gpsa, kernels
from tcnn_model.gpsa import functional
from tcnn_model.kernels import trial
from tests.tcnn_model.dense import Case

# Without a GPU these kernels run in Triton's interpreter, in Python, so there are only a few
# pixels.
CASE = Case(Axis(2, 1, 1, 3), Axis(3, 2, 1, 3), heads=2, dim=3, channels=5)


class Calls:
    """Kernels that count their calls, and return or raise something else."""

    def __init__(self, factor: float = 1.0, error: Exception | None = None) -> None:
        self.count, self.factor, self.error = 0, factor, error
        self.kernel = kernels.gated_attention

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        if self.error is not None:
            raise self.error
        output, statistics = self.kernel(*arguments, **options)
        return output * self.factor, statistics


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCNN_PROBE_TRITON", "1")
    monkeypatch.setattr(trial, "_AGREED", {})


def run(dtype: torch.dtype = torch.float32, backend: Any = "auto") -> Tensor:
    tensors = CASE.inputs(dtype)
    return gpsa(*tensors.values(), y=CASE.y, x=CASE.x, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_agree_are_used_from_the_second_forward_on(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    exact, by_kernel = run(dtype, "dense"), run(dtype, "triton")
    if dtype == torch.float32:  # bfloat16 can hide that they round differently
        assert not torch.equal(exact, by_kernel)
    monkeypatch.setattr(kernels, "gated_attention", calls)
    assert torch.equal(run(dtype), exact)
    assert torch.equal(run(dtype), by_kernel)
    assert calls.count == 2


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (Calls(1.001), "differs by"),
        (Calls(torch.nan), "differs by"),
        (Calls(error=RuntimeError("no such register")), "no such register"),
    ],
    ids=["difference", "nan", "compiler"],
)
def test_kernels_that_fail_are_not_used(
    calls: Calls, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = run(backend="dense")
    monkeypatch.setattr(kernels, "gated_attention", calls)
    with pytest.warns(RuntimeWarning, match=f"{reason}.*tcnn-probe info"):
        first = run()
    assert torch.equal(first, exact)
    assert torch.equal(run(), exact)
    assert calls.count == 1


def test_want_of_memory_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "gated_attention", Calls(error=torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        run()
    assert trial._AGREED == {}


@pytest.mark.parametrize(
    ("switch", "modern", "dtype", "count"),
    [
        ("", True, torch.bfloat16, 1),
        ("0", True, torch.bfloat16, 0),
        ("", True, torch.float32, 0),
        ("", False, torch.bfloat16, 0),
    ],
)
def test_kernels_are_tried_by_default_where_they_are_faster(
    switch: str, modern: bool, dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCNN_PROBE_TRITON", switch)
    calls = Calls()
    monkeypatch.setattr(kernels, "gated_attention", calls)
    monkeypatch.setattr(kernels, "is_modern_gpu", lambda device: modern)
    run(dtype)
    assert calls.count == 0  # too few keys
    monkeypatch.setattr(functional, "_KERNEL_KEYS", 6)
    run(dtype)
    assert calls.count == count
    run(dtype, backend="triton")  # whatever the switch
    assert calls.count == count + 1


def test_kernels_are_not_tried_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(kernels, "gated_attention", calls)
    run(torch.float64)
    assert calls.count == 0
