"""gpsa() with the kernels against the equations in float64:
output, statistics and every gradient, in every dtype.
"""

from functools import partial

import pytest
import torch

from tcnn_model import Axis, gpsa
from tests.tcnn_model.dense import EXTREMES, Case, assert_as_the_equations

CASES = {
    "padded": Case(Axis(3, 1, 1, 3), Axis(7, 1, 1, 3), 2, 7, 33, batch=2),
    "strided": Case(Axis(7, 2, "same", 3), Axis(5, 1, "same", 2), 2, 17, 5, shared=False),
    "unpadded": Case(Axis(7, 1, 0, 3), Axis(5, 1, 0, 3), 2, 1, 1),
    "rows of whole 16 bytes": Case(Axis(3, 1, 1, 3), Axis(5, 1, 1, 3), 1, 8, 16),
}
NARROW = [
    ("strided", torch.float32),
    ("rows of whole 16 bytes", torch.bfloat16),
    ("unpadded", torch.float16),
]
on_kernels = partial(gpsa, backend="triton")


@pytest.mark.study(but=["unpadded-torch.float16", "rows of whole 16 bytes-torch.float64"])
@pytest.mark.usefixtures("small_blocks", "nan_memory")
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, torch.float64) for name in CASES] + NARROW, ids=str
)
def test_kernels_equal_the_equations(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    assert_as_the_equations(on_kernels, case.inputs(dtype), case.y, case.x)


@pytest.mark.study
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_sizes_of_the_gpu(dtype: torch.dtype) -> None:
    case = Case(Axis(3, 1, 1, 3), Axis(5, 2, 1, 3), heads=2, dim=3, channels=5, batch=2)
    assert_as_the_equations(on_kernels, case.inputs(dtype), case.y, case.x)


@pytest.mark.numerical  # no others: the interpreter uses NumPy, and these cases are most sensitive
@pytest.mark.study(but=["both"])
@pytest.mark.usefixtures("small_blocks", "nan_memory")
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_gates_and_positions(name: str) -> None:
    case = EXTREMES[name]
    assert_as_the_equations(on_kernels, case.inputs(torch.float32), case.y, case.x)
