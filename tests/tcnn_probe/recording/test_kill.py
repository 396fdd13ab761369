"""A recording killed at any moment keeps every epoch that it announced,
and the next recording continues from there.
"""

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.storage.soak import Child


def record_until_killed(path: Path, tell: Callable[[int], object]) -> None:
    model = nn.Sequential(GPSA(2, 3, 3, padding=1)).eval()
    with tcnn_probe.record(model, path) as recorder:
        for epoch in count():
            # The values identify their epoch.
            model[0].center.data.fill_(epoch)
            model(torch.randn(1, 2, 5, 7))
            recorder.mark(epoch=epoch, top1=epoch / 7)
            tell(epoch)


@pytest.mark.study
def test_killed_recording_keeps_announced_epochs(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    writer = Child(record_until_killed, path)
    announced = writer.numbers(3)
    # A few more marks pass, so that the kill falls anywhere in a mark.
    time.sleep(0.05)
    announced += writer.end(kill=True)
    model = nn.Sequential(GPSA(2, 3, 3, padding=1)).eval()
    with tcnn_probe.record(model, path) as recorder:
        marks = len(recorder.epochs)
        # An epoch may be stored although its writer was killed before announcing it.
        assert marks - len(announced) in (0, 1)
        model[0].center.data.fill_(marks)
        model(torch.randn(1, 2, 5, 7))
        recorder.mark(epoch=marks, top1=marks / 7)
    ds = xr.open_zarr(path)
    np.testing.assert_array_equal(ds.epoch, np.arange(marks + 1))
    np.testing.assert_array_equal(ds.top1, ds.epoch / 7)
    np.testing.assert_array_equal(
        ds.center_y, np.broadcast_to(ds.epoch.values[:, None, None], ds.gate.shape)
    )
    assert np.isfinite(ds.entropy).all()
