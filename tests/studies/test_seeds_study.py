"""Rank correlations of seeds by hand, and the check that ends the study."""

import math
from typing import Any

import numpy as np
import pytest
import xarray as xr

import seeds


def by_hand(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Return Spearman's correlation as Pearson's correlation of mid-ranks,
    with Fisher's z interval.
    """

    def ranks(values: list[float]) -> list[float]:
        return [sum(v < u for v in values) + (sum(v == u for v in values) + 1) / 2 for u in values]

    n = len(x)
    a = np.array(ranks(x)) - (n + 1) / 2
    b = np.array(ranks(y)) - (n + 1) / 2
    rho = a @ b / math.sqrt((a @ a) * (b @ b))
    # The variance of Fisher's z for ranks is (1 + rho^2 / 2) / (n - 3) (Bonett and Wright, 2000).
    z = math.log((1 + rho) / (1 - rho)) / 2
    half = 1.959963984540054 * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return rho, math.tanh(z - half), math.tanh(z + half)


def test_rank_correlation_with_ties() -> None:
    rng = np.random.default_rng(0)
    # Twenty integers below nine must have ties.
    x = rng.integers(0, 9, 20).astype(float)
    y = x + rng.integers(0, 9, 20)
    assert seeds.rank_correlation(x, y) == pytest.approx(by_hand(x.tolist(), y.tolist()), rel=1e-12)
    # Three pairs leave n - 3 = 0 degrees of freedom, and a constant has no ranks.
    assert all(math.isnan(number) for number in seeds.rank_correlation(x[:3], y[:3]))
    assert all(math.isnan(number) for number in seeds.rank_correlation(x, np.ones(20)))


def results(last_gate: float = 0.2, top1: float = 0.8) -> tuple[xr.Dataset, float]:
    """Return five seeds, which are T-CNNs from epoch 3 on;
    at epoch 0 the accuracies rank the seeds in reverse.
    """
    accuracies = np.empty((5, 5))
    accuracies[:] = top1 + 0.01 * np.arange(5)[:, None]
    accuracies[:, 0] = accuracies[::-1, 0]
    gate = np.full((5, 5, 2, 3), np.nan)
    gate[:, 3:] = 0.9
    gate[:, 4, 1] = last_gate
    correct = np.zeros((5, 8))
    correct[np.arange(5), 2 * np.minimum(np.arange(5), 3)] = 1.0
    dims = ("seed", "epoch", "layer", "head")
    ds = xr.Dataset(
        {
            "top1": (dims[:2], accuracies),
            "gate": (dims, gate),
            "content_information": (dims, gate / 9),
            "head_type": (
                dims,
                np.where(gate > 0.5, "convolutional", "content").astype(object),
            ),
            "correct": (("seed", "image"), correct),
        },
        {"layer": ["a", "b"], "epoch": range(5)},
    )
    return ds, 0.1


def test_epochs_are_compared_with_the_last_by_their_ranking_of_seeds() -> None:
    ds, _ = results()
    correlations = seeds.by_epoch(ds)
    assert [round(correlations[epoch][0], 6) for epoch in range(4)] == [-1, 1, 1, 1]
    assert seeds.converted(ds) == 3
    even, odd = seeds.halves(ds)
    assert even.tolist() == [0.25] * 5
    assert odd.tolist() == [0.0] * 5
    text = seeds.table(ds)
    assert "the deeper the layer, the lower its mean gate, in 5 of 5 seeds" in text
    assert "1.00 of the heads have the type that they have with the first seed" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "mean gate ends above the last one's: 0.90, 0.20"),
        ({"last_gate": 0.95}, "mean gate ends NOT above"),
        ({"top1": 0.05}, "the median T-CNN did NOT learn"),
    ],
)
def test_the_check_can_fail(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ds, chance = results(**changes)
    # The test of accuracy needs more images than the eight that have answers here.
    assert seeds.check(ds.isel(image=[0] * 99), chance) == (not changes)
    assert message in capsys.readouterr().out
