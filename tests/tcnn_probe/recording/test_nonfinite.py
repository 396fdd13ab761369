"""NaN and infinities that reach a layer are recorded as NaN, counted and warned about; the next epoch is clean."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import tcnn_probe
from tests.tcnn_probe.networks import Branches
from tests.tcnn_probe.oracle import gpsa_statistics, over_images


def images(*broken: float) -> Tensor:
    """Return five images, the first of which contain the given values."""
    x = torch.randn(5, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    for image, value in enumerate(broken):
        x[image, 1, 3, image] = value
    return x


@pytest.mark.parametrize(
    # An infinity becomes NaN in the softmax; bfloat16 is widened before it is summed.
    ("value", "dtype"),
    [(np.nan, torch.float32), (-np.inf, torch.bfloat16)],
    ids=str,
)
def test_nonfinite_images_are_recorded_as_nan_counted_and_warned_about(
    value: float, dtype: torch.dtype
) -> None:
    model = Branches().to(dtype)
    fine = images().to(dtype)
    with tcnn_probe.record(model) as recorder:
        # Images 0 and 2 of five are not finite, so the count differs from that of the batch.
        model(near=fine, far=images(value, 0.0, value).to(dtype))
        model(near=fine, far=fine)
        with pytest.warns(
            RuntimeWarning, match=r"NaN or infinite.*\{'far': 2\}"
        ) as caught:
            recorder.mark(epoch=0, top1=0.5)
    assert [warning.filename for warning in caught] == [__file__]
    ds = recorder.dataset
    assert ds.nonfinite_images.values.tolist() == [[0, 2]]
    assert ds.images.values.tolist() == [[10, 10]]
    assert np.isnan(
        ds.sel(layer="far")[
            ["entropy", "content_entropy", "attention_distance"]
        ].to_array()
    ).all()
    assert np.isfinite(ds.entropy.sel(layer="near")[0, :9]).all()
    # The gate is a parameter and does not depend on the images.
    assert np.isfinite(ds.gate.sel(layer="far")).all()
    assert ds.top1 == 0.5


def test_next_epoch_is_clean_even_if_warnings_are_errors() -> None:
    model = Branches()
    fine = images()
    with tcnn_probe.record(model) as recorder:
        model(near=fine, far=images(np.nan))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="far"):
                recorder.mark(epoch=0)
        # The warning comes after the mark is made, so raising it loses no mark.
        assert recorder.epochs == (0,)
        model(near=fine, far=fine)
        recorder.mark(epoch=1)
    last = recorder.dataset.sel(epoch=1, layer="far")
    assert last.nonfinite_images == 0
    assert last.images == len(fine)
    for name, expected in gpsa_statistics(model.far, fine).items():
        expected = over_images(name, expected)
        np.testing.assert_allclose(last[name], expected, rtol=1e-5, atol=1e-5)
