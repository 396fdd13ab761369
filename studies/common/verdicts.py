"""Verdicts that intervals and numbers of right answers support, over images, or over trainings and
images together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import stats
from scipy.stats import binomtest

from tcnn_probe.evaluation import crossed_error, mean_interval

__all__ = [
    "Effect",
    "all_learned",
    "compared",
    "crossed_effect",
    "difference",
    "difference_lines",
    "holm",
    "learned",
    "seeds_to_decide",
    "side_of_zero",
    "verdict",
    "with_interval",
]


def with_interval(values: xr.DataArray, dim: str | Sequence[str] = "image", digits: int = 3) -> str:
    """Return the mean over a sample with its 95 % interval, as text."""
    mean, *bounds = (
        f"{float(x):+.{digits}f}" for x in (values.mean(), *mean_interval(values, dim).values)
    )
    return f"{mean} [{', '.join(bounds)}]"


def compared(values: xr.DataArray, dim: str | Sequence[str], above: str, below: str) -> str:
    """Return the mean of differences with its interval, and the word for the interval's side."""
    words = side_of_zero(mean_interval(values, dim).values, above, below)
    return f"{with_interval(values, dim)} {words}"


def difference(values: xr.DataArray, first: str, second: str, dim: str = "arm") -> xr.DataArray:
    """Return the values of one label of a dimension less those of another."""
    return values.sel({dim: first}) - values.sel({dim: second})


def difference_lines(differences: Mapping[str, xr.DataArray], width: int = 48) -> list[str]:
    """Return a line for each difference by seed, with its interval over seeds and a verdict."""
    return [
        f"{name:{width}}{compared(values, 'seed', 'above zero', 'BELOW zero')}"
        for name, values in differences.items()
    ]


def side_of_zero(
    interval: Iterable[float], above: str, below: str, neither: str = "undecided"
) -> str:
    """Return the word for an interval that lies above zero, lies below it, or contains it."""
    low, high = interval
    if low > 0:
        return above
    return below if high < 0 else neither


def learned(model: str, accuracy: float, images: int, chance: float) -> bool:
    """Return whether accuracy is above chance (one-sided binomial test, 1 %);
    print a line if it is not.

    Args:
        model: Name of the model.
        accuracy: Accuracy on the images.
        images: Number of images.
        chance: Accuracy of always naming the most frequent class.
    """
    if binomtest(round(accuracy * images), images, chance, alternative="greater").pvalue < 0.01:
        return True
    print(
        f"check: {model} did NOT learn: accuracy {accuracy:.3f} on {images} images is not "
        f"significantly above the {chance:.3f} of always naming the most frequent class"
    )
    return False


def all_learned(accuracies: Iterable[tuple[str, Any]], images: int, chance: float) -> bool:
    """Return whether all models, given by name and accuracy, beat chance;
    print a line for each that does not.
    """
    verdicts = [learned(str(name), float(top1), images, chance) for name, top1 in accuracies]
    return all(verdicts)


@dataclass(frozen=True)
class Effect:
    """Mean over seeds and images, with its interval and variances.

    Attributes:
        mean: Mean over all seeds and images.
        low, high: Bounds of the interval.
        p_value: P-value of a mean of zero, two-sided.
        seed_variance: Sample variance of the means by seed; NaN for one seed.
        image_variance: Sample variance of the means by image.
        seeds, images: Numbers of seeds and images.
    """

    mean: float
    low: float
    high: float
    p_value: float
    seed_variance: float
    image_variance: float
    seeds: int
    images: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def crossed_effect(values: NDArray[np.floating], level: float = 0.95) -> Effect:
    """Estimate the mean of values that belong to a seed and an image each.

    Both seeds and images are samples: other trainings on the same images, or the same trainings on
    other images, would give other values. The interval is that of
    :func:`tcnn_probe.evaluation.mean_interval` (without the two images that it adds for paired
    proportions), with a p-value and with what :func:`seeds_to_decide` needs.

    Args:
        values: Values of shape (seeds, images), such as the difference between two models in being
            right.
        level: Level of the interval.

    Returns:
        Effect; its interval is unbounded if there is one seed.
    """
    count, images = values.shape
    mean = float(values.mean())
    by_seed, by_image = values.mean(1), values.mean(0)
    seed_variance = float(by_seed.var(ddof=1)) if count > 1 else np.nan
    image_variance = float(by_image.var(ddof=1))
    if count < 2:
        return Effect(mean, -np.inf, np.inf, 1.0, seed_variance, image_variance, count, images)
    error, freedom = crossed_error([seed_variance, image_variance], [count, images])
    half = stats.t.ppf((1 + level) / 2, freedom) * error if error else 0.0
    p_value = float(2 * stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Effect(
        mean,
        mean - half,
        mean + half,
        p_value,
        seed_variance,
        image_variance,
        count,
        images,
    )


def holm(p_values: Sequence[float]) -> NDArray[np.floating]:
    """Return p-values adjusted for their number (Holm 1979), in the same order."""
    p = np.asarray(p_values, float)
    # The smallest p-value is multiplied by their number, the next by one less, and none falls below
    # the one before.
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1)
    return adjusted


def verdict(effect: Effect, margin: float, p_value: float | None = None) -> str:
    """Return "yes", "yes, by less than the margin",
    "no" or "undecided" on whether there is a positive effect.

    Args:
        effect: Effect with a 95 % interval.
        margin: Margin of equivalence: smaller effects are of no interest.
        p_value: P-value adjusted for the number of tests; None for the effect's own.

    Returns:
        "yes" if the effect is significantly above 0, "yes, by less than ..." if its interval also
        lies below the margin; "no" if the interval lies below the margin without that; else
        "undecided".
    """
    adjusted = effect.p_value if p_value is None else p_value
    is_positive = effect.low > 0 and adjusted < 0.05
    if effect.high < margin:
        return f"yes, by less than {margin:g}" if is_positive else "no"
    return "yes" if is_positive else "undecided"


def seeds_to_decide(effect: Effect, margin: float, max_seeds: int = 1000) -> int | None:
    """Return the number of seeds with which this mean and these variances would be decided.

    Returns:
        Number of seeds; None for an effect of one seed, or if ``max_seeds`` would not decide on the
        same images.
    """
    # One seed gives no variance over seeds.
    if effect.seeds < 2:
        return None
    variances = effect.seed_variance, effect.image_variance
    for seeds in range(effect.seeds, max_seeds + 1):
        error, freedom = crossed_error(variances, [seeds, effect.images])
        half = stats.t.ppf(0.975, freedom) * error
        if effect.mean - half > 0 or effect.mean + half < margin:
            return seeds
    return None
