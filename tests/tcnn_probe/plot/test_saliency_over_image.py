"""Saliency over images: positions of maps, and their opacity."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.contour import ContourSet

import tcnn_probe


def some_maps(method: str = "gradcam", count: int = 2) -> xr.DataArray:
    # Values differ between methods, so that exchanged columns would show.
    values = np.random.default_rng(len(method)).random((count, 3, 5))
    return xr.DataArray(values, dims=("image", "y", "x"), name="saliency", attrs={"method": method})


def outlines(axes: Axes) -> int:
    return len(axes.findobj(ContourSet))


def test_rows_are_images_and_columns_are_methods() -> None:
    maps = xr.Dataset(
        {name: some_maps(name) for name in ("class_attention", "gradcam", "occlusion")}
    )
    images = torch.randn(2, 3, 11, 13)
    masks = torch.arange(11 * 13).view(11, 13).expand(2, -1, -1) > 40
    axes = tcnn_probe.plot.saliency_overlay(maps, images, masks=masks)
    assert axes.shape == (2, 4)
    assert [panel.get_title() for panel in axes[0]] == [
        "image",
        "class attention",
        "gradcam",
        "occlusion",
    ]
    for row in range(2):
        scaled = images[row].numpy().transpose(1, 2, 0)
        scaled = (scaled - scaled.min()) / (scaled.max() - scaled.min())
        np.testing.assert_allclose(axes[row, 0].images[0].get_array(), scaled, atol=1e-6)
        assert outlines(axes[row, 0]) == 0
        for column, name in enumerate(maps, 1):
            below, above = axes[row, column].images
            np.testing.assert_allclose(below.get_array(), scaled, atol=1e-6)
            np.testing.assert_array_equal(above.get_array(), maps[name].values[row])
            # The map covers the whole image, with its first row at the top.
            assert above.get_extent() == [0, 13, 11, 0]
            values = maps[name].values[row]
            share = (values - values.min()) / (values.max() - values.min())
            # Saliency sets the opacity, so that the image shows where it is not salient.
            np.testing.assert_allclose(above.get_alpha(), 0.8 * share, atol=1e-12)
            assert outlines(axes[row, column]) == 1


def test_evidence_against_the_class_is_transparent() -> None:
    maps = some_maps() - 0.5
    maps[1] -= 0.5  # nothing speaks for the class
    axes = tcnn_probe.plot.saliency_overlay(maps, np.zeros((2, 1, 6, 10)), alpha=1)
    signed, negative = maps.values
    shares = [
        signed.clip(0) / signed.max(),
        (negative - negative.min()) / (negative.max() - negative.min()),
    ]
    for panel, share in zip(axes[:, 1], shares, strict=True):
        np.testing.assert_allclose(panel.images[1].get_alpha(), share, atol=1e-12)


def test_plot_on_given_axes() -> None:
    panels = plt.figure().subplots(2)
    axes = tcnn_probe.plot.saliency_overlay(some_maps(), np.zeros((2, 1, 6, 10)), panels, alpha=1)
    assert axes[1, 0] is panels[1]
    assert [len(panel.images) for panel in panels] == [
        2,
        2,
    ]
    alone = plt.figure().subplots()
    tcnn_probe.plot.saliency_overlay(some_maps()[0], np.zeros((1, 1, 6, 10)), alone)
    assert len(alone.images) == 2


def test_the_outline_follows_the_mask() -> None:
    mask = np.zeros((1, 11, 13), dtype=bool)
    mask[0, 2:4, 6:11] = True
    axes = plt.figure().subplots()
    tcnn_probe.plot.saliency_overlay(some_maps(count=1), np.zeros((1, 1, 11, 13)), axes, masks=mask)
    (outline,) = axes.findobj(ContourSet)
    points = np.concatenate([path.vertices for path in outline.get_paths()])
    # Pixel n extends from n to n + 1.
    np.testing.assert_allclose(points.min(0), [6, 2])
    np.testing.assert_allclose(points.max(0), [11, 4])


def test_bad_arguments_are_refused() -> None:
    overlay = tcnn_probe.plot.saliency_overlay
    maps = some_maps()
    images = np.zeros((2, 3, 6, 10))
    with pytest.raises(TypeError, match=r"expected maps as an xarray.DataArray; got Tensor"):
        overlay(torch.zeros(2, 6, 10), images)
    with pytest.raises(ValueError, match=r"a map for each of the 3 images, got 2 of gradcam"):
        overlay(maps, np.zeros((3, 3, 6, 10)))
    with pytest.raises(
        ValueError, match=r"images of shape \(B, 1 or 3, H, W\), got \(2, 4, 6, 10\)"
    ):
        overlay(maps, np.zeros((2, 4, 6, 10)))
    with pytest.raises(ValueError, match=r"masks of shape \(2, 6, 10\), got \(2, 10, 6\)"):
        overlay(maps, images, masks=np.zeros((2, 10, 6)))
    with pytest.raises(ValueError, match=r"array of size 3 into shape \(2,1\)"):
        overlay(maps, images, plt.figure().subplots(3))
    with pytest.raises(ValueError, match=r"maps have further dimensions \('epoch',\)"):
        overlay(maps.expand_dims(epoch=3), images)
