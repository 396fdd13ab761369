"""Forward, statistics and every gradient against the dense float64 computation, at every dtype."""

import pytest
import torch

from tcnn_model.gpsa.positional import Axis
from tcnn_model.kernels import gated_attention
from tests.tcnn_model.kernels.dense import (
    NAMES,
    Case,
    apply,
    assert_as_good_as_pytorch,
    doubled,
    gradients,
    measure,
    pytorch_gradients,
)

pytestmark = pytest.mark.usefixtures("small_blocks", "nan_memory")

CASES = [
    Case(Axis(5, 1, 1, 3), Axis(7, 1, 1, 3), 2, 7, 33, batch=2, name="padded"),
    Case(Axis(11, 2, "same", 3), Axis(5, 2, "same", 3), 3, 17, 70, shared=False, name="strided"),
    Case(Axis(7, 1, 0, 3), Axis(5, 1, 0, 3), 2, 1, 1, name="unpadded"),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_good_as_pytorch(case: Case, dtype: torch.dtype) -> None:
    tensors = case.inputs(dtype)
    out, measured = gated_attention(**tensors, y=case.y, x=case.x, statistics=True)
    exact_inputs = doubled(tensors)
    exact, pytorch = apply(exact_inputs, case.y, case.x), apply(tensors, case.y, case.x)
    assert out.dtype == dtype
    assert_as_good_as_pytorch(out, pytorch, exact, 2, "out")

    ours, theirs = gradients(out, tensors), pytorch_gradients(pytorch, tensors, case.y, case.x)
    for name, gradient in gradients(exact, exact_inputs).items():
        assert ours[name].dtype == tensors[name].dtype
        assert_as_good_as_pytorch(ours[name], theirs[name], gradient, 3, name)

    assert measured is not None
    pytorch_measured = measure(tensors, case.y, case.x)
    for name, value in measure(exact_inputs, case.y, case.x).items():
        actual = getattr(measured, name)
        assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not actual.requires_grad
        assert_as_good_as_pytorch(actual, pytorch_measured[name], value, 2, name)


FAR = ((-40.0, 80.0 * 300, -80.0 * 300), (-20.0, 40.0 * 1.5, 0.0), (0.0, 0.0, 0.0))  # far outside, on an edge, uniform


@pytest.mark.parametrize("gate", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.999999, 1e-7, 0.5)], ids=str)
def test_extremes(gate: tuple[float, ...]) -> None:
    case = Case(Axis(3, 1, 1, 3), Axis(7, 1, 2, 3), 3, 2, 5, gate=gate, v_pos=FAR)
    tensors = case.inputs(torch.float32)
    with torch.no_grad():
        tensors["q"] *= 30  # one-hot content attention, logits of a few hundred
    out, measured = gated_attention(**tensors, y=case.y, x=case.x, statistics=True)
    exact_inputs = doubled(tensors)
    exact, pytorch = apply(exact_inputs, case.y, case.x), apply(tensors, case.y, case.x)
    assert_as_good_as_pytorch(out, pytorch, exact, 2, "out")
    ours, theirs = gradients(out, tensors), pytorch_gradients(pytorch, tensors, case.y, case.x)
    for name, gradient in gradients(exact, exact_inputs).items():
        assert_as_good_as_pytorch(ours[name], theirs[name], gradient, 3, name)
    assert measured is not None
    pytorch_measured = measure(tensors, case.y, case.x)
    for name, value in measure(exact_inputs, case.y, case.x).items():
        assert_as_good_as_pytorch(getattr(measured, name), pytorch_measured[name], value, 2, name)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name: str) -> None:
    """Slow mode, every element, so the sizes are small: the cases above are the large ones."""
    case = Case(Axis(2, 1, 1, 3), Axis(3, 2, 1, 3), 2, 1, 1)
    tensors = {n: t.detach() for n, t in case.inputs(torch.float64).items()}

    def function(tensor: torch.Tensor) -> torch.Tensor:
        return gated_attention(**{**tensors, name: tensor}, y=case.y, x=case.x)[0]

    assert torch.autograd.gradcheck(function, (tensors[name].requires_grad_(),))
