"""Whether methods agree, and how sure a mean over images is."""

from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

__all__ = ["bootstrap_interval", "rank_correlation"]


def rank_correlation(maps: Tensor, others: Tensor) -> Tensor:
    """Spearman's correlation between two maps of each image, over pixels, equal values sharing their mean rank.

    Of the values with their sign, as they are. (Adebayo et al. 2018, Sanity Checks for Saliency Maps, §4.)

    Args:
        maps, others: shape (B, H, W).

    Returns:
        shape (B,), -1 to 1, float64; NaN where one of the two is constant or has a NaN.
    """
    from scipy.stats import rankdata

    ranks = []
    for given in (maps, others):
        values = given.flatten(1).double().cpu().numpy()
        rank = torch.from_numpy(rankdata(values, axis=1, nan_policy="propagate"))
        ranks.append(rank - rank.mean(1, keepdim=True))
    one, other = ranks
    return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))


def bootstrap_interval(
    values: xr.DataArray, dim: str = "image", *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> xr.DataArray:
    """Percentile bootstrap interval for the mean along a dimension, by scipy's ``bootstrap``.

    Args:
        values: for example ``tcnn_probe.faithfulness(...).pointing_game``; NaNs are left out.
        dim: what is resampled.
        confidence: of the interval.
        resamples: how often.
        seed: the same one gives the same interval.

    Returns:
        ``values`` without ``dim`` and with a dimension "bound": "low" and "high". NaN for fewer than two values.

    Raises:
        ValueError: no such dimension, or a confidence that is none.
    """
    if dim not in values.dims:
        raise ValueError(f"expected a dimension to resample, one of {values.dims}, got {dim!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence!r}")

    def interval(row: np.ndarray) -> np.ndarray:
        return _interval(row[~np.isnan(row)], confidence, resamples, seed)

    found = xr.apply_ufunc(
        interval, values, input_core_dims=[[dim]], output_core_dims=[["bound"]], vectorize=True, keep_attrs=True
    )
    return found.assign_coords(bound=["low", "high"])


def _interval(row: np.ndarray, confidence: float, resamples: int, seed: int) -> np.ndarray:
    from scipy.stats import bootstrap

    if len(row) < 2:
        return np.full(2, np.nan)
    options: dict[str, Any] = {"confidence_level": confidence, "n_resamples": resamples, "method": "percentile"}
    low, high = bootstrap((row,), np.mean, rng=np.random.default_rng(seed), **options).confidence_interval
    return np.array([low, high])
