"""Costs to first order against exact ones."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import spearmanr

import tcnn_probe


def costs(seed: int, sign: float = 0) -> xr.DataArray:
    values = np.random.default_rng(seed).lognormal(size=(2, 3, 5, 11)) - sign
    values[1, 2] = np.nan
    dims = ("mode", "layer", "head", "image")
    coords = {"mode": ["static", "zero"], "layer": ["a", "b", "c"], "head": range(5)}
    return xr.DataArray(values, coords, dims, attrs={"long_name": "change"})


@pytest.mark.parametrize("sign", [0, 1])
def test_points_are_means_over_images(sign: float) -> None:
    estimate, exact = costs(0, sign), costs(1, sign)
    axes = tcnn_probe.plot.head_costs(estimate, exact)
    assert axes.get_xscale() == ("linear" if sign else "log")
    for bars, mode in zip(axes.containers, ("static", "zero"), strict=True):
        x, y = bars.lines[0].get_data()
        first, second = (
            array.sel(mode=mode).mean("image").values.ravel() for array in (estimate, exact)
        )
        known = np.isfinite(first)
        np.testing.assert_array_equal(x, second[known])
        np.testing.assert_array_equal(y, first[known])
        correlation = spearmanr(first[known], second[known]).statistic
        assert bars.get_label() == f"{mode} ({correlation:.2f})"
    with pytest.raises(ValueError, match="got none"):
        tcnn_probe.plot.head_costs(estimate, exact.assign_coords(layer=[*"xyz"]))
    with pytest.raises(TypeError, match="estimate as an xarray"):
        tcnn_probe.plot.head_costs(3, exact)
