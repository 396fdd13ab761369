"""The recorder's statistics from the GPU's kernel,
in Triton's interpreter, against brute force and the blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tcnn_model import kernels
from tcnn_model.kernels import trial
from tcnn_probe.attention import softmax_statistics
from tcnn_probe.attention.logits import GivenLogits, ProductLogits
from tests.tcnn_model.dense import DEVICE
from tests.tcnn_model.kernels.conftest import interpreter  # noqa: F401
from tests.tcnn_probe.attention.test_softmax_statistics import EPS, case, check

pytestmark = pytest.mark.numerical


def by_kernel_alone(
    name: str, shape: object, kernel: Callable[[], Any], *rest: Any, **options: Any
) -> Any:
    """Return the kernel's result without a trial, in which blocks measure, too."""
    return kernel()


@pytest.mark.study(but=["hidden-5-1"])
@pytest.mark.parametrize(
    ("form", "prefix", "windows"),
    [
        ("plain", 0, 3),
        ("added", 5, 1),
        ("hidden", 5, 1),
        ("lowered", 5, 1),
        ("swallowed", 5, 1),
    ],
)
def test_statistics_of_the_kernel(
    form: str, prefix: int, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("cases are on the CPU; test_row_statistics.py runs the kernel here")
    attention, expected = case(form, prefix, windows)
    # The kernel's sums over queries would include padding, so with a mask the blocks measure them.
    attention = replace(attention, detailed=form == "plain", limit=1)
    by_blocks = softmax_statistics.measure_softmax(attention)
    monkeypatch.setattr(ProductLogits, "on_kernel", True)
    monkeypatch.setattr(trial, "tried", by_kernel_alone)
    monkeypatch.setattr(softmax_statistics, "_rows_by_blocks", None)
    by_kernel = check(attention, expected)
    # The bounds above apply to both; sums of weights, each at most 1, differ by as little.
    close = {"rtol": 1e3 * EPS, "atol": 1e3 * EPS}
    assert (by_blocks.pattern.sums().images == 1).all()
    assert (by_blocks.rows is None) == (form != "plain")
    for holder in ("pattern", "rows"):
        for name in ("attention", "entropy", "images", "received", "similarity"):
            actual, blocks = (
                getattr(getattr(m, holder), name, None) for m in (by_kernel, by_blocks)
            )
            assert (actual is None) == (blocks is None)
            if actual is not None:
                torch.testing.assert_close(actual, blocks, **close, msg=name)


def test_cases_that_the_kernel_leaves_to_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks measure all that the kernel is not switched on for,
    tensors on the CPU, and logits of a model.
    """
    query = torch.zeros(1, 2, 3, 8, device=DEVICE)
    product = ProductLogits(query, query, 1.0, None)
    monkeypatch.setattr(kernels, "can_measure", lambda q, k: True)
    for switch in ("", "0"):
        monkeypatch.setenv("TCNN_PROBE_TRITON", switch)
        assert not product.on_kernel
    monkeypatch.setenv("TCNN_PROBE_TRITON", "1")
    assert product.on_kernel
    assert not GivenLogits(query).on_kernel
    monkeypatch.undo()
    assert not kernels.can_measure(query.cpu(), query.cpu())
    assert not kernels.can_measure(query.expand(1, 2, 3, 8), query.double())


@pytest.mark.study
def test_the_kernel_is_compared_once_with_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("cases are on the CPU; test_row_statistics.py runs the kernel here")
    attention, expected = case("plain", 5, 1)
    monkeypatch.setattr(trial, "_AGREED", {})
    monkeypatch.setattr(ProductLogits, "on_kernel", True)
    by_blocks = softmax_statistics._rows_by_blocks
    called = []

    def counted(*arguments: Any) -> Any:
        called.append(True)
        return by_blocks(*arguments)

    monkeypatch.setattr(softmax_statistics, "_rows_by_blocks", counted)
    for _ in range(2):
        check(replace(attention, shared={}), expected)
    assert called == [True]  # the kernel agreed
    statistics = ProductLogits.statistics

    def wrong(*arguments: Any) -> Any:
        rows = statistics(*arguments)
        return rows._replace(expected_logit=rows.expected_logit * 1.01)

    monkeypatch.setattr(trial, "_AGREED", {})
    monkeypatch.setattr(ProductLogits, "statistics", wrong)
    with pytest.warns(RuntimeWarning, match="result 0 differs by .*tcnn-probe info"):
        check(replace(attention, shared={}), expected)
    check(replace(attention, shared={}), expected)
    assert len(called) == 3
