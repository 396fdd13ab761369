"""Bootstrap intervals for means over images, and over seeds and images."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xarray as xr

__all__ = ["bootstrap_interval", "resampled_means"]


def bootstrap_interval(
    values: xr.DataArray,
    dim: str | Sequence[str] = "image",
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> xr.DataArray:
    """Compute the percentile bootstrap interval of a mean along a dimension, or along several that cross.

    Several dimensions cross if, for example, each seed saw the same images: ("seed", "image"). Each is then resampled
    by itself, and a value counts as often as all of its labels are drawn (Owen 2007, The Pigeonhole Bootstrap). So the
    interval is wide if any of the dimensions matters. With very few labels, such as three seeds, it says little about
    other seeds.

    Args:
        values: Values to average, for example ``tcnn_probe.faithfulness(...).pointing_game``. NaNs are left out.
        dim: Dimension, or dimensions, to resample.
        confidence: Confidence level of the interval, between 0 and 1.
        resamples: Number of resamples.
        seed: Seed of the random generator.

    Returns:
        ``values`` without ``dim`` and with a dimension "bound": "low" and "high". NaN for fewer than two values.

    Raises:
        ValueError: A dimension does not exist, or the confidence is not between 0 and 1.
    """
    dims = [dim] if isinstance(dim, str) else list(dim)
    missing = [name for name in dims if name not in values.dims]
    if missing or not dims:
        got = repr(missing[0]) if missing else "none"
        raise ValueError(f"expected a dimension to resample, one of {values.dims}, got {got}")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence!r}")
    quantiles = [(1 - confidence) / 2, (1 + confidence) / 2]

    def interval(row: np.ndarray) -> np.ndarray:
        if np.count_nonzero(~np.isnan(row)) < 2:
            return np.full(2, np.nan)
        return np.nanquantile(resampled_means(row, resamples, seed), quantiles)

    bounds = xr.apply_ufunc(
        interval,
        values.astype(float).compute(),
        input_core_dims=[dims],
        output_core_dims=[["bound"]],
        vectorize=True,
        keep_attrs=True,
    )
    return bounds.assign_coords(bound=["low", "high"])


def resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Average ``values`` over resamples that draw each axis by itself, shape (resamples,). NaNs are left out."""
    # Labels without any value are not drawn: they would make every resample smaller than the sample.
    labels = [np.unique(index) for index in np.nonzero(~np.isnan(values))]
    values = values[np.ix_(*labels)]
    known = ~np.isnan(values)
    total, count = np.where(known, values, 0.0)[None], known.astype(float)[None]
    draw = _cached_counts if resamples * sum(values.shape) <= _LARGEST_CACHED else _draw_counts
    for weights in draw(values.shape[::-1], resamples, seed):
        total, count = _weighted_sum(total, weights), _weighted_sum(count, weights)
    with np.errstate(invalid="ignore"):  # 0 / 0, of a resample that drew missing values only
        return total / count


def _draw_counts(sizes: tuple[int, ...], resamples: int, seed: int) -> list[np.ndarray]:
    """Draw each axis with replacement; return how often its labels were drawn, (resamples, size)."""
    rng = np.random.default_rng(seed)
    return [rng.multinomial(size, np.full(size, 1 / size), resamples).astype(float) for size in sizes]


# Drawing takes most of the time, and tables ask for many intervals of arrays of one shape.
_cached_counts = lru_cache(maxsize=2)(_draw_counts)
_LARGEST_CACHED = 2**23  # numbers: 64 MiB for each of the two


def _weighted_sum(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum over the last axis with weights of each resample: (1 or R, ..., N) and (R, N) -> (R, ...)."""
    if len(values) == 1:  # the first axis to be drawn: one product of matrices, much faster than einsum
        return np.moveaxis(values[0] @ weights.T, -1, 0)
    return np.einsum("r...n,rn->r...", values, weights)
