"""Operators under PyTorch's machinery: strides,
compile, partial gradients, and devices without kernels.
"""

import pytest
import torch
from torch import Tensor

from tcnn_model import GPSA, AttentionStatistics, Axis, gpsa, kernels
from tcnn_model.kernels import ops
from tcnn_model.kernels.grid import Line
from tests.tcnn_model.cases import CASES
from tests.tcnn_model.dense import DEVICE, Case, Tensors, gradients
from tests.tcnn_model.numerics import assert_same, disturb, random

# Without a GPU these kernels run in Triton's interpreter, in Python, so there are only a few
# pixels.
CASE = Case(Axis(2, 1, 1, 3), Axis(3, 2, 1, 3), heads=1, dim=3, channels=5)


def run(tensors: Tensors, case: Case = CASE) -> Tensor:
    return gpsa(*tensors.values(), y=case.y, x=case.x, backend="triton")


def _upstream(output: Tensor) -> Tensor:
    return random(*output.shape, seed=7).to(output)


def test_output_is_laid_out_for_one_product_over_heads_and_channels() -> None:
    case = Case(CASE.y, CASE.x, heads=2, dim=3, channels=8, batch=2)
    assert run(case.inputs(torch.float32), case).transpose(1, 2).is_contiguous()


@pytest.mark.study
def test_inputs_with_any_strides() -> None:
    case = Case(CASE.y, CASE.x, heads=2, dim=3, channels=5, batch=2)
    tensors = case.inputs()
    output = run(tensors, case)
    expected = gradients(output, tensors, _upstream(output))

    def restrided(tensor: Tensor) -> Tensor:
        """Return the tensor in channel-major memory at an odd address, with gaps."""
        memory = tensor.new_empty(*tensor.mT.shape[:-1], 2 * tensor.shape[-2] + 1)
        return memory[..., 1::2].mT.copy_(tensor.detach()).requires_grad_()

    strided = {
        **tensors,
        **{name: restrided(tensors[name]) for name in ("query", "key", "values")},
    }
    assert not strided["query"].is_contiguous()
    # Equal to the last bit, as the arithmetic is the same at other addresses.
    for name, gradient in gradients(run(strided, case), strided, _upstream(output)).items():
        assert torch.equal(gradient, expected[name]), name


def test_upstream_gradient_with_strides_of_zero() -> None:
    tensors = CASE.inputs()
    upstream = torch.ones_like(run(tensors))
    expected = gradients(run(tensors), tensors, upstream)["query"]
    # sum().backward() passes such a gradient: a single number, expanded.
    expanded = upstream[:1, :1, :1, :1].expand_as(upstream)
    assert torch.equal(gradients(run(tensors), tensors, expanded)["query"], expected)


@pytest.mark.parametrize(
    ("name", "unneeded"),
    [
        ("key", ["backward_values"]),
        ("values", ["backward_queries", "backward_keys"]),
        ("gate", ["backward_values", "backward_keys"]),
    ],
)
def test_only_the_required_gradients_are_computed(
    name: str, unneeded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tcnn_model.kernels import backward

    tensors = CASE.inputs()
    output = run(tensors)
    expected = gradients(output, tensors, _upstream(output))[name]
    # None cannot be called, so that a kernel that runs needlessly raises.
    for kernel in unneeded:
        monkeypatch.setattr(backward, kernel, None)
    inputs = {key: tensor.detach() for key, tensor in tensors.items()}
    leaf = inputs[name].requires_grad_()
    assert torch.equal(torch.autograd.grad(run(inputs), leaf, _upstream(output))[0], expected)


# opcheck itself reads .grad of non-leaf tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_operator_passes_opcheck() -> None:
    arguments = (
        *CASE.inputs(torch.float32).values(),
        list(Line.of(CASE.y)),
        list(Line.of(CASE.x)),
    )
    # The other checks compile, which test_compiles_without_graph_breaks does.
    tests = [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
    ]
    results = torch.library.opcheck(
        torch.ops.tcnn_model.gated_attention_statistics, arguments, test_utils=tests
    )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.study
def test_compiles_without_graph_breaks() -> None:
    def function(**tensors: Tensor) -> tuple[Tensor, AttentionStatistics]:
        return gpsa(**tensors, y=CASE.y, x=CASE.x, backend="triton", statistics=True)

    torch.compiler.reset()
    tensors = CASE.inputs(torch.float32)
    output, statistics = function(**tensors)
    compiled, compiled_statistics = torch.compile(function, backend="aot_eager", fullgraph=True)(
        **tensors
    )
    assert torch.equal(compiled, output)
    assert torch.equal(output, run(tensors))  # run() asks for no statistics
    assert torch.equal(compiled_statistics.entropy, statistics.entropy)
    expected = gradients(output, tensors, _upstream(output))
    for name, gradient in gradients(compiled, tensors, _upstream(output)).items():
        assert torch.equal(gradient, expected[name]), name


def test_second_derivatives_are_refused() -> None:
    tensors = CASE.inputs()
    (gradient,) = torch.autograd.grad(run(tensors).sum(), tensors["query"], create_graph=True)
    with pytest.raises(
        RuntimeError,
        match="differentiated once; for second derivatives use backend='dense'",
    ):
        gradient.sum().backward()


def test_layer_with_the_kernels() -> None:
    layer = disturb(CASES["queries on padding"].gpsa()).to(DEVICE)
    x = random(2, layer.in_channels, 5, 7).to(DEVICE)
    expected = layer(x)
    layer.backend = "triton"
    assert_same(layer(x), expected)
    assert layer(x[:0]).shape == (0, *expected.shape[1:])


def test_devices_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.available(DEVICE)
    # Kernels are available on a CPU only while this variable makes Triton interpret them.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not kernels.available(torch.device("cpu"))
    monkeypatch.setattr(ops, "_HAS_TRITON", False)
    assert not kernels.available(torch.device("cuda"))
    layer = GPSA(2, 3, 3, padding=1, backend="triton")
    with pytest.raises(
        ValueError,
        match="backend='triton' needs Triton and a CUDA device; the tensors are on cpu",
    ):
        layer(torch.zeros(1, 2, 5, 7))
