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
    """Percentile bootstrap interval for the mean along a dimension, or along several that cross.

    Several dimensions cross if, for example, each seed saw the same images: ("seed", "image"). Each is then resampled
    by itself, and a value counts as often as all of its labels are drawn (Owen 2007, The Pigeonhole Bootstrap). So the
    interval is wide if any of the dimensions matters. With very few labels, such as three seeds, it says little about
    other seeds.

    Args:
        values: for example ``tcnn_probe.faithfulness(...).pointing_game``; NaNs are left out.
        dim: the dimension, or dimensions, to resample.
        confidence: of the interval, between 0 and 1.
        resamples: number of resamples.
        seed: of the random generator.

    Returns:
        ``values`` without ``dim`` and with a dimension "bound": "low" and "high". NaN for fewer than two values.

    Raises:
        ValueError: no such dimension, or a confidence that is not between 0 and 1.
    """
    dims = [dim] if isinstance(dim, str) else list(dim)
    for name in dims:
        if name not in values.dims:
            raise ValueError(f"expected a dimension to resample, one of {values.dims}, got {name!r}")
    if not dims:
        raise ValueError("expected a dimension to resample, got none")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence!r}")
    quantiles = [(1 - confidence) / 2, (1 + confidence) / 2]

    def interval(row: np.ndarray) -> np.ndarray:
        if np.count_nonzero(~np.isnan(row)) < 2:
            return np.full(2, np.nan)
        return np.nanquantile(resampled_means(row, resamples, seed), quantiles)

    found = xr.apply_ufunc(
        interval, values.astype(float).compute(), input_core_dims=[dims], output_core_dims=[["bound"]], vectorize=True,
        keep_attrs=True,
    )  # fmt: skip
    return found.assign_coords(bound=["low", "high"])


def resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means of ``values`` with each axis resampled by itself, shape (resamples,), NaNs left out."""
    there = ~np.isnan(values)
    for axis in range(values.ndim):  # labels without any value are not drawn
        others = tuple(other for other in range(values.ndim) if other != axis)
        some = np.flatnonzero(there.any(others))
        values, there = values.take(some, axis), there.take(some, axis)
    total, count = np.where(there, values, 0.0)[None], there.astype(float)[None]
    draw = _kept_draws if resamples * sum(values.shape) <= _MOST_KEPT else _draws
    for drawn in draw(values.shape[::-1], resamples, seed):
        total, count = (_weighted(x, drawn) for x in (total, count))
    with np.errstate(invalid="ignore"):
        return total / count


def _draws(sizes: tuple[int, ...], resamples: int, seed: int) -> list[np.ndarray]:
    """How often each label of each axis is drawn, (resamples, size)."""
    rng = np.random.default_rng(seed)
    return [rng.multinomial(size, np.full(size, 1 / size), resamples).astype(float) for size in sizes]


_kept_draws = lru_cache(maxsize=2)(_draws)
"""Drawing takes most of the time, and tables ask for many intervals of arrays of one shape."""
_MOST_KEPT = 2**23


def _weighted(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum over the last axis: (1 or R, ..., N) and (R, N) -> (R, ...)."""
    if len(values) == 1:
        return np.moveaxis(values[0] @ weights.T, -1, 0)
    return np.einsum("r...n,rn->r...", values, weights)
