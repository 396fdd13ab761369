"""Intervals against formulas of the literature written out, and how often they cover in simulations."""

from collections.abc import Callable

import numpy as np
import pytest
import xarray as xr
from scipy import optimize, stats

from tcnn_probe import evaluation


def interval(
    values: np.ndarray, dims: tuple[str, ...] = ("image",), **options: float
) -> list[float]:
    return evaluation.mean_interval(
        xr.DataArray(values, dims=dims), dims, **options
    ).values.tolist()


def test_labels_and_what_is_left_out() -> None:
    random = np.random.default_rng(0)
    values = xr.DataArray(
        random.normal(3, 2, (2, 3, 97)),
        {"method": ["a", "b"]},
        ("method", "epoch", "image"),
        attrs={"units": "1"},
    )
    # Five values that are known, and one: an interval needs two.
    values[1, 2, 5:] = np.nan
    values[1, 1, 1:] = np.nan
    interval = evaluation.mean_interval(values, confidence=0.9)
    assert interval.dims == ("method", "epoch", "bound")
    assert interval.bound.values.tolist() == ["low", "high"]
    assert interval.attrs == {"units": "1"}
    expected = stats.ttest_1samp(values.values[1, 2, :5], 0).confidence_interval(0.9)
    np.testing.assert_allclose(interval[1, 2], expected)
    assert np.isnan(interval[1, 1]).all()
    assert interval.identical(
        evaluation.mean_interval(
            values.transpose("image", ...), "image", confidence=0.9
        )
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": "epoch"}, r"one of \('image',\), got 'epoch'"),
        ({"confidence": 95}, "between 0 and 1, got 95"),
        ({"dim": ()}, "got none"),
    ],
)
def test_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation.mean_interval(xr.DataArray(np.ones(5), dims="image"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("right", [0, 5, 11])
def test_a_proportion_holds_what_exact_tests_do_not_refuse(right: int) -> None:
    low, high = interval(np.arange(11) < right)
    tails = {"greater": low, "less": high}
    for tail, p in tails.items():
        # At the bound, as many or more (fewer) right answers have a chance of 2.5 %.
        if 0 < p < 1:
            test = stats.binomtest(right, 11, p, alternative=tail)
            assert test.pvalue == pytest.approx(0.025)
    assert low <= right / 11 <= high
    # Where none are right, or all, one bound is exact.
    assert right > 0 or low == 0
    assert right < 11 or high == 1


@pytest.mark.parametrize(("up", "down"), [(0, 0), (2, 0), (4, 3)])
def test_a_difference_of_paired_proportions(up: int, down: int) -> None:
    """Bonett and Price 2012, their equation for two more discordant pairs, with the t quantile."""
    count = 31
    values = np.repeat([1.0, -1.0, 0.0], [up, down, count - up - down])
    p = (up + 1) / (count + 2)
    q = (down + 1) / (count + 2)
    # Their n + 2, less 1 as the variance is a sample's.
    error = np.sqrt((p + q - (p - q) ** 2) / (count + 1))
    half = stats.t.ppf(0.975, count + 1) * error
    np.testing.assert_allclose(interval(values), [p - q - half, p - q + half])


@pytest.mark.parametrize("symmetric", [False, True])
def test_skewness_is_removed(symmetric: bool) -> None:
    """Hall 1992: the mean where his cubic of W = (mean - mu) / s equals a quantile of t over the root of n."""
    values = np.random.default_rng(2).exponential(size=13)
    if symmetric:
        # With its mirror image about 1 the skewness is zero, and the cubic a line.
        values = np.concatenate([values, 2 - values])
    count = len(values)
    deviation = values.std(ddof=1)
    skewness = stats.skew(values)

    quantile = stats.t.ppf(0.975, count - 1) / np.sqrt(count)

    def beyond(mean: float, side: int) -> float:
        """Return by how much Hall's cubic exceeds the quantile of this side."""
        w = (values.mean() - mean) / deviation
        cubic = w + skewness * w**2 / 3 + skewness**2 * w**3 / 27
        return cubic + skewness / (6 * count) - side * quantile

    # The values have a mean near 1: both roots are far inside.
    expected = [optimize.brentq(beyond, -9, 9, args=(side,)) for side in (1, -1)]
    np.testing.assert_allclose(interval(values), expected, rtol=1e-7)


def test_of_dimensions_that_cross() -> None:
    random = np.random.default_rng(1)
    table = (
        random.normal(0, 1, (3, 1))
        + random.normal(0, 1, (1, 23))
        + random.normal(0, 0.3, (3, 23))
    )
    parts = [table.mean(1).var(ddof=1) / 3, table.mean(0).var(ddof=1) / 23]
    # Satterthwaite's degrees of freedom, from 2 of the seeds and 22 of the images.
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 22)
    half = stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    dims = ("seed", "image")
    np.testing.assert_allclose(
        interval(table, dims), [table.mean() - half, table.mean() + half]
    )
    values = xr.DataArray(table, dims=dims)
    np.testing.assert_allclose(
        evaluation.mean_interval(values.T, dims), interval(table, dims)
    )
    # One seed, as it is.
    np.testing.assert_allclose(interval(table[:1], dims), interval(table[0]))


def proportion(random: np.random.Generator, count: int) -> np.ndarray:
    return random.random(count) < 0.94


def few_discordant(random: np.random.Generator, count: int) -> np.ndarray:
    return random.choice([1.0, 0.0, -1.0], count, p=[0.04, 0.94, 0.02])


def exponential(random: np.random.Generator, count: int) -> np.ndarray:
    return random.exponential(size=count)


def log_normal(random: np.random.Generator, count: int) -> np.ndarray:
    # exp(sigma^2 / 2) is the mean.
    return random.lognormal(0, 0.6, count) / np.exp(0.6**2 / 2)


def skewed(random: np.random.Generator, count: int) -> np.ndarray:
    # A mean of 0.5 / 2.5 = 0.2, with most of the mass near 0.
    return random.beta(0.5, 2, count)


def of_seeds(random: np.random.Generator, count: int) -> np.ndarray:
    """Differences of two models in 3 trainings: these differ, and so do images."""
    shift = random.normal(0, 0.02, 3)[:, None]
    hard = random.beta(0.3, 3, count)
    up, down = (np.clip(hard + sign * shift, 0, 1) / 2 for sign in (1, -1))
    draw = random.random((3, count))
    return (draw < up).astype(float) - (draw > 1 - down)


@pytest.mark.parametrize(
    ("draw", "count", "truth"),
    [
        *((proportion, count, 0.94) for count in (8, 32, 400)),
        *((few_discordant, count, 0.02) for count in (16, 32, 200)),
        *((skewed, count, 0.2) for count in (16, 64, 200)),
        *((exponential, count, 1.0) for count in (16, 48)),
        *((log_normal, count, 1.0) for count in (24, 48)),
        *((of_seeds, count, 0.0) for count in (32, 200)),
    ],
)
def test_intervals_cover(
    draw: Callable[[np.random.Generator, int], np.ndarray], count: int, truth: float
) -> None:
    """At the sizes that the studies have. A percentile bootstrap covered 0.39 of the first, of the second 0.84."""
    random = np.random.default_rng(count)
    dims = ("image",) if draw is not of_seeds else ("seed", "image")
    # A share of 0.95 in 1,200 samples scatters by 0.006: 0.93 is three of that below.
    samples = np.stack([draw(random, count) for _ in range(1200)])
    values = xr.DataArray(samples, dims=("sample", *dims))
    low, high = evaluation.mean_interval(values, dims).values.T
    assert np.mean((low <= truth) & (truth <= high)) >= 0.93
