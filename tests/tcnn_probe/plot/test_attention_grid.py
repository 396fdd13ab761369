"""Grid of attention maps: its panels, boxes and numbers, and arguments that it refuses."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import tcnn_probe
from tcnn_probe.plot.style import RED
from tests.tcnn_probe.plot.layout import texts_within_and_apart

LAYERS = ["stages.3.0.conv", "stages.3.1.conv"]
HEADS = 3


def some_maps() -> xr.DataArray:
    values = np.random.default_rng(0).random((2, HEADS, 5, 7))
    return xr.DataArray(
        values, {"layer": LAYERS, "head": range(HEADS)}, ("layer", "head", "y", "x")
    )


def some_gates() -> xr.DataArray:
    # There is one layer and one head more than in the maps, whose gates must not be written.
    values = [[0.11, 0.22, 0.33, 0.9], [0.44, 0.55, 0.66, 0.9], [0.7, 0.7, 0.7, 0.7]]
    return xr.DataArray(values, {"layer": [*LAYERS, "other"], "head": range(4)}, ("layer", "head"))


def with_pictures(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]


def boxes(axes: Axes) -> list[tuple[float, ...]]:
    """Return (y, x, height, width) of each red box."""
    rectangles = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert all(to_hex(patch.get_edgecolor()).upper() == RED for patch in rectangles)
    return [(box.get_y(), box.get_x(), box.get_height(), box.get_width()) for box in rectangles]


@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_are_layers_and_columns_are_heads(shuffled: bool) -> None:
    maps = some_maps()
    gates = some_gates()
    if shuffled:
        # Values are found by label, in any order of dimensions and layers.
        maps = maps.transpose("x", "head", "layer", "y")
        gates = gates.isel(layer=[2, 1, 0]).T
    figure = tcnn_probe.plot.attention_grid(maps, query=np.array([4, 6]), gate=gates)
    assert figure is plt.gcf()
    panels = with_pictures(figure)
    assert len(panels) == 6
    figure.draw_without_rendering()
    tops = [round(axes.get_position().y0, 3) for axes in panels]
    lefts = [round(axes.get_position().x0, 3) for axes in panels]
    assert tops[0] == tops[2] > tops[3] == tops[5]
    assert lefts[0] == lefts[3] < lefts[1] == lefts[4]
    expected = some_maps().values.reshape(6, 5, 7)
    for number, axes in enumerate(panels):
        np.testing.assert_array_equal(axes.images[0].get_array(), expected[number])
        assert axes.images[0].get_clim() == (0, expected[number].max())
        assert boxes(axes) == [(4, 6, 1, 1)]
        assert to_hex(axes.title.get_color()).upper() == RED
    assert [axes.get_title() for axes in panels] == [
        "0.11",
        "0.22",
        "0.33",
        "0.44",
        "0.55",
        "0.66",
    ]
    assert [axes.get_ylabel() for axes in panels] == [
        LAYERS[0],
        "",
        "",
        LAYERS[1],
        "",
        "",
    ]
    assert [axes.get_xlabel() for axes in panels] == [
        "",
        "",
        "",
        "head 0",
        "head 1",
        "head 2",
    ]


@pytest.mark.parametrize("strided", [False, True])
def test_the_query_of_an_image_is_boxed_on_each_layers_grid(strided: bool) -> None:
    maps = some_maps()
    # The second layer has 3 x 4 cells.
    maps[1, :, 3:] = np.nan
    maps[1, :, :, 4:] = np.nan
    first, second = (3, 6), (1, 3)
    if strided:  # the query's position in a layer with a stride
        first, second = (2, 6), (0, 3)
        maps = maps.assign_coords(query_y=("layer", [2, 0]), query_x=("layer", [6, 3]))
    figure = tcnn_probe.plot.attention_grid(maps, image=torch.rand(1, 30, 56), query=(19, 55))
    *panels, picture = with_pictures(figure)
    assert picture.images[0].get_array().shape == (30, 56)
    # The query is in row 3 of five of 6 pixels, and in column 6 of seven of 8.
    assert boxes(picture) == [(18, 48, 6, 8)]
    for axes in panels[:3]:
        assert boxes(axes) == [(*first, 1, 1)]
    for axes in panels[3:]:
        assert boxes(axes) == [(*second, 1, 1)]
    assert panels[3].images[0].get_array().shape == (3, 4)
    assert picture.get_xlabel() == "image"


@pytest.mark.study(but=["25-options2"])
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (1, {}),
        (12, {"image": torch.rand(3, 40, 56), "title": "epoch 7"}),
        # 25 heads are those of a 5 x 5 convolution, the most that one row needed so far.
        (25, {"image": torch.rand(3, 40, 56)}),
    ],
)
def test_texts_lie_within_the_figure_and_do_not_overlap(
    heads: int, options: dict[str, Any]
) -> None:
    names = ["stages.3.blocks.10.attention.conv", "stages.3.blocks.11.attention.conv"]
    values = np.random.default_rng(0).random((2, heads, 5, 7))
    maps = xr.DataArray(values, {"layer": names, "head": range(heads)}, ("layer", "head", "y", "x"))
    texts_within_and_apart(
        tcnn_probe.plot.attention_grid(maps, gate=maps.mean(["y", "x"]), **options)
    )


@pytest.mark.parametrize("height", [2, 5, 11])
def test_little_is_left_empty_between_wide_maps(height: int) -> None:
    names = [f"image_encoder.vision_tower.blocks.{n}.attn" for n in range(7)]
    values = np.random.default_rng(0).random((7, 3, height, 11))
    maps = xr.DataArray(values, {"layer": names, "head": range(3)}, ("layer", "head", "y", "x"))
    figure = tcnn_probe.plot.attention_grid(maps, gate=maps.mean(["y", "x"]))
    texts_within_and_apart(figure)
    panels = with_pictures(figure)
    step = panels[0].bbox.y0 - panels[3].bbox.y0
    # Names of layers, here of three lines, take half of the width of a panel.
    needed = max(panels[0].bbox.height, panels[0].bbox.width / 2)
    assert step - needed < 0.5 * figure.dpi


@pytest.mark.study
def test_twelve_layers_of_twelve_heads_fit_a_page() -> None:
    names = [f"blocks.{n}.attn" for n in range(12)]
    values = np.random.default_rng(0).random((12, 12, 3, 5))
    maps = xr.DataArray(values, {"layer": names, "head": range(12)}, ("layer", "head", "y", "x"))
    figure = tcnn_probe.plot.attention_grid(
        maps, gate=maps.mean(["y", "x"]), image=torch.rand(1, 30, 50)
    )
    # This is a page in landscape format, and a little more.
    assert figure.get_size_inches().max() < 13
    texts_within_and_apart(
        tcnn_probe.plot.attention_grid(maps.isel(head=slice(5)), gate=maps.mean(["y", "x"]))
    )


def test_one_layer_one_head_and_heads_that_a_layer_lacks() -> None:
    maps = some_maps()
    grid = tcnn_probe.plot.attention_grid
    assert len(with_pictures(grid(maps.isel(layer=1, drop=True), gate=some_gates()[0, :3]))) == 3
    assert len(with_pictures(grid(maps.isel(layer=[1], head=[2]).expand_dims(epoch=[3])))) == 1
    maps[1, 2] = np.nan
    panels = with_pictures(grid(maps, gate=some_gates()))
    assert [panel.get_xlabel() for panel in panels] == [
        "",
        "",
        "head 2",
        "head 0",
        "head 1",
    ]


def test_many_heads_are_wrapped_into_rows() -> None:
    panels = with_pictures(
        tcnn_probe.plot.attention_grid(some_maps(), gate=some_gates(), col_wrap=2)
    )
    places = [
        (panel.get_subplotspec().rowspan.start, panel.get_subplotspec().colspan.start)
        for panel in panels
    ]
    assert places == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0)]
    shown = [np.asarray(panel.images[0].get_array()) for panel in panels]
    np.testing.assert_allclose(shown, some_maps().values.reshape(6, *shown[0].shape))


@pytest.mark.study
def test_grid_on_a_part_of_the_users_figure() -> None:
    parent = Figure(figsize=(7, 9), layout="constrained")
    upper, lower = parent.subfigures(2)
    assert (
        tcnn_probe.plot.attention_grid(
            some_maps(), image=np.zeros((1, 10, 14)), query=(0, 0), figure=upper
        )
        is upper
    )
    tcnn_probe.plot.attention_grid(
        some_maps().isel(layer=0), gate=some_gates()[0, :3], figure=lower, title="below"
    )
    assert [len(with_pictures(part)) for part in (upper, lower)] == [7, 3]
    texts_within_and_apart(parent)
    assert plt.get_fignums() == []
    current = plt.figure(figsize=(5, 4))
    assert tcnn_probe.plot.attention_grid(some_maps(), query=(1, 2)) is current
    assert current.get_suptitle() == "attention from pixel (y, x) = (1, 2)"
    texts_within_and_apart(current)
    # The current figure is not empty, so a new one is made.
    assert tcnn_probe.plot.attention_grid(some_maps()) is not current


def test_bad_arguments_are_refused() -> None:
    maps = some_maps()
    grid = tcnn_probe.plot.attention_grid
    with pytest.raises(TypeError, match=r"expected maps as an xarray.DataArray"):
        grid(maps.values)
    with pytest.raises(ValueError, match=r"expected maps with the dimensions .* no 'head'"):
        grid(maps.isel(head=0))
    with pytest.raises(
        ValueError,
        match=r"further dimensions \('image',\): choose one of each, .*image=",
    ):
        grid(maps.expand_dims(image=2, epoch=1))
    for outside in ((5, 0), (0, 7), (-1, 0), (0, -1)):
        with pytest.raises(
            ValueError,
            match=rf"inside 5 x 7 pixels, got \({outside[0]}, {outside[1]}\)",
        ):
            grid(maps, query=outside)
    with pytest.raises(ValueError, match=r"inside 20 x 30 pixels, got \(3, 30\)"):
        grid(maps, query=(3, 30), image=np.zeros((1, 20, 30)))
    for no_pixel in ((1.5, 2), (1, 2, 3), 4):
        with pytest.raises(ValueError, match=r"a query \(y, x\), two integers, got"):
            grid(maps, query=no_pixel)
    with pytest.raises(ValueError, match=r"shape \(B, 1 or 3, H, W\), got \(1, 2, 20, 30\)"):
        grid(maps, image=np.zeros((2, 20, 30)))
    for gates in (some_gates()[1:], some_gates()[0]):
        with pytest.raises(KeyError, match="not all values found in index 'layer'"):
            grid(maps, gate=gates)
    with pytest.raises(ValueError, match="conflicting dimension sizes"):
        grid(maps, gate=some_gates().drop_vars("head"))
    with pytest.raises(ValueError, match=r"maps are all NaN"):
        grid(maps.where(maps.layer != LAYERS[0]))
    assert plt.get_fignums() == []


def test_maps_over_the_image() -> None:
    maps = some_maps()
    maps[1, 2, 4, :] = np.nan
    image = torch.rand(3, 15, 22)
    figure = tcnn_probe.plot.attention_grid(maps, image=image, overlay=True)
    *panels, picture = with_pictures(figure)
    assert len(picture.images) == 1
    for panel, expected in zip(panels, maps.values.reshape(6, 5, 7), strict=True):
        background, attention = panel.images
        grey = np.asarray(background.get_array())
        below = image.mean(0).min()
        above = image.mean(0).max()
        expected_grey = (image.mean(0) - below) / (above - below)
        np.testing.assert_allclose(grey, expected_grey, atol=1e-6)
        assert background.get_extent() == attention.get_extent() == [0, 7, 5, 0]
        np.testing.assert_array_equal(attention.get_array(), expected)
        share = np.nan_to_num(expected / np.nanmax(expected))
        np.testing.assert_allclose(attention.get_alpha(), 0.35 + 0.6 * share)
    with pytest.raises(ValueError, match="overlay=True needs the image"):
        tcnn_probe.plot.attention_grid(maps, overlay=True)
