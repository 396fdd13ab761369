"""Confidence intervals for the costs of removing heads."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import t as student

from common.head_removal import beyond_these_trainings, beyond_zero, mean_and_interval


def costs_of_trainings(random: np.random.Generator, trainings: int, between: float) -> xr.DataArray:
    """Return costs with true mean 0; trainings scatter by ``between``,
    images by 0.1, and single answers by 0.1.
    """
    values = random.normal(0, between, (trainings, 1, 1)) + random.normal(0, 0.1, (1, 2, 37))
    return xr.DataArray(
        values + random.normal(0, 0.1, (trainings, 2, 37)),
        dims=("training", "draw", "image"),
    )


def test_t_interval_by_hand() -> None:
    values = costs_of_trainings(np.random.default_rng(0), 3, 0.2)
    rows = values.values.mean((1, 2))
    columns = values.values.mean((0, 1))
    # Three trainings have two degrees of freedom; the 37 images add to the variance, but not to the
    # degrees of freedom.
    half = student.ppf(0.975, 2) * (rows.var(ddof=1) / 3 + columns.var(ddof=1) / 37) ** 0.5
    assert beyond_these_trainings(values) == pytest.approx((rows.mean() - half, rows.mean() + half))
    missing = values.copy()
    missing[1] = np.nan
    assert beyond_these_trainings(missing)[0] < missing.mean() < beyond_these_trainings(missing)[1]
    assert np.isnan(beyond_these_trainings(values[:1])).all()
    assert not beyond_zero(beyond_these_trainings(values[:1]))


def test_false_claims_about_other_trainings_are_rare() -> None:
    random = np.random.default_rng(1)
    claims = [
        beyond_zero(beyond_these_trainings(costs_of_trainings(random, 3, 0.2))) for _ in range(300)
    ]
    # The level is 5 %, and the rate over 300 draws has a standard deviation of 1.3 %; the seed is
    # fixed.
    assert sum(claims) <= 0.06 * 300


def test_interval_for_these_trainings_ignores_their_spread() -> None:
    # Trainings differ by 5, which an interval over images alone must not include.
    values = costs_of_trainings(np.random.default_rng(2), 3, 5.0)
    mean, low, high = mean_and_interval(values)
    assert mean == pytest.approx(float(values.mean()))
    assert low < mean < high
    # Images and single answers scatter by 0.1 each.
    assert high - low < 0.2
