"""gpsa(): values, gradients and statistics
of every backend against Eq. (7) in float64, and its errors.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnn_model import Axis, GatedAttention, gpsa
from tcnn_model.gpsa import blocks, functional
from tcnn_model.gpsa.functional import Backend
from tests.tcnn_model.dense import DEVICE, EXTREMES, Case, assert_as_the_equations
from tests.tcnn_model.numerics import LargestTensor

pytestmark = pytest.mark.numerical

GRIDS = {
    "one pixel": (Axis(1), Axis(1)),
    "padding": (Axis(5, 1, 1, 3), Axis(7, 1, 2, 3)),
    "stride, no padding": (Axis(7, 2, 0, 3), Axis(5, 3, 0, 2)),
    "same padding": (Axis(6, 2, "same", 3), Axis(7, 2, "same", 5)),
}
VALUES = {"shared": (True, 11), "per head, wide": (False, 11), "per head": (False, 5)}
# Fused attention needs values for each head, with as many channels as the queries.
BACKENDS: list[tuple[Backend, str]] = [(b, v) for b in ("dense", "blocks") for v in VALUES] + [
    ("fused", "per head")
]
HALVES = [torch.bfloat16, torch.float16]
# torch has no fused attention in float64 on a GPU.
FUSED_DTYPE = torch.float64 if DEVICE.type == "cpu" else torch.float32


def _case(grid: str, values: str, batch: int = 2) -> Case:
    shared, channels = VALUES[values]
    return Case(
        # With gates near 0 or 1, errors of content or position would be invisible.
        *GRIDS[grid],
        3,
        5,
        channels,
        shared,
        batch,
        gate=(0.3, 0.9, 0.6),
        sharpness=2.0,
    )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("backend", "values"), [*BACKENDS, ("auto", "shared")])
def test_backends_equal_the_equations(grid: str, backend: Backend, values: str) -> None:
    case = _case(grid, values)
    inputs = case.inputs(FUSED_DTYPE if backend == "fused" else torch.float64)
    assert_as_the_equations(partial(gpsa, backend=backend), inputs, case.y, case.x)


@pytest.mark.parametrize(
    ("grid", "values", "elements"),
    [
        ("padding", "shared", 1),  # one query at a time
        ("padding", "per head", 50),  # a few queries
        ("stride, no padding", "shared", 50),
        ("stride, no padding", "per head", 200),  # two heads
        ("same padding", "shared", 200),
        ("same padding", "per head", 1),
        ("same padding", "shared", 10**6),  # on a GPU, all images
        ("stride, no padding", "per head", 10**6),
    ],
)
def test_blocks_of_any_size_equal_the_equations(
    grid: str, values: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and statistics also equal the equations without gradients,
    where a single pass computes both.
    """
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS_CPU", elements)
    monkeypatch.setattr(blocks, "_IMAGES_TOGETHER_CPU", elements >= 10**6)
    case = _case(grid, values)
    # Another function runs without gradients.
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert_as_the_equations(partial(gpsa, backend="blocks"), case.inputs(), case.y, case.x)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(("backend", "values"), BACKENDS)
def test_narrower_dtypes_equal_the_equations_up_to_rounding(
    backend: Backend, values: str, dtype: torch.dtype
) -> None:
    case = _case("padding", values)
    assert_as_the_equations(partial(gpsa, backend=backend), case.inputs(dtype), case.y, case.x)


