"""The operators through the machinery of PyTorch: strides, autocast, compile, partial gradients, bad input."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tcnn_model.gpsa.positional import Axis
from tcnn_model.kernels import available, gated_attention
from tcnn_model.kernels.grid import Line
from tests.tcnn_model.kernels.dense import DEVICE, NAMES, Case, apply, doubled, error, gradients

CASE = Case(Axis(3, 1, 1, 3), Axis(5, 2, 1, 3), heads=2, dim=3, channels=5, batch=2)


def run(tensors: dict[str, Tensor]) -> Tensor:
    return gated_attention(**tensors, y=CASE.y, x=CASE.x)[0]


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_the_gpu(dtype: torch.dtype) -> None:
    tensors = CASE.inputs(dtype)
    out = run(tensors)
    exact_inputs = doubled(tensors)
    exact = apply(exact_inputs, CASE.y, CASE.x)
    assert error(out, exact) < 4 * torch.finfo(dtype).eps
    ours = gradients(out, tensors)
    for name, gradient in gradients(exact, exact_inputs).items():
        assert error(ours[name], gradient) < 8 * torch.finfo(dtype).eps, name


def test_output_is_laid_out_for_one_product_over_heads_and_channels() -> None:
    case = Case(CASE.y, CASE.x, heads=2, dim=3, channels=8, batch=2)
    out = gated_attention(**case.inputs(torch.float32), y=case.y, x=case.x)[0]
    assert out.transpose(1, 2).is_contiguous()


def test_any_strides() -> None:
    tensors = CASE.inputs(torch.float64)
    expected = gradients(run(tensors), tensors)

    def restrided(tensor: Tensor) -> Tensor:
        """Channel-major memory, at an odd address, with gaps."""
        memory = tensor.new_empty(*tensor.mT.shape[:-1], 2 * tensor.shape[-2] + 1)
        view = memory[..., 1::2].mT
        return view.copy_(tensor.detach()).requires_grad_()

    other = {**tensors, **{name: restrided(tensors[name]) for name in "qkv"}}
    assert not other["q"].is_contiguous()
    for name, gradient in gradients(run(other), other).items():
        assert torch.equal(gradient, expected[name]), name
    expanded = torch.autograd.grad(run(tensors).sum(), tensors["q"])[0]  # a gradient whose strides are all zero
    dense = torch.autograd.grad(apply(tensors, CASE.y, CASE.x).sum(), tensors["q"])[0]
    assert error(expanded, dense) < 1e-12


@pytest.mark.parametrize("wanted", NAMES)
def test_only_the_gradients_that_are_wanted(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = CASE.inputs(torch.float64)
    expected = gradients(run(tensors), tensors)[wanted]
    from tcnn_model.kernels import backward

    unneeded = {"backward_values"} if wanted != "v" else {"backward_queries", "backward_keys"}
    if wanted not in "kv":
        unneeded.add("backward_keys")
    for name in unneeded:
        monkeypatch.setattr(backward, name, None)
    alone = {name: tensor.detach() for name, tensor in tensors.items()}
    alone[wanted].requires_grad_()
    out = run(alone)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    assert torch.equal(torch.autograd.grad((out * weight).sum(), alone[wanted])[0], expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of opcheck's own
@pytest.mark.parametrize("statistics", [False, True])
def test_opcheck(statistics: bool) -> None:
    name = "gated_attention_statistics" if statistics else "gated_attention"
    arguments = (*CASE.inputs(torch.float32).values(), list(Line.of(CASE.y)), list(Line.of(CASE.x)))
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    results = torch.library.opcheck(getattr(torch.ops.tcnn_model, name), arguments, test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("statistics", [False, True])
def test_compiles_without_graph_breaks(statistics: bool) -> None:
    def function(**tensors: Tensor) -> Tensor:
        out, measured = gated_attention(**tensors, y=CASE.y, x=CASE.x, statistics=statistics)
        return out * 2 + (0 if measured is None else measured.entropy[..., None].to(out.dtype))

    torch.compiler.reset()
    tensors = CASE.inputs(torch.float32)
    compiled, eager = torch.compile(function, backend="aot_eager", fullgraph=True)(**tensors), function(**tensors)
    assert torch.equal(compiled, eager)
    for ours, theirs in zip(gradients(compiled, tensors).values(), gradients(eager, tensors).values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    tensors = CASE.inputs(torch.float32)
    torch.compiler.reset()
    function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = function(tensors)
    rounded = {name: t.detach().bfloat16() if name in "qkv" else t.detach() for name, t in tensors.items()}
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, run(rounded))
    assert all(g.dtype == tensors[name].dtype for name, g in gradients(out, tensors).items())


def test_statistics_do_not_change_the_output() -> None:
    tensors = CASE.inputs(torch.float32)
    out, measured = gated_attention(**tensors, y=CASE.y, x=CASE.x, statistics=True)
    assert torch.equal(out, run(tensors))
    assert measured is not None
    on_padding = 1 - measured.received.sum() / measured.entropy.numel()
    assert 0 < on_padding < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": lambda t: t[..., :2]}, r"k has shape \(2, 2, 15, 2\), expected \(2, 2, 15, 3\)"),
        ({"q": lambda t: t[:, :, 1:]}, r"q has shape \(2, 2, 8, 3\), expected \(2, 2, 9, 3\)"),
        ({"v": lambda t: t.expand(-1, 3, -1, -1)}, r"v has shape \(2, 3, 15, 5\), expected \(2, 2, 15, 5\)"),
        ({"v": Tensor.bfloat16}, "share one of .*, got torch.float32, torch.float32 and torch.bfloat16"),
        ({"gate": Tensor.bfloat16}, "gate must be float32 or float64, got torch.bfloat16"),
        ({"position": lambda t: t[:, :2]}, r"position has shape \(2, 2\), expected \(2, 3\)"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    tensors = CASE.inputs(torch.float32)
    for name, function in change.items():
        tensors[name] = function(tensors[name])
    with pytest.raises(ValueError, match=message):
        run(tensors)


def test_second_derivatives_are_refused() -> None:
    tensors = CASE.inputs(torch.float64)
    (gradient,) = torch.autograd.grad(run(tensors).sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once; for second derivatives use backend='dense'"):
        gradient.sum().backward()


def test_says_which_backend_to_choose_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available(DEVICE)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not available(torch.device("cpu"))
    tensors = {name: tensor.detach().cpu() for name, tensor in CASE.inputs(torch.float32).items()}
    with pytest.raises(RuntimeError, match='backend="blocks"'):
        run(tensors)


def test_imports_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch, tcnn_model, tcnn_model.kernels.reference
assert not tcnn_model.kernels.available(torch.device("cuda"))
assert not tcnn_model.kernels.available(torch.device("cpu"))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
