"""Bootstrap intervals against resampling by a plain loop."""

import numpy as np
import pytest
import xarray as xr

from tcnn_probe import evaluation
from tcnn_probe.evaluation.bootstrap import resampled_means


def test_bootstrap_interval() -> None:
    random = np.random.default_rng(0)
    values = xr.DataArray(
        random.normal(3, 2, (2, 3, 97)), {"method": ["a", "b"]}, ("method", "epoch", "image"), attrs={"units": "1"}
    )
    values[1, 2, 5:] = np.nan
    values[1, 1, 1:] = np.nan
    found = evaluation.bootstrap_interval(values, confidence=0.9, seed=4)
    assert found.dims == ("method", "epoch", "bound")
    assert found.bound.values.tolist() == ["low", "high"]
    assert found.attrs == {"units": "1"}
    row = values.values[0, 1]
    means = np.sort([random.choice(row, 97).mean() for _ in range(5_000)])
    np.testing.assert_allclose(found[0, 1], means[[250, 4_750]], atol=0.05)
    few = np.sort([random.choice(values.values[1, 2, :5], 5).mean() for _ in range(5_000)])
    np.testing.assert_allclose(found[1, 2], few[[250, 4_750]], atol=0.15)
    assert np.isnan(found[1, 1]).all()
    assert found.identical(evaluation.bootstrap_interval(values, confidence=0.9, seed=4))
    turned = evaluation.bootstrap_interval(values.transpose("image", ...), "image", confidence=0.9, seed=4)
    assert found.identical(turned)
    assert not np.isnan(found.sel({"method": "a"})).any()
    constant = evaluation.bootstrap_interval(xr.DataArray(np.ones(5), dims="image"))
    assert constant.values.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": "epoch"}, r"one of \('image',\), got 'epoch'"),
        ({"confidence": 95}, "between 0 and 1, got 95"),
        ({"dim": ()}, "got none"),
    ],
)
def test_bootstrap_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation.bootstrap_interval(xr.DataArray(np.ones(5), dims="image"), **options)  # type: ignore[arg-type]


def crossed(values: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Rows and columns drawn by themselves, one after the other, and the mean of the table that this gives."""
    rows, columns = values.shape
    drawn = [
        np.nanmean(values[random.integers(0, rows, rows)][:, random.integers(0, columns, columns)])
        for _ in range(count)
    ]
    return np.sort(drawn)


def test_of_two_dimensions_that_cross() -> None:
    random = np.random.default_rng(1)
    table = random.normal(0, 1, (5, 1)) + random.normal(0, 1, (1, 23)) + random.normal(0, 0.3, (5, 23))
    table[2, 3] = np.nan
    values = xr.DataArray(table, dims=("seed", "image"))
    by_loop = crossed(table, 3000, random)
    found = evaluation.bootstrap_interval(values, ("seed", "image"), resamples=6000)
    np.testing.assert_allclose(found, by_loop[[75, 2925]], atol=0.08)
    assert np.diff(found) > 1.5 * np.diff(evaluation.bootstrap_interval(values.mean("seed"), "image"))
    turned = evaluation.bootstrap_interval(values.T, ("seed", "image"), resamples=6000)
    assert found.identical(turned)


def test_what_has_no_value_is_not_drawn() -> None:
    values = np.full((4, 7), np.nan)
    values[1:3, 2:5] = np.arange(6).reshape(2, 3)
    without = resampled_means(values[1:3, 2:5], 50, seed=3)
    np.testing.assert_array_equal(resampled_means(values, 50, seed=3), without)
    assert without.std() > 0.1


def test_dimensions_of_one_length_are_drawn_apart() -> None:
    values = np.arange(11.0)[:, None] - np.arange(11.0)  # 0 on the diagonal, and on average if both are drawn alike
    assert resampled_means(values, 200, seed=0).std() > 0.5
