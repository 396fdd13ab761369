"""Sums and maps of a layer between two marks."""

import pytest
import torch
from torch import nn

from tcnn_probe import Probe, Variable
from tcnn_probe.recording.measured import Measured
from tcnn_probe.recording.sums import RunningSums


@pytest.mark.parametrize(("dtype", "itemsize"), [("float16", 2), ("float32", 4), ("float64", 8)])
def test_maps_keep_nothing_else_alive(dtype: str, itemsize: int) -> None:
    """Stored maps have the dtype of their variable, and never share memory with the batch."""
    about = {"map": Variable(("layer", "image", "y", "x"), "1", "a map", "Of a test.", dtype=dtype)}
    probe = Probe("mine", about, measure=lambda call: {})
    batch = torch.randn(7, 3, 5)
    sums, number = RunningSums(), torch.zeros(7)
    maps = {"map": batch[2:4]}
    sums.add([Measured("layer", nn.Identity(), probe, {"n": number}, {}, 7, 9, [2, 4], maps)])
    maps = sums._sums["layer", "mine"].maps
    assert list(maps) == [11, 13]
    for image, row in zip(maps, (2, 3), strict=True):
        stored = maps[image]["map"]
        assert torch.equal(stored, batch[row].to(stored.dtype))
        # A view would hold the whole batch until the end of the epoch.
        assert stored.untyped_storage().nbytes() == 3 * 5 * itemsize
