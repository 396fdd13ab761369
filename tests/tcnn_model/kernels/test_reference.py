"""The reference for the kernels: against the equations,
and function by function against the kernels.
"""

import pytest
import torch

from tcnn_model import Axis
from tcnn_model.kernels import reference
from tcnn_model.kernels.grid import Grid, Line
from tests.tcnn_model.dense import DEVICE, Case, apply, gradients, measure, terms
from tests.tcnn_model.numerics import assert_rounding, random

CASES = {
    # Sides are odd and unequal; either axis has a stride; padding is on both sides, on one side or
    # on none.
    "padded": Case(Axis(3, 1, 1, 3), Axis(7, 2, 1, 3), 2, 3, 5, batch=2),
    "strided": Case(Axis(7, 2, "same", 3), Axis(3, 2, "same", 3), 3, 7, 3, shared=False),
    "unpadded": Case(Axis(2, 1, 0, 1), Axis(5, 1, 0, 3), 2, 1, 1),
}
pytestmark = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@pytest.mark.numerical
def test_reference_equals_the_papers_equations(case: Case) -> None:
    grid = Grid(Line.of(case.y), Line.of(case.x))
    tensors = case.inputs()
    exact = apply(tensors, case.y, case.x)
    upstream = random(*exact.shape, seed=7).to(DEVICE)
    expected = {
        **gradients(exact, tensors, upstream),
        **measure(tensors, case.y, case.x),
        "output": exact,
    }
    q, k, v, position, gate = (tensor.detach() for tensor in tensors.values())

    table = reference.positional_table(position, grid, torch.float64)
    normaliser, content_entropy = reference.content_normaliser(q, k, statistics=True)
    out, statistics = reference.mix(q, k, v, normaliser, gate, table, grid, statistics=True)
    assert statistics is not None
    assert content_entropy is not None
    entropy, distance, received = statistics
    results = {
        "output": out,
        "entropy": entropy,
        "attention_distance": distance,
        "received": received,
    }
    dq, dposition, dgate, mean = reference.backward_queries(
        q, k, v, normaliser, gate, table, grid, upstream
    )
    results |= {
        "content_entropy": content_entropy,
        "query": dq,
        "position": dposition,
        "gate": dgate,
    }
    results["key"] = reference.backward_keys(q, k, v, normaliser, gate, upstream, mean)
    results["values"] = reference.backward_values(q, k, v, normaliser, gate, table, grid, upstream)
    # Bounds on rounding are eight eps times the sums of absolute terms.
    bounds = terms(tensors, case.y, case.x, upstream)
    for name, actual in results.items():
        assert_rounding(actual, expected[name], bounds[name], 8, torch.float64, name)


@pytest.mark.study
@pytest.mark.usefixtures("small_blocks", "nan_memory")
def test_reference_equals_the_kernels(case: Case) -> None:
    """Results agree to 1e-10 of the largest value:
    rounding is a hundred times smaller, and mistakes far larger.
    """
    from tcnn_model.kernels import backward, forward, tables

    grid = Grid(Line.of(case.y), Line.of(case.x))
    q, k, v, position, gate = (tensor.detach() for tensor in case.inputs().values())
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
        # The output serves as the upstream gradient, for which any tensor of its shape would do.
        (backward, "backward_values", (q, k, v, normaliser, gate, table, grid, out)),
    ]
    for module, name, arguments in calls:
        results = getattr(module, name)(*arguments)
        expected_results = getattr(reference, name)(*arguments)
        if isinstance(results, torch.Tensor):
            results = [results]
            expected_results = [expected_results]
        for actual, expected in zip(results, expected_results, strict=True):
            if expected is not None:
                # None stands for statistics that were not requested.
                largest = float(expected.abs().max())
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * largest, msg=name)
