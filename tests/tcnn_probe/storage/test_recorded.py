"""Stores used through ``tcnn_probe.record``: continued, refused, crashed and deleted."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_probe.storage import StoreError
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.storage.tables import Crash, contents, steps

IMAGES = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0))


def record_epochs(
    model: nn.Module, path: Path | None, epochs: range, **options: object
) -> xr.Dataset:
    with tcnn_probe.record(model, path, **options) as recorder:
        for epoch in epochs:
            # Each epoch has another scale, so that epochs cannot be mistaken for each other.
            model((epoch + 1) * IMAGES)
            recorder.mark(epoch=epoch, top1=epoch / 7)
            if path is not None:
                assert xr.open_zarr(path).epoch.values.tolist() == list(range(epoch + 1))
    return recorder.dataset


def test_a_recording_of_fewer_layers_is_refused(tmp_path: Path) -> None:
    record_epochs(Chain(), tmp_path / "run.zarr", range(1), layers="far")
    before = contents(tmp_path)
    with pytest.raises(
        StoreError, match=r"\('near': absent there, {'kind': 'gpsa', 'heads': 9} here\)"
    ):
        tcnn_probe.record(Chain(), tmp_path / "run.zarr")
    assert contents(tmp_path) == before


@pytest.mark.study
def test_forwards_before_a_failed_commit_count_once(tmp_path: Path) -> None:
    model = Chain()
    path = tmp_path / "run.zarr"
    expected = record_epochs(model, path, range(2)).load()
    recorder = tcnn_probe.record(model, path)
    model(3 * IMAGES)
    # The mark is made when the root's metadata are replaced, which is the last step.
    with steps(0, "replace .*run.zarr/zarr.json$"), pytest.raises(Crash):
        recorder.mark(epoch=2, top1=9.0, fresh=0.5)
    assert recorder.epochs == (0, 1)
    xr.testing.assert_identical(recorder.dataset.load(), expected)
    recorder.mark(epoch=2, top1=2 / 7, fresh=1.5)
    ds = recorder.dataset.load()
    # The images are two, not four.
    np.testing.assert_array_equal(ds.images[2], [2, 2])
    np.testing.assert_array_equal(ds.fresh, [np.nan, np.nan, 1.5])
    xr.testing.assert_equal(ds.drop_vars("fresh"), record_epochs(model, None, range(3)))


def test_a_recording_is_continued_with_the_variables_of_two_versions(tmp_path: Path) -> None:
    def probe(**sizes: int) -> tcnn_probe.Probe:
        """Return a probe of sums over channels, with a variable of each name and size."""
        variables = {
            name: tcnn_probe.Variable(("layer", f"of_{name}"), "1", name, "Of a test.")
            for name in sizes
        }
        return tcnn_probe.Probe(
            "own",
            variables,
            nn.Conv2d,
            measure=lambda call: {
                name: call.output.mean((2, 3))[:, :size] for name, size in sizes.items()
            },
        )

    model, path = nn.Sequential(nn.Conv2d(2, 5, 3)).eval(), tmp_path / "run.zarr"
    for epoch, sizes in enumerate(({"a": 2, "old": 3}, {"a": 2, "b": 3})):
        with tcnn_probe.record(model, path, probes=probe(**sizes)) as recorder:
            for mark in (2 * epoch, 2 * epoch + 1):
                with torch.no_grad():
                    output = model((mark + 1) * IMAGES)
                # The second run warns once, at its first mark.
                warns = pytest.warns(RuntimeWarning, match=r"without them: \['b'\]")
                with warns if mark == 2 else nullcontext():
                    recorder.mark(epoch=mark)
    assert recorder.missing == {
        "b": {"0": "the recording began without it"},
        "old": {"0": "its probe no longer measures it"},
    }
    ds = recorder.tree["own"].dataset
    assert {*ds.data_vars} == {"a", "old", "images", "nonfinite_images"}
    assert ds.old.notnull().all(("layer", "of_old")).values.tolist() == [True, True, False, False]
    expected = output.double().mean((0, 2, 3))[:2]
    np.testing.assert_allclose(ds.a[3, 0], expected, rtol=1e-6)
    with tcnn_probe.record(model, path, probes=probe(b=3)) as recorder:
        model(IMAGES)
        with pytest.raises(StoreError, match="'of_a': 2 there, absent here"):
            recorder.mark(epoch=4)
        recorder.discard()
