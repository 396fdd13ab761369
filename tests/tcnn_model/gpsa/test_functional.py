"""gpsa(): every backend against Eq. (7) written out, in value, gradients and statistics, and what it refuses."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnn_model import AttentionStatistics, GatedAttention, gpsa
from tcnn_model.gpsa import blocks
from tcnn_model.gpsa.functional import Backend
from tcnn_model.gpsa.positional import Axis, gaussian_position
from tests.tcnn_model.helpers import LargestTensor, random, relative_error

GRIDS = {
    "one pixel": (Axis(1), Axis(1)),
    "padding": (Axis(5, 1, 1, 3), Axis(7, 1, 2, 3)),
    "stride, no padding": (Axis(7, 2, 0, 3), Axis(5, 3, 0, 2)),
    "same padding": (Axis(6, 2, "same", 3), Axis(7, 2, "same", 5)),
}
VALUES = ("shared", "per head, wide", "per head")
BACKENDS: tuple[Backend, ...] = ("auto", "dense", "blocks", "fused")

every_backend = pytest.mark.parametrize(
    ("backend", "values"),
    [(b, v) for b in BACKENDS for v in VALUES if b != "fused" or v == "per head"],  # the one it is for
)


@pytest.fixture(params=[1, 50, 10**6], ids=["one query at a time", "a few queries", "all heads"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS_CPU", request.param)


def _arguments(grid: str, values: str, dtype: torch.dtype = torch.float64, batch: int = 2) -> dict[str, Any]:
    (y, x), heads, dim = GRIDS[grid], 3, 5
    position = gaussian_position(random(heads, seed=4).abs() + 0.1, random(heads, 2, seed=5))
    shape = {"shared": (1, 11), "per head, wide": (heads, 11), "per head": (heads, dim)}[values]
    return {
        "query": 2 * random(batch, heads, y.queries * x.queries, dim, seed=1, dtype=dtype),
        "key": random(batch, heads, y.length * x.length, dim, seed=2, dtype=dtype),
        "values": random(batch, shape[0], y.length * x.length, shape[1], seed=3, dtype=dtype),
        "position": position,
        "gate": torch.tensor([0.3, 0.9, 0.6], dtype=torch.promote_types(dtype, torch.float32)),
        "y": y,
        "x": x,
    }


def _offsets(y: Axis, x: Axis) -> tuple[Tensor, Tensor]:
    """From each query to each key of the extended grid, (N_query, N_key, 2), and which keys are real."""
    keys = [(j, i) for j in range(-y.before, y.length + y.after) for i in range(-x.before, x.length + x.after)]
    queries = [
        (y.first_query + m * y.stride, x.first_query + n * x.stride) for m in range(y.queries) for n in range(x.queries)
    ]
    delta = torch.tensor([[(j - b, i - a) for j, i in keys] for b, a in queries]).double()
    return delta, torch.tensor([0 <= j < y.length and 0 <= i < x.length for j, i in keys])


def _literal(query: Tensor, key: Tensor, position: Tensor, gate: Tensor, y: Axis, x: Axis) -> tuple[Tensor, ...]:
    """A and C over the extended grid, (B, heads, N_query, N_key), and P, (heads, N_query, N_key)."""
    delta, real = _offsets(y, x)
    r = torch.cat([delta.pow(2).sum(-1, keepdim=True), delta], -1)
    positional = torch.softmax(torch.einsum("qkr,hr->hqk", r, position.double()), -1)
    logits = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) / query.shape[-1] ** 0.5
    content = torch.zeros(*logits.shape[:3], len(real), dtype=torch.float64)
    content[..., real] = torch.softmax(logits, -1)
    share = gate.double()[:, None, None]
    return (1 - share) * content + share * positional, content, positional


def _expected(values: Tensor, y: Axis, x: Axis, **attention: Tensor) -> Tensor:
    whole, _, _ = _literal(y=y, x=x, **attention)
    return whole[..., _offsets(y, x)[1]] @ values.double()


@pytest.mark.usefixtures("block")
@every_backend
@pytest.mark.parametrize("grid", GRIDS)
def test_output_and_gradients_are_those_of_the_equations(grid: str, values: str, backend: Backend) -> None:
    arguments = _arguments(grid, values)
    leaves = {name: t.requires_grad_() for name, t in arguments.items() if isinstance(t, Tensor)}
    output, expected = gpsa(**arguments, backend=backend), _expected(**arguments)
    assert relative_error(output, expected) < 1e-13
    upstream = random(*output.shape, seed=6)
    ours = torch.autograd.grad(output, list(leaves.values()), upstream)
    theirs = torch.autograd.grad(expected, list(leaves.values()), upstream)
    for name, actual, wanted in zip(leaves, ours, theirs, strict=True):
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-12, msg=name)


@every_backend
def test_gradients_are_the_numerical_ones(values: str, backend: Backend) -> None:
    arguments = _arguments("same padding", values, batch=1)
    leaves = {name: t.requires_grad_() for name, t in arguments.items() if isinstance(t, Tensor)}
    axes = {"y": arguments["y"], "x": arguments["x"]}

    def forward(*tensors: Tensor) -> Tensor:
        return gpsa(**dict(zip(leaves, tensors, strict=True)), **axes, backend=backend)

    assert torch.autograd.gradcheck(forward, tuple(leaves.values()))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("differentiable", [False, True], ids=["same pass", "with gradients"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("values", VALUES)
def test_statistics_are_those_of_the_equations(grid: str, values: str, differentiable: bool) -> None:
    arguments = _arguments(grid, values)
    arguments["query"].requires_grad_(differentiable)
    output, statistics = gpsa(**arguments, statistics=True)
    assert output.requires_grad == differentiable
    assert relative_error(output, _expected(**arguments)) < 1e-13

    del arguments["values"]
    y, x = arguments["y"], arguments["x"]
    whole, content, positional = _literal(**arguments)
    delta, real = _offsets(y, x)
    logits = arguments["query"].detach() @ arguments["key"].transpose(2, 3) / 5**0.5
    expected = AttentionStatistics(
        log_sum_exp=torch.logsumexp(logits, -1),
        entropy=torch.special.entr(whole).sum(-1),
        content_entropy=torch.special.entr(content).sum(-1),
        positional_entropy=torch.special.entr(positional).sum(-1),
        attention_distance=(whole * delta.norm(dim=-1)).sum(-1),
        received=whole[..., real].sum(2),
    )
    for field in fields(AttentionStatistics):
        actual, wanted = getattr(statistics, field.name), getattr(expected, field.name)
        assert not actual.requires_grad
        torch.testing.assert_close(actual, wanted.detach(), rtol=1e-12, atol=1e-12, msg=field.name)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("backend", ["dense", "blocks"])
def test_one_attention_alone(share: float, backend: Backend) -> None:
    arguments = _arguments("padding", "shared") | {"gate": torch.full((3,), share, dtype=torch.float64)}
    arguments["position"] = arguments["position"] * 1e4  # far pixels get exactly nothing
    output, statistics = gpsa(**arguments, backend=backend, statistics=True)
    assert relative_error(output, _expected(**arguments)) < 1e-13
    alone = statistics.content_entropy if share == 0 else statistics.positional_entropy.expand(2, -1, -1)
    torch.testing.assert_close(statistics.entropy, alone, rtol=0, atol=1e-12)


def _rms(error: Tensor) -> float:
    return float(error.detach().double().square().mean().sqrt())


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_literal_form(dtype: torch.dtype, values: str, backend: Backend) -> None:
    """Error at most 2 times, gradients' at most 3 times, that of dense attention in the same dtype."""
    arguments = _arguments("padding", values, dtype)
    leaves = {n: arguments[n].requires_grad_() for n in ("query", "key", "values")}
    exact = _expected(**arguments)
    upstream = random(*exact.shape, seed=6, dtype=dtype)
    exact_gradients = torch.autograd.grad(exact, list(leaves.values()), upstream.double())

    axes = {name: arguments[name] for name in ("y", "x")}
    positional = GatedAttention(**{k: v for k, v in arguments.items() if k != "values"}).positional()
    positional = positional[..., _offsets(**axes)[1]].to(dtype)
    content = torch.softmax(leaves["query"] * 5**-0.5 @ leaves["key"].transpose(2, 3), -1)
    share = arguments["gate"].to(dtype)[:, None, None]
    literal = ((1 - share) * content + share * positional) @ leaves["values"]
    literal_gradients = torch.autograd.grad(literal, list(leaves.values()), upstream)

    output = gpsa(**arguments, backend=backend)
    assert output.dtype == dtype
    assert 0 < _rms(output - exact) <= 2 * _rms(literal - exact)
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
    for name, ours, theirs, truth in zip(leaves, gradients, literal_gradients, exact_gradients, strict=True):
        assert ours.dtype == dtype
        assert _rms(ours - truth) <= 3 * _rms(theirs - truth), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_lowers_queries_keys_and_values(backend: Backend) -> None:
    arguments = _arguments("padding", "per head", torch.float32)
    plain = gpsa(**arguments, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = gpsa(**arguments, backend=backend)
    narrow = {n: arguments[n].bfloat16() for n in ("query", "key", "values")}
    assert lowered.dtype == torch.bfloat16
    assert torch.equal(lowered, gpsa(**arguments | narrow, backend=backend))
    assert relative_error(lowered, plain) < 0.02


@every_backend
def test_compiles_without_a_break(values: str, backend: Backend) -> None:
    arguments = _arguments("padding", values)
    axes = {name: arguments.pop(name) for name in ("y", "x")}
    leaves = [t.requires_grad_() for t in arguments.values()]

    def forward(*tensors: Tensor) -> Tensor:
        return gpsa(*tensors, **axes, backend=backend)

    plain, compiled = forward(*leaves), torch.compile(forward, backend="aot_eager", fullgraph=True)(*leaves)
    assert relative_error(compiled, plain) < 1e-13
    upstream = random(*plain.shape, seed=6)
    pairs = (torch.autograd.grad(output, leaves, upstream) for output in (compiled, plain))
    for ours, wanted in zip(*pairs, strict=True):
        assert relative_error(ours, wanted) < 1e-12


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of opcheck itself
def test_custom_operator_is_registered_well() -> None:
    arguments = _arguments("padding", "shared")
    attention = GatedAttention(**{k: v for k, v in arguments.items() if k != "values"})
    rows, cols = (factor.detach() for factor in attention.log_factors_on_pixels())
    tensors = (arguments["query"], arguments["key"], arguments["values"], rows, cols, arguments["gate"])
    torch.library.opcheck(blocks.mix_and_apply, tuple(t.clone().requires_grad_() for t in tensors))


def _bad(**changes: Any) -> dict[str, Any]:
    return _arguments("padding", "shared") | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 35, 5)}, r"queries of shape \(B, heads, 5 \* 9 = 45, d\), got \(2, 35, 5\)"),
        ({"query": torch.zeros(2, 3, 44, 5).double()}, r"5 \* 9 = 45, d\), got \(2, 3, 44, 5\)"),
        ({"key": torch.zeros(2, 2, 35, 5).double()}, r"keys of shape \(2, 3, 35, 5\) on 5 x 7 .*got \(2, 2, 35, 5\)"),
        ({"key": torch.zeros(2, 3, 36, 5).double()}, r"keys of shape \(2, 3, 35, 5\) on 5 x 7 .*got \(2, 3, 36, 5\)"),
        ({"key": torch.zeros(3, 35, 5).double()}, r"keys of shape \(2, 3, 35, 5\).*got \(3, 35, 5\)"),
        ({"values": torch.zeros(2, 2, 35, 4).double()}, r"\(2, 1 or 3, 5 \* 7 = 35, C\), got \(2, 2, 35, 4\)"),
        ({"values": torch.zeros(2, 35, 4).double()}, r"\(2, 1 or 3, 5 \* 7 = 35, C\), got \(2, 35, 4\)"),
        ({"position": torch.zeros(3, 2)}, r"position of shape \(3, 3\), got \(3, 2\)"),
        ({"gate": torch.zeros(2)}, r"gate of shape \(3,\), got \(2,\)"),
        ({"key": torch.zeros(2, 3, 35, 5)}, "keys like the queries, torch.float64 on cpu, got torch.float32 on cpu"),
        ({"values": torch.zeros(2, 1, 35, 4)}, "values like the queries, torch.float64 on cpu, got torch.float32"),
        ({"key": torch.zeros(2, 3, 35, 5, device="meta").double()}, "got torch.float64 on meta"),
        ({"gate": torch.zeros(3, device="meta")}, "gate on the device of the queries, cpu, got meta"),
        ({"query": torch.zeros(2, 0, 45, 5).double()}, r"at least one head of at least one channel, got .*2, 0, 45, 5"),
        ({"query": torch.zeros(2, 3, 45, 0).double()}, r"at least one head of at least one channel, got .*2, 3, 45, 0"),
        ({"values": torch.zeros(2, 1, 35, 0).double()}, r"35, C\), got \(2, 1, 35, 0\)"),
        ({"y": Axis(0)}, "empty grid: 0 x 9 queries on 0 x 7 pixels"),
        ({"y": Axis(2, 1, 0, 3)}, "empty grid: 0 x 9 queries on 2 x 7 pixels"),
        ({"backend": "fast"}, "backend to be one of auto, dense, blocks, fused, triton; got 'fast'"),
        ({"backend": "fused"}, r"backend='fused' needs .*\(heads, d\) = \(3, 5\); got \(1, 11\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpsa(**_bad(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 3, 45, 5).long()}, "queries to be a tensor of a floating dtype, got torch.int64"),
        ({"position": torch.zeros(3, 3).int()}, "position to be a tensor of a floating dtype, got torch.int32"),
        ({"gate": 0.5}, "gate to be a tensor of a floating dtype, got 0.5"),
        ({"y": 7}, r"y to be a tcnn_model\.Axis, got 7"),
    ],
)
def test_what_is_no_tensor_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        gpsa(**_bad(**changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_position_in_half_precision_loses_nothing_more(dtype: torch.dtype) -> None:
    arguments = _arguments("padding", "shared")
    narrow = arguments["position"].to(dtype)
    expected = gpsa(**arguments | {"position": narrow.double()})
    assert torch.equal(gpsa(**arguments | {"position": narrow}), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_images(backend: Backend) -> None:
    arguments = _arguments("padding", "per head", batch=0)
    output, statistics = gpsa(**arguments, backend=backend, statistics=True)
    assert output.shape == (0, 3, 45, 5)
    assert statistics.received.shape == (0, 3, 35)


def test_fused_holds_no_matrix_whatever_the_strides() -> None:
    axis, tokens = Axis(23, 1, 1, 3), 23 * 23
    memory = [random(2, 3, 5, tokens, seed=seed) for seed in range(3)]  # channels outside, as a convolution leaves them
    position, gate = gaussian_position(torch.ones(3).double(), random(3, 2)), torch.full((3,), 0.5).double()
    with LargestTensor() as largest:
        gpsa(*(m.transpose(2, 3) for m in memory), position, gate, y=axis, x=axis, backend="fused")
    assert largest.elements < 2 * 3 * tokens**2 / 20


def test_second_derivatives() -> None:
    arguments = _arguments("same padding", "shared", batch=1)
    values = arguments["values"].requires_grad_()

    def twice(backend: Backend) -> Tensor:
        output = gpsa(**arguments, backend=backend).square().sum()
        return torch.autograd.grad(output, values, create_graph=True)[0].square().sum()

    assert float(torch.autograd.grad(twice("dense"), values)[0].abs().max()) > 0
    with pytest.raises(RuntimeError, match="differentiated once; for second derivatives use backend='dense'"):
        torch.autograd.grad(twice("blocks"), values)


def test_autocast_leaves_float64_alone() -> None:
    arguments = _arguments("padding", "shared")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = gpsa(**arguments)
    assert torch.equal(output, gpsa(**arguments))


def test_autocast_takes_values_in_float32_with_queries_already_lowered() -> None:
    arguments = _arguments("padding", "shared", torch.float32)
    lowered = {name: arguments[name].bfloat16() for name in ("query", "key")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gpsa(**arguments | lowered), gpsa(**arguments))