@pytest.mark.parametrize("backend", ["dense", "blocks"])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_gates_and_positions(name: str, backend: Backend) -> None:
    case = EXTREMES[name]
    assert_as_the_equations(
        partial(gpsa, backend=backend), case.inputs(torch.float32), case.y, case.x
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_position_in_half_precision_has_no_further_rounding(dtype: torch.dtype) -> None:
    arguments = _arguments("shared")
    narrow = arguments["position"].to(dtype)
    expected = gpsa(**arguments | {"position": narrow.double()})
    assert torch.equal(gpsa(**arguments | {"position": narrow}), expected)


def _arguments(
    values: str,
    dtype: torch.dtype = torch.float64,
    grid: str = "padding",
    batch: int = 2,
) -> Any:
    case = _case(grid, values, batch)
    return {name: t.detach() for name, t in case.inputs(dtype).items()} | {
        "y": case.y,
        "x": case.x,
    }


@pytest.mark.parametrize("backend", ["dense", "blocks", "fused"])
def test_autocast_lowers_queries_keys_and_values(backend: Backend) -> None:
    """The same holds if part of them is lowered already; float64 is left alone."""
    arguments = _arguments("per head", torch.float32)
    double = _arguments("per head")
    # Autocast must leave positions and gates in float32.
    narrow = {name: arguments[name].bfloat16() for name in ("query", "key", "values")}
    lowered = arguments | {name: narrow[name] for name in ("query", "key")}
    if backend == "fused" and DEVICE.type != "cpu":
        double = arguments
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        from_float32, from_mixed, from_float64 = (
            gpsa(**inputs, backend=backend) for inputs in (arguments, lowered, double)
        )
    expected = gpsa(**arguments | narrow, backend=backend)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(from_float32, expected)
    assert torch.equal(from_mixed, expected)
    assert double is arguments or torch.equal(from_float64, gpsa(**double, backend=backend))


# opcheck itself reads .grad of non-leaf tensors.
@pytest.mark.study
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# Taps are an optional argument, with their own gradient.
@pytest.mark.parametrize("taps", [[], [torch.randn(3, 11, 2, dtype=torch.float64, device=DEVICE)]])
def test_custom_operator_passes_opcheck(taps: list[Tensor]) -> None:
    arguments = _arguments("shared")
    values = arguments.pop("values")
    rows, cols = GatedAttention(**arguments).factors_on_pixels(torch.float64, logarithm=True)
    tensors = (
        arguments["query"],
        arguments["key"],
        values,
        rows,
        cols,
        arguments["gate"],
        *taps,
    )
    torch.library.opcheck(blocks.mix_and_apply, tuple(t.clone().requires_grad_() for t in tensors))


# The blocks have a backward of their own, which cannot be differentiated.
def test_second_derivatives_are_refused_by_the_blocks_backend() -> None:
    arguments = _arguments("shared", grid="same padding", batch=1)
    values = arguments["values"].requires_grad_()

    def twice(backend: Backend) -> Tensor:
        output = gpsa(**arguments, backend=backend).square().sum()
        return torch.autograd.grad(output, values, create_graph=True)[0].square().sum()

    assert float(torch.autograd.grad(twice("dense"), values)[0].abs().max()) > 0
    with pytest.raises(
        RuntimeError,
        match="differentiated once; for second derivatives use backend='dense'",
    ):
        torch.autograd.grad(twice("blocks"), values)


@pytest.mark.parametrize("backend", ["auto", "dense", "blocks", "fused"])
def test_empty_batch_on_every_backend(backend: Backend) -> None:
    arguments = _arguments("per head", FUSED_DTYPE, batch=0)
    output, statistics = gpsa(**arguments, backend=backend, statistics=True)
    assert output.shape == (0, 3, 45, 5)
    assert statistics.received.shape == (0, 3, 35)


def test_fused_attention_holds_no_matrix_for_any_strides() -> None:
    # On 23 x 23 pixels, an N x N matrix is sixty times as large as the queries. On a GPU, torch has
    # kernels only for widths that are multiples of 8.
    case = Case(Axis(23, 1, 1, 3), Axis(23, 1, 1, 3), 3, 8, 8, shared=False, batch=2)
    arguments = {name: tensor.detach() for name, tensor in case.inputs(FUSED_DTYPE).items()}
    # In the output of a convolution, channels are the outer axis in memory.
    for name in ("query", "key", "values"):
        arguments[name] = arguments[name].mT.contiguous().mT
    with LargestTensor() as largest:
        gpsa(**arguments, y=case.y, x=case.x, backend="fused")
    assert largest.elements < 2 * 3 * 23**4 / 20


@pytest.mark.parametrize(
    ("side", "batch", "device", "backend"),
    [
        (11, 1, "cpu", "dense"),
        (12, 1, "cpu", "blocks"),
        (28, 145, "meta", "dense"),
        (28, 146, "meta", "blocks"),
    ],
)
def test_choice_of_the_backend(side: int, batch: int, device: str, backend: str) -> None:
    """On a CPU it depends on the keys, elsewhere on all weights: 2^28 are 145.6 images."""
    query, key, position, gate = (
        torch.empty(shape, device=device)
        for shape in ((batch, 3, side**2, 5), (batch, 3, side**2, 5), (3, 3), (3,))
    )
    attention = GatedAttention(query, key, position, gate, Axis(side), Axis(side))
    assert functional._choose(attention, query.new_empty(batch, 1, side**2, 7)) == backend


def _zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **{"dtype": torch.float64, "device": DEVICE} | options)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"query": _zeros(2, 45, 5)},
        r"queries of shape \(B, heads, 5 \* 9 = 45, d\), got \(2, 45, 5\)",
    ),
    # Shapes are those of "padding" above: queries on 5 x 9 pixels, keys on 5 x 7, 3 heads of 5
    # channels.
    ({"query": _zeros(2, 3, 44, 5)}, r"5 \* 9 = 45, d\), got \(2, 3, 44, 5\)"),
    (
        {"key": _zeros(2, 2, 35, 5)},
        r"keys of shape \(2, 3, 35, 5\) on 5 x 7 .*got \(2, 2, 35, 5\)",
    ),
    (
        {"values": _zeros(2, 2, 35, 4)},
        r"\(2, 1 or 3, 5 \* 7 = 35, C\), got \(2, 2, 35, 4\)",
    ),
    ({"values": _zeros(2, 35, 4)}, r"\(2, 1 or 3, 5 \* 7 = 35, C\), got \(2, 35, 4\)"),
    ({"position": _zeros(3, 2)}, r"position of shape \(3, 3\), got \(3, 2\)"),
    ({"gate": _zeros(2)}, r"gate of shape \(3,\), got \(2,\)"),
    (
        {"key": _zeros(2, 3, 35, 5).float()},
        f"keys like the queries, torch.float64 on {DEVICE}.*, got torch.float32 on {DEVICE}",
    ),
    (
        {"values": _zeros(2, 1, 35, 4).float()},
        f"values like the queries, torch.float64 on {DEVICE}.*, got torch.float32",
    ),
    ({"key": _zeros(2, 3, 35, 5, device="meta")}, "got torch.float64 on meta"),
    (
        {"gate": _zeros(3, device="meta")},
        f"gate on the device of the queries, {DEVICE}.*, got meta",
    ),
    (
        {"query": _zeros(2, 0, 45, 5)},
        r"at least one head of at least one channel, got .*2, 0, 45, 5",
    ),
    (
        {"query": _zeros(2, 3, 45, 0)},
        r"at least one head of at least one channel, got .*2, 3, 45, 0",
    ),
    ({"values": _zeros(2, 1, 35, 0)}, r"35, C\), got \(2, 1, 35, 0\)"),
    ({"y": Axis(2, 1, 0, 3)}, "empty grid: 0 x 9 queries on 2 x 7 pixels"),
    (
        {"backend": "fast"},
        "backend to be one of auto, dense, blocks, fused, triton; got 'fast'",
    ),
    (
        {"backend": "fused"},
        r"backend='fused' needs .*\(heads, d\) = \(3, 5\); got \(1, 11\)",
    ),
    (
        {"query": _zeros(2, 3, 45, 5).long()},
        "queries to be a tensor of a floating dtype, got torch.int64",
    ),
    ({"gate": 0.5}, "gate to be a tensor of a floating dtype, got 0.5"),
    ({"y": 7}, r"y to be a tcnn_model\.Axis, got 7"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(
        TypeError if "floating" in message or "Axis" in message else ValueError,
        match=message,
    ):
        gpsa(**_arguments("shared") | changes)
