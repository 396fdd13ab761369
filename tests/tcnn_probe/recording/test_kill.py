"""A recording killed at any moment leaves every epoch that it announced, and the next one goes on from there."""

from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.storage.kills import run_and_kill

RECORDING = """
import sys
import torch
torch.set_num_threads(1)
import tcnn_probe
from tcnn_model import GPSA
model = torch.nn.Sequential(GPSA(2, 3, 3, padding=1)).eval()
x = torch.randn(1, 2, 5, 7)
with tcnn_probe.record(model, sys.argv[1]) as recorder:
    print("ready", flush=True)
    epoch = len(recorder.epochs)
    while True:
        model[0].center.data.fill_(epoch)
        model(x)
        recorder.mark(epoch=epoch, top1=epoch / 7)
        print(epoch, flush=True)
        epoch += 1
"""


def test_killed_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    announced = run_and_kill(RECORDING, path, epochs=3, after=0.05)
    model = nn.Sequential(GPSA(2, 3, 3, padding=1)).eval()
    with tcnn_probe.record(model, path) as recorder:
        count = len(recorder.epochs)
        assert count - len(announced) in (0, 1)
        model[0].center.data.fill_(count)
        model(torch.randn(1, 2, 5, 7))
        recorder.mark(epoch=count, top1=count / 7)
    ds = xr.open_zarr(path)
    np.testing.assert_array_equal(ds.epoch, np.arange(count + 1))
    np.testing.assert_array_equal(ds.top1, ds.epoch / 7)
    np.testing.assert_array_equal(ds.center_y, np.broadcast_to(ds.epoch.values[:, None, None], ds.gate.shape))
    assert np.isfinite(ds.entropy).all()
