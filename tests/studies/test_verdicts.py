"""Lines of differences claim what their intervals over seeds support."""

import numpy as np
import xarray as xr

from common.verdicts import difference, difference_lines


def test_lines_of_differences_follow_the_intervals() -> None:
    rows = [[0.3] * 3, 0.1 + 0.01 * np.array([-1.0, 0.0, 1.0]), [0.28, 0.3, 0.32]]
    values = xr.DataArray(rows, {"arm": ["a", "b", "c"]}, ("arm", "seed"))
    pairs = {"a less b": "ab", "b less a": "ba", "c less a": "ca"}
    lines = difference_lines({name: difference(values, *pair) for name, pair in pairs.items()}, 10)
    # 4.303, the quantile of t with 2 degrees of freedom, times 0.01 / sqrt(3), and twice as much.
    assert lines == [
        "a less b  +0.200 [+0.175, +0.225] above zero",
        "b less a  -0.200 [-0.225, -0.175] BELOW zero",
        "c less a  +0.000 [-0.050, +0.050] undecided",
    ]
