"""Arguments that mark() accepts: numbers of all kinds,
epochs far apart or marked before, scalars that come and go.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import images, vit


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[tcnn_probe.Recorder]:
    with torch.no_grad(), tcnn_probe.record(vit(), tmp_path / "run.zarr") as recorder:
        yield recorder


def mark(recorder: tcnn_probe.Recorder, **values: Any) -> None:
    # The fixture yields the recorder alone, which holds its model.
    recorder._model(images())
    recorder.mark(**values)


def test_epochs_of_any_integer_kind_negative_and_far_apart(recorder: tcnn_probe.Recorder) -> None:
    # True is 1, as in Python and NumPy.
    for epoch in (-5, np.int16(-1), np.uint8(0), True, torch.tensor(7), np.array(1000)):
        mark(recorder, epoch=epoch)
    assert recorder.dataset.epoch.values.tolist() == [-5, -1, 0, 1, 7, 1000]
    assert recorder.dataset.epoch.dtype == np.int64


def test_scalars_of_any_number_kind(recorder: tcnn_probe.Recorder) -> None:
    half = torch.tensor(0.5)
    kinds = [
        0.5,
        np.float32(0.5),
        np.array(0.5),
        half,
        half[None, None],
        half.bfloat16(),
        half.requires_grad_(),
    ]
    for epoch, value in enumerate(kinds):
        mark(recorder, epoch=epoch, top1=value, top5=np.int64(3), best=True, worst=-np.inf)
    ds = recorder.dataset
    assert [set(ds[name].values) for name in ("top1", "top5", "best", "worst")] == [
        {0.5},
        {3.0},
        {1.0},
        {-np.inf},
    ]


def test_skip_drops_the_sums_since_a_marked_epoch(recorder: tcnn_probe.Recorder) -> None:
    mark(recorder, epoch=1, top1=0.25, if_marked="skip")
    # The sums of other images would change the next epoch if they were kept.
    recorder._model(9 * images())
    mark(recorder, epoch=1, top1=0.5, if_marked="skip")
    mark(recorder, epoch=2, if_marked="skip")
    assert recorder.dataset.top1.values.tolist()[0] == 0.25
    # Values are equal to the bit, as both epochs saw the same images.
    np.testing.assert_array_equal(*recorder.dataset.entropy.values)
    with pytest.raises(ValueError, match="later than"):
        recorder.mark(epoch=0, if_marked="skip")


def test_integer_tensors_stay_integers_along_another_coordinate() -> None:
    recorder = tcnn_probe.record(model := vit(), along="step")
    for step in (torch.tensor(5), 7):
        with torch.no_grad():
            model(images())
        recorder.mark(step=step)
    recorder.remove()
    assert recorder.dataset.step.dtype == np.int64
    assert recorder.dataset.step.values.tolist() == [5, 7]
