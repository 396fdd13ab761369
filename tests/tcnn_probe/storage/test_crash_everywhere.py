"""A recording that fails before the commit of an epoch leaves the epochs before it, and can be continued.

Crashes at every write are in test_store_crash.py, kills proper in test_kill.py and test_kill_recording.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import tcnn_probe
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.storage.crashes import Crash, crash_when

IMAGES = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("again", [True, False], ids=["same recorder", "new recorder"])
def test_crash_before_the_commit(tmp_path: Path, again: bool) -> None:
    model, path = Chain(), tmp_path / "run.zarr"
    recorder = tcnn_probe.record(model, path)
    for epoch in range(3):
        model((epoch + 1) * IMAGES)
        recorder.mark(epoch=epoch, top1=epoch)
    expected = recorder.dataset.load()
    model(7 * IMAGES)
    with crash_when(lambda number, key: key == "zarr.json"), pytest.raises(Crash):
        recorder.mark(epoch=3, top1=9.0, fresh=0.5)
    assert recorder.epochs == (0, 1, 2)
    xr.testing.assert_identical(recorder.dataset, expected)
    xr.testing.assert_identical(xr.open_zarr(path), expected)

    if not again:
        recorder.remove()
        recorder = tcnn_probe.record(model, path)
        model(7 * IMAGES)
    recorder.mark(epoch=3, top1=3, fresh=1.5)  # what was seen before the crash still counts, once
    ds = recorder.dataset
    xr.testing.assert_identical(ds.isel(epoch=slice(3)).drop_vars("fresh"), expected)
    np.testing.assert_array_equal(ds.top1, [0, 1, 2, 3])
    np.testing.assert_array_equal(ds.fresh, [np.nan, np.nan, np.nan, 1.5])
    np.testing.assert_array_equal(ds.images[3], [2, 2])
    with tcnn_probe.record(model) as other:
        model(7 * IMAGES)
        other.mark(epoch=3)
    np.testing.assert_array_equal(ds.entropy[3], other.dataset.entropy[0])
