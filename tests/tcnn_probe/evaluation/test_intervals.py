"""Confidence intervals against published formulas, and their coverage in simulations."""

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import xarray as xr
from scipy import optimize, stats

import tcnn_probe
from tcnn_probe import evaluation


def interval(
    values: np.ndarray, dims: tuple[str, ...] = ("image",), **options: float
) -> list[float]:
    labelled = xr.DataArray(values, dims=dims)
    return evaluation.mean_interval(labelled, dims, **options).values.tolist()


def test_labels_and_missing_values() -> None:
    random = np.random.default_rng(0)
    values = xr.DataArray(
        random.normal(3, 2, (2, 3, 97)),
        {"method": ["a", "b"]},
        ("method", "epoch", "image"),
        attrs={"units": "1"},
    )
    # Five values are known, or one, and an interval needs two.
    values[1, 2, 5:] = np.nan
    values[1, 1, 1:] = np.nan
    interval = evaluation.mean_interval(values, confidence=0.9)
    assert interval.dims == ("method", "epoch", "bound")
    assert interval.bound.values.tolist() == ["low", "high"]
    assert interval.attrs == {"units": "1"}
    expected = stats.ttest_1samp(values.values[1, 2, :5], 0).confidence_interval(0.9)
    np.testing.assert_allclose(interval[1, 2], expected)
    assert np.isnan(interval[1, 1]).all()
    first = values.transpose("image", ...)
    transposed = evaluation.mean_interval(first, "image", confidence=0.9)
    assert interval.identical(transposed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": "epoch"}, r"one of \('image',\), got 'epoch'"),
        ({"confidence": 95}, "between 0 and 1, got 95"),
        ({"dim": ()}, "got none"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation.mean_interval(xr.DataArray(np.ones(5), dims="image"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("right", [0, 5, 11])
def test_interval_of_a_proportion_contains_what_exact_tests_do_not_reject(
    right: int,
) -> None:
    low, high = interval(np.arange(11) < right)
    tails = {"greater": low, "less": high}
    for tail, p in tails.items():
        # At a bound, as many right answers or more (fewer) have a probability of 2.5 %.
        if 0 < p < 1:
            test = stats.binomtest(right, 11, p, alternative=tail)
            assert test.pvalue == pytest.approx(0.025)
    assert low <= right / 11 <= high
    # If none or all are right, one bound is exact.
    assert right > 0 or low == 0
    assert right < 11 or high == 1


@pytest.mark.parametrize(("up", "down"), [(0, 0), (2, 0), (4, 3)])
def test_interval_of_a_difference_of_paired_proportions(up: int, down: int) -> None:
    """The interval is that of Bonett and Price (2012)
    with two more discordant pairs, and with the t quantile.
    """
    count = 31
    values = np.repeat([1.0, -1.0, 0.0], [up, down, count - up - down])
    p = (up + 1) / (count + 2)
    q = (down + 1) / (count + 2)
    # They have n + 2; the 1 is subtracted because the variance is that of a sample.
    variance = p + q - (p - q) ** 2
    error = np.sqrt(variance / (count + 1))
    half = stats.t.ppf(0.975, count + 1) * error
    np.testing.assert_allclose(interval(values), [p - q - half, p - q + half])


@pytest.mark.parametrize("symmetric", [False, True])
def test_interval_is_corrected_for_skewness(symmetric: bool) -> None:
    """Hall (1992): the bound is the mean at which his cubic
    of W = (mean - mu) / s equals a t quantile over sqrt(n).
    """
    values = np.random.default_rng(2).exponential(size=13)
    if symmetric:
        # Joined with its mirror image about 1, the sample has no skewness, and the cubic is a line.
        values = np.concatenate([values, 2 - values])
    count = len(values)
    deviation = values.std(ddof=1)
    skewness = stats.skew(values)

    quantile = stats.t.ppf(0.975, count - 1) / np.sqrt(count)

    def beyond(mean: float, side: int) -> float:
        """Return by how much Hall's cubic exceeds the quantile on this side."""
        w = (values.mean() - mean) / deviation
        cubic = w + skewness * w**2 / 3 + skewness**2 * w**3 / 27
        bias = skewness / (6 * count)
        return cubic + bias - side * quantile

    # The mean is near 1, so that both roots are well inside.
    expected = [optimize.brentq(beyond, -9, 9, args=(side,)) for side in (1, -1)]
    np.testing.assert_allclose(interval(values), expected, rtol=1e-7)


def test_interval_over_two_crossed_dimensions() -> None:
    random = np.random.default_rng(1)
    of_seed = random.normal(0, 1, (3, 1))
    of_image = random.normal(0, 1, (1, 23))
    table = of_seed + of_image + random.normal(0, 0.3, (3, 23))
    # The variance of the mean has a part from each dimension.
    seeds = table.mean(1).var(ddof=1) / 3
    images = table.mean(0).var(ddof=1) / 23
    variance = seeds + images
    # Satterthwaite's degrees of freedom combine 2 of the seeds and 22 of the images.
    freedom = variance**2 / (seeds**2 / 2 + images**2 / 22)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    expected = [table.mean() - half, table.mean() + half]
    dims = ("seed", "image")
    np.testing.assert_allclose(interval(table, dims), expected)
    transposed = xr.DataArray(table, dims=dims).T
    actual = evaluation.mean_interval(transposed, dims)
    np.testing.assert_allclose(actual, expected)
    # With one seed, the interval is that of its images.
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
    # The mean is 0.5 / 2.5 = 0.2, and most of the mass is near 0.
    return random.beta(0.5, 2, count)


def of_seeds(random: np.random.Generator, count: int) -> np.ndarray:
    """Draw differences of two models in 3 trainings, where trainings and images vary."""
    shift = random.normal(0, 0.02, 3)[:, None]
    hard = random.beta(0.3, 3, count)
    # A model wins half of the images on which the models differ, and loses the others.
    up = np.clip(hard + shift, 0, 1) / 2
    down = np.clip(hard - shift, 0, 1) / 2
    draw = random.random((3, count))
    return (draw < up).astype(float) - (draw > 1 - down)


@pytest.mark.study
@pytest.mark.parametrize(
    ("draw", "count", "truth"),
    [
        *((proportion, count, 0.94) for count in (8, 32, 400)),
        *((few_discordant, count, 0.02) for count in (16, 200)),
        *((skewed, count, 0.2) for count in (16, 200)),
        *((exponential, count, 1.0) for count in (16, 48)),
        *((log_normal, count, 1.0) for count in (24, 48)),
        *((of_seeds, count, 0.0) for count in (32, 200)),
    ],
)
def test_intervals_have_their_nominal_coverage(
    draw: Callable[[np.random.Generator, int], np.ndarray], count: int, truth: float
) -> None:
    """Sizes are those of the studies. A percentile bootstrap covered 0.39 of the first case,
    and 0.84 of the second.
    """
    random = np.random.default_rng(count)
    dims = ("image",) if draw is not of_seeds else ("seed", "image")
    # A rate of 0.95 in 1,200 samples has a standard deviation of 0.006, and 0.93 is three of them
    # below.
    samples = np.stack([draw(random, count) for _ in range(1200)])
    values = xr.DataArray(samples, dims=("sample", *dims))
    low, high = evaluation.mean_interval(values, dims).values.T
    assert np.mean((low <= truth) & (truth <= high)) >= 0.93


def test_scipy_is_named_if_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install scipy$"):
        evaluation.mean_interval(xr.DataArray([0.5, 0.7, 0.2], dims="image"))
    answers = {"correct": ("image", [True, False]), "accuracy": 0.5, "images": 2}
    results = {
        f"{test}_{name}": value for test in ("clean", "variant") for name, value in answers.items()
    }
    ds = xr.Dataset(results, {"model": "cnn", "variant": "v2"})
    with pytest.raises(ModuleNotFoundError, match=r"pip install scipy$"):
        tcnn_probe.plot.generalization(ds)
