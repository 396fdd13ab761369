"""NaN and infinities that reach a layer: recorded as NaN, counted, and told."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import tcnn_probe
from tests.tcnn_probe.networks import Branches
from tests.tcnn_probe.oracle import gpsa_statistics

MEASURED = ("entropy", "content_entropy", "positional_entropy", "attention_distance")


def images(*broken: float) -> Tensor:
    """Five images, of which the first ones hold the given values somewhere."""
    x = torch.randn(5, 2, 5, 7)
    for image, value in enumerate(broken):
        x[image, 1, 3, image] = value
    return x


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_recorded_as_nan_counted_and_told(value: float) -> None:
    model, clean = Branches(), images()
    with tcnn_probe.record(model) as recorder:
        model(near=clean, far=images(value, 0.0, value))
        model(near=clean, far=clean)
        with pytest.warns(RuntimeWarning, match=r"NaN or infinite.*\{'far': 2\}") as caught:
            recorder.mark(epoch=0, top1=0.5)
    assert [warning.filename for warning in caught] == [__file__]
    ds = recorder.dataset
    assert ds.nonfinite_images.values.tolist() == [[0, 2]]
    assert ds.images.values.tolist() == [[10, 10]]
    for name, expected in gpsa_statistics(model.near, clean).items():
        assert np.isnan(ds[name].sel(layer="far")).all() or name == "positional_entropy"  # which no image changes
        np.testing.assert_allclose(ds[name].sel(layer="near", epoch=0)[:9], expected.mean(0), rtol=1e-5, atol=1e-5)
    assert np.isfinite(ds.gate.sel(layer="far")).all()
    assert ds.top1 == 0.5


def test_next_epoch_is_clean() -> None:
    model, clean = Branches(), images()
    with tcnn_probe.record(model) as recorder:
        model(near=clean, far=images(np.nan))
        with pytest.warns(RuntimeWarning, match="far"):
            recorder.mark(epoch=0)
        model(near=clean, far=clean)
        recorder.mark(epoch=1)
    assert_clean(model, recorder, clean)


def test_next_epoch_is_clean_where_warnings_are_errors() -> None:
    model, clean = Branches(), images()
    with tcnn_probe.record(model) as recorder:
        model(near=clean, far=images(np.nan))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="far"):
                recorder.mark(epoch=0)
        assert recorder.epochs == (0,)
        model(near=clean, far=clean)
        recorder.mark(epoch=1)
    assert_clean(model, recorder, clean)


def test_infinite_values_in_bfloat16_images() -> None:
    model, clean = Branches().bfloat16(), images().bfloat16()
    with tcnn_probe.record(model) as recorder:
        model(near=clean, far=images(np.inf).bfloat16())
        with pytest.warns(RuntimeWarning, match=r"\{'far': 1\}"):
            recorder.mark(epoch=0)


def assert_clean(model: Branches, recorder: tcnn_probe.Recorder, x: Tensor) -> None:
    last = recorder.dataset.sel(epoch=1, layer="far")
    assert last.nonfinite_images == 0
    assert last.images == len(x)
    for name, expected in gpsa_statistics(model.far, x).items():
        np.testing.assert_allclose(last[name], expected.mean(0), rtol=1e-5, atol=1e-5)
