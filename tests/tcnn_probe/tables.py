"""Epochs for EpochStore whose every value follows from the epoch's number."""

import numpy as np
import xarray as xr

__all__ = ["LAYERS", "VARIABLES", "assert_epochs", "values"]

LAYERS = {"a.conv": {"kind": "gpsa", "heads": 5}, "b.conv": {"kind": "gpsa", "heads": 3}}
VARIABLES = ["gate", "entropy", "images"]


def values(epoch: int) -> dict[str, np.ndarray]:
    """Of each variable: distinct in every epoch, layer and head, and NaN beyond a layer's heads."""
    heads = 1000.0 * epoch + 10 * np.arange(2)[:, None] + np.arange(5)
    heads[1, 3:] = np.nan
    return {"gate": heads, "entropy": -heads, "images": heads[:, 0] + 0.5}


def assert_epochs(ds: xr.Dataset, epochs: list[int]) -> None:
    """The dataset holds these epochs, with their values, and nothing else."""
    assert ds.epoch.values.tolist() == epochs
    assert ds.layer.values.tolist() == list(LAYERS)
    assert ds["head"].values.tolist() == [0, 1, 2, 3, 4]
    for name in VARIABLES:
        expected = np.stack([values(epoch)[name] for epoch in epochs]) if epochs else np.empty((0, *ds[name].shape[1:]))
        np.testing.assert_array_equal(ds[name].values, expected)
