"""The reference beside the kernels: as right as they are, and the same function by function."""

import pytest
import torch

from tcnn_model.gpsa.positional import Axis
from tcnn_model.kernels import reference
from tcnn_model.kernels.grid import Grid, Line
from tests.tcnn_model.kernels.dense import DEVICE, Case, apply, error, gradients, measure

CASES = [
    Case(Axis(5, 1, 1, 3), Axis(7, 2, 1, 3), 2, 3, 5, batch=2, name="padded"),
    Case(Axis(7, 2, "same", 3), Axis(3, 2, "same", 3), 3, 7, 3, shared=False, name="strided"),
    Case(Axis(2, 1, 0, 1), Axis(5, 1, 0, 3), 2, 1, 1, name="unpadded"),
]
pytestmark = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_against_the_papers_equations(case: Case) -> None:
    grid = Grid(Line.of(case.y), Line.of(case.x))
    tensors = case.inputs(torch.float64)
    exact = apply(tensors, case.y, case.x)
    weight = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    expected, measured = gradients(exact, tensors), measure(tensors, case.y, case.x)
    q, k, v, position, gate = (tensor.detach() for tensor in tensors.values())

    table = reference.positional_table(position, grid, torch.float64)
    normaliser, content_entropy = reference.content_normaliser(q, k, statistics=True)
    out, statistics = reference.mix(q, k, v, normaliser, gate, table, grid, statistics=True)
    assert statistics is not None
    assert content_entropy is not None
    assert error(out, exact) < 1e-13
    for actual, name in zip(statistics, ("entropy", "attention_distance", "received"), strict=True):
        assert error(actual, measured[name]) < 1e-13
    assert error(content_entropy, measured["content_entropy"]) < 1e-13

    dq, dposition, dgate, mean = reference.backward_queries(q, k, v, normaliser, gate, table, grid, weight)
    dk = reference.backward_keys(q, k, v, normaliser, gate, weight, mean)
    dv = reference.backward_values(q, k, v, normaliser, gate, table, grid, weight)
    for actual, name in ((dq, "q"), (dk, "k"), (dv, "v"), (dposition, "position"), (dgate, "gate")):
        assert error(actual, expected[name]) < 1e-12, name


@pytest.mark.usefixtures("small_blocks", "nan_memory")
def test_against_the_kernels(case: Case) -> None:
    from tcnn_model.kernels import backward, forward, tables

    grid = Grid(Line.of(case.y), Line.of(case.x))
    q, k, v, position, gate = (tensor.detach() for tensor in case.inputs(torch.float64).values())
    table = reference.positional_table(position, grid, torch.float64)
    normaliser, _ = reference.content_normaliser(q, k)
    out, _ = reference.mix(q, k, v, normaliser, gate, table, grid)
    mean = reference.backward_queries(q, k, v, normaliser, gate, table, grid, out)[3]
    calls = [
        (tables, "positional_table", (position, grid, torch.float64)),
        (tables, "padding_statistics", (gate, table, grid)),
        (forward, "content_normaliser", (q, k)),
        (forward, "mix", (q, k, v, normaliser, gate, table, grid)),
        (backward, "backward_queries", (q, k, v, normaliser, gate, table, grid, out)),
        (backward, "backward_keys", (q, k, v, normaliser, gate, out, mean)),
        (backward, "backward_values", (q, k, v, normaliser, gate, table, grid, out)),
    ]
    for module, name, arguments in calls:
        ours, theirs = getattr(module, name)(*arguments), getattr(reference, name)(*arguments)
        if isinstance(ours, torch.Tensor):
            ours, theirs = (ours,), (theirs,)
        for actual, expected in zip(ours, theirs, strict=True):
            if expected is not None:
                assert torch.allclose(actual, expected, rtol=1e-11, atol=1e-12), name
