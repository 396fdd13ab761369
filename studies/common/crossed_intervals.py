"""Intervals over trainings and images together, and the verdict that they allow."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["Effect", "crossed_effect", "holm", "seeds_to_decide", "verdict"]


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
    other images, would give other values. The variance of the mean is estimated as ``s_seeds^2 / S
    + s_images^2 / N`` with the sample variances of the means by seed and by image. It counts the
    interaction of the two twice and is never too small on average (Owen 2007, The pigeonhole
    bootstrap, Sec. 3). Degrees of freedom are Satterthwaite's (1946).

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
    error, freedom = _error(seed_variance, image_variance, count, images)
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
    for seeds in range(effect.seeds, max_seeds + 1):
        error, freedom = _error(effect.seed_variance, effect.image_variance, seeds, effect.images)
        half = stats.t.ppf(0.975, freedom) * error
        if effect.mean - half > 0 or effect.mean + half < margin:
            return seeds
    return None


def _error(
    seed_variance: float, image_variance: float, seeds: int, images: int
) -> tuple[float, float]:
    """Return the standard error of the mean, and its degrees of freedom."""
    # Satterthwaite: a sum of two variances, each with its own degrees of freedom.
    parts = np.array([seed_variance / seeds, image_variance / images])
    freedoms = np.array([seeds - 1, images - 1])
    total = parts.sum()
    # The formula for the degrees of freedom divides by zero if all values are equal.
    if total == 0:
        return 0.0, float(seeds - 1)
    return float(np.sqrt(total)), float(total**2 / (parts**2 / freedoms).sum())
