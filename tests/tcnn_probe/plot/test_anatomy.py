"""Parts of heads as bars and bands, kernels as images,
and heads against depth: what is drawn, and its legibility.
"""

import math
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

import tcnn_probe
from tcnn_probe.plot import OKABE_ITO
from tests.tcnn_probe.plot.layout import texts_within_and_apart

PARTS = {
    "offset_information": "blue",
    "position_information": "sky blue",
    "key_content_information": "orange",
    "query_key_content_information": "vermillion",
}
HEADS = (5, 3, 7)  # of each layer


def recorded(marks: int = 1, heads: tuple[int, ...] = HEADS) -> xr.Dataset:
    """Return random parts of layers with different numbers of heads;
    some parts are slightly negative.
    """
    rng = np.random.default_rng(0)
    dims = ("epoch", "layer", "head")
    shape = (marks, len(heads), max(heads))
    exists = np.arange(max(heads)) < np.array(heads)[:, None]
    ds = xr.Dataset(
        {name: (dims, np.where(exists, rng.gamma(1, 1, shape) - 0.02, np.nan)) for name in PARTS},
        {
            "epoch": 3 * np.arange(marks),
            "layer": [f"blocks.{number}.attn" for number in range(len(heads))],
            "head": range(max(heads)),
        },
    )
    distance = ds.offset_information + 1
    distance.attrs = {"long_name": "attention distance", "units": "cell"}
    return ds.assign(
        selectivity=sum(ds[name] for name in PARTS),
        attention_distance=distance,
        images=(dims[:2], np.full(shape[:2], 64)),
    ).assign_coords(uniform_distance=(dims[:2], np.full(shape[:2], 8.3), {"units": "cell"}))


def bars(ax: plt.Axes, color: str) -> list[Rectangle]:
    """Return the bars of a colour from left to right."""
    patches = [
        patch
        for patch in ax.patches
        if isinstance(patch, Rectangle) and patch.get_facecolor() == to_rgba(color)
    ]
    return sorted(patches, key=lambda bar: bar.get_x())


def test_bars_are_the_parts_of_each_head() -> None:
    ds = recorded()
    ax = tcnn_probe.plot.anatomy(ds)
    # The heads by decreasing offset information, layer after layer.
    heads = [
        (layer, head)
        for layer, count in enumerate(HEADS)
        for head in sorted(
            range(count), key=lambda head: -ds.offset_information.values[0, layer, head]
        )
    ]
    bottom = np.zeros(sum(HEADS))
    for name, color in PARTS.items():
        drawn = bars(ax, OKABE_ITO[color])
        heights = [max(ds[name].values[0, layer, head], 0) for layer, head in heads]
        np.testing.assert_allclose([bar.get_height() for bar in drawn], heights)
        np.testing.assert_allclose([bar.get_y() for bar in drawn], bottom, atol=1e-12)
        bottom += heights
    places = np.array([bar.get_x() + 0.5 for bar in drawn])
    middles = [part.mean() for part in np.split(places, np.cumsum(HEADS)[:-1])]
    np.testing.assert_allclose(ax.get_xticks(), middles)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2"]
    # Layers are apart, and heads of a layer are not.
    assert ((np.diff(places) > 1.5).nonzero()[0] + 1).tolist() == [5, 8]
    assert ax.get_title(loc="left").endswith("(epoch 0, from 64 images)")
    # What is measured of a single layer is no part of the title.
    ax = tcnn_probe.plot.anatomy(ds.isel(layer=0))
    assert ax.get_title(loc="left").endswith("(epoch 0, from 64 images)")


def test_what_class_tokens_receive_is_not_drawn_as_a_convolution() -> None:
    ds = recorded()
    prefix = ds.offset_information.clip(0) * np.array([0.0, 0.25, 1])[:, None]
    ax = tcnn_probe.plot.anatomy(ds.assign(prefix_information=prefix))
    blue, green = (
        np.array([bar.get_height() for bar in bars(ax, OKABE_ITO[color])])
        for color in ("blue", "green")
    )
    offset = np.sort(ds.offset_information.clip(0).values[0])
    # The heads of the second layer, of which class tokens have a quarter, and of the third, of
    # which they have all.
    np.testing.assert_allclose(np.sort(blue[5:8]), 0.75 * offset[1, :3])
    np.testing.assert_allclose(np.sort(green[5:8]), 0.25 * offset[1, :3])
    np.testing.assert_allclose(blue[8:], 0, atol=1e-12)
    np.testing.assert_allclose(np.sort(green[8:]), offset[2])


def test_without_a_grid_the_static_part_is_one_bar() -> None:
    ds = recorded()
    for name in ("offset_information", "position_information"):
        ds[name].values[0, 1] = np.nan
    # A head without any value is left out.
    ds.selectivity.values[0, 2, 4] = np.nan
    ax = tcnn_probe.plot.anatomy(ds)
    hatched = [
        bar.get_height()
        for bar in bars(ax, OKABE_ITO["sky blue"])
        if bar.get_hatch() and bar.get_height() > 0
    ]
    layer = ds.isel(epoch=0, layer=1, head=slice(3))
    content = layer.key_content_information + layer.query_key_content_information
    np.testing.assert_allclose(sorted(hatched), sorted((layer.selectivity - content).values))
    assert len(bars(ax, OKABE_ITO["blue"])) == sum(HEADS) - 1


def test_bands_are_means_over_the_heads() -> None:
    ds = recorded(marks=5)
    ax = tcnn_probe.plot.anatomy(ds)
    bottom = np.zeros(5)
    for name, band in zip(PARTS, ax.collections, strict=True):
        corners = band.get_paths()[0].vertices
        for mark, epoch in enumerate(ds.epoch.values):
            values = ds[name].values[mark]
            mean = np.clip(values[np.isfinite(values)], 0, None).sum() / sum(HEADS)
            at_mark = corners[corners[:, 0] == epoch, 1]
            assert at_mark.min() == pytest.approx(bottom[mark], abs=1e-12)
            assert at_mark.max() == pytest.approx(bottom[mark] + mean)
            bottom[mark] += mean
        assert tuple(band.get_facecolor()[0]) == to_rgba(OKABE_ITO[PARTS[name]])
    assert ax.get_xlabel() == "epoch"


def kernels(heads: tuple[int, ...] = HEADS, size: tuple[int, int] = (7, 11)) -> Any:
    """Return random kernels; the second layer has a smaller grid,
    and a corner that no query has.
    """
    rng = np.random.default_rng(1)
    values = rng.random((len(heads), max(heads), *size))
    values[np.arange(max(heads)) >= np.array(heads)[:, None]] = np.nan
    values[1, :, [0, -1]] = values[1, :, 1, 0] = np.nan
    rows, columns = (np.arange(length) - length // 2 for length in size)
    return xr.DataArray(
        values[None],
        {
            "epoch": [4],
            "layer": [f"blocks.{number}.attn" for number in range(len(heads))],
            "head": range(max(heads)),
            "offset_y": rows,
            "offset_x": columns,
        },
        ("epoch", "layer", "head", "offset_y", "offset_x"),
        name="offset_kernel",
    )


def test_each_head_is_an_image_with_ticks_at_its_query() -> None:
    values = kernels()
    ax = tcnn_probe.plot.offset_kernels(values)
    assert len(ax.images) == len(ax.lines) / 2 == sum(HEADS)
    heads = [(layer, head) for layer, n in enumerate(HEADS) for head in range(n)]
    drawn = zip(heads, ax.images, ax.lines[::2], ax.lines[1::2], strict=True)
    for (layer, head), image, above, left_tick in drawn:
        kernel = values.values[0, layer, head]
        shown = kernel[1:-1] if layer == 1 else kernel
        np.testing.assert_array_equal(image.get_array().filled(np.nan), shown)
        assert image.norm.vmax == np.nanmax(kernel)
        # It lies in the head's column and the layer's row, with square cells.
        left, right, low, high = image.get_extent()
        assert ((left + right) / 2, (low + high) / 2) == pytest.approx((head, layer))
        assert (right - left) / 11 == pytest.approx((low - high) / len(shown))
        # The offset 0 is in the middle; ticks end at the image.
        assert above.get_xdata() == pytest.approx([head, head])
        assert above.get_ydata()[1] == pytest.approx(high)
        assert left_tick.get_ydata() == pytest.approx([layer, layer])
        assert left_tick.get_xdata()[1] == pytest.approx(left)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1", "2"]


def test_learned_filters_stand_below_the_kernels_of_gated_layers() -> None:
    values = kernels()
    rng = np.random.default_rng(2)
    dims, shape = ("epoch", "layer", "head"), (1, 3, 7)
    parameters = {
        name: (dims, rng.uniform(0.3, 2, shape))
        for name in ("locality_strength", "center_y", "center_x")
    }
    gated = xr.Dataset(parameters, values.coords).drop_dims(["offset_y", "offset_x"])
    gated.locality_strength.values[:, [0, 2]] = np.nan  # these layers are not gated
    ax = tcnn_probe.plot.offset_kernels(values, positional=gated)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["0", "1", "1 learned", "2"]
    learned = [image for image in ax.images if 1.5 < np.mean(image.get_extent()[2:]) < 2.5]
    assert len(learned) == HEADS[1]
    for head, image in enumerate(learned):
        alpha, y, x = (gated[name].values[0, 1, head] for name in parameters)
        expected = [
            [math.exp(-alpha * ((row - y) ** 2 + (column - x) ** 2)) for column in range(-5, 6)]
            for row in range(-2, 3)
        ]
        drawn = image.get_array()
        # Filters are scaled by their largest value; where the kernel has no offset, they are not
        # drawn.
        known = ~drawn.mask
        ratio = drawn.data[known] / np.array(expected)[known]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-12)
        assert (~known).sum() == 1


def test_heads_against_depth() -> None:
    ds = recorded()
    ax = tcnn_probe.plot.depth(ds.attention_distance)
    (points,) = ax.collections
    drawn = np.ma.filled(points.get_offsets(), np.nan)
    drawn = drawn[np.isfinite(drawn).all(1)]
    expected = [
        (layer, ds.attention_distance.values[0, layer, head])
        for layer, count in enumerate(HEADS)
        for head in range(count)
    ]
    np.testing.assert_allclose(sorted(map(tuple, drawn)), sorted(expected))
    mean, uniform = ax.lines
    np.testing.assert_allclose(
        mean.get_ydata(),
        [np.mean([y for x, y in expected if x == n]) for n in range(3)],
    )
    assert uniform.get_linestyle() == "--"
    assert set(uniform.get_ydata()) == {8.3}
    assert ax.get_ylabel() == "attention distance (cell)"
    # A layer without distances, such as a pool, is left out.
    ds.attention_distance.values[:, 1] = np.nan
    other = 2 * ds.uniform_distance
    ax = tcnn_probe.plot.depth(ds.attention_distance, plt.figure().subplots(), uniform=other)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "2"]
    assert set(ax.lines[1].get_ydata()) == {16.6}


@pytest.mark.parametrize("marks", [1, 3])
def test_axes_that_are_shared_show_all_parts(marks: int) -> None:
    """They begin at 0, and end above what is drawn on any of them; epochs are whole numbers."""
    _, (left, right) = plt.subplots(1, 2, sharey=True)
    ds = recorded(marks)
    tcnn_probe.plot.anatomy(ds, left)
    first = left.get_ylim()
    tcnn_probe.plot.anatomy(5 * ds, right)
    assert left.get_ylim() == pytest.approx((0, 5 * first[1]))
    if marks > 1:
        assert all(tick == int(tick) for tick in left.get_xticks())


@pytest.mark.study
@pytest.mark.parametrize("heads", [(6,) * 12, (16,) * 24], ids=["72", "384"])
def test_pictures_of_many_heads_are_legible(heads: tuple[int, ...]) -> None:
    ds, values = recorded(heads=heads), kernels(heads)
    with mpl.rc_context({"text.color": "w"}):
        pictures = [
            tcnn_probe.plot.anatomy(ds),
            tcnn_probe.plot.offset_kernels(values, plt.figure(figsize=(8, 12)).gca()),
            tcnn_probe.plot.depth(ds.attention_distance, plt.figure().gca()),
        ]
    for ax in pictures:
        texts_within_and_apart(ax.figure)
        legend = ax.get_legend()
        assert legend is None or legend.get_window_extent().y0 >= ax.bbox.y1


def test_a_narrow_picture_has_its_legend_below() -> None:
    """At 3.3 inches the legend above leaves bars less than a third of the height."""
    ds = tcnn_probe.load_example("vit")["heads"].dataset.isel(epoch=-1)
    with plt.rc_context({"font.size": 7}):
        figure, axes = plt.subplots(figsize=(3.3, 2.4), layout="constrained")
        tcnn_probe.plot.anatomy(ds, axes, legend="below")
        texts_within_and_apart(figure)
    assert axes.get_legend() is None
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= axes.xaxis.label.get_window_extent().y0
    assert axes.get_position().height > 0.4


def test_a_power_of_ten_stands_beside_the_legend() -> None:
    """Heads without training are nearly even: unseen, 1e-6 would make them as selective as any."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    ds = recorded()[[*PARTS, "selectivity"]] * 1e-6
    for ax in (tcnn_probe.plot.anatomy(ds, left), tcnn_probe.plot.depth(ds.selectivity[0], right)):
        figure.draw_without_rendering()
        power = ax.yaxis.get_offset_text()
        assert power.get_text().startswith("1e")
        assert not power.get_window_extent().overlaps(ax.get_legend().get_window_extent())


def test_no_grid_is_drawn_over_kernels() -> None:
    with plt.style.context("ggplot"):
        ax = tcnn_probe.plot.offset_kernels(kernels())
    lines = [*ax.get_xgridlines(), *ax.get_ygridlines()]
    assert not any(line.get_visible() for line in lines)


def test_two_pictures_beside_each_other() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    ds = recorded(heads=(6,) * 12)
    assert tcnn_probe.plot.anatomy(ds, left) is left
    assert tcnn_probe.plot.depth(ds.attention_distance, right) is right
    texts_within_and_apart(figure)
    empty = plt.figure().subplots()
    assert tcnn_probe.plot.anatomy(ds) is empty
    # What is drawn next without axes gets a figure of its own.
    assert tcnn_probe.plot.offset_kernels(kernels()).figure not in (
        figure,
        empty.figure,
    )


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (
            lambda ds: tcnn_probe.plot.anatomy(ds.selectivity),
            TypeError,
            "got DataArray",
        ),
        (
            lambda ds: tcnn_probe.plot.anatomy(ds.drop_vars("offset_information")),
            ValueError,
            "no offset_information: record it anew",
        ),
        (
            lambda ds: tcnn_probe.plot.anatomy(ds.expand_dims(run=2)),
            ValueError,
            r"got also \['epoch'\]: choose one",
        ),
        (lambda ds: tcnn_probe.plot.anatomy(ds * np.nan), ValueError, "all NaN"),
        (
            lambda ds: tcnn_probe.plot.anatomy(ds, legend="under"),
            ValueError,
            "'below', got 'under'",
        ),
        (
            lambda ds: tcnn_probe.plot.depth(ds.attention_distance),
            ValueError,
            r"choose one of each, with .sel\(epoch=",
        ),
        (
            lambda ds: tcnn_probe.plot.depth(ds.attention_distance[0] * np.nan),
            ValueError,
            "attention_distance are all NaN",
        ),
        (
            lambda _: tcnn_probe.plot.offset_kernels(kernels() * np.nan),
            ValueError,
            "kernels are all NaN",
        ),
    ],
)
def test_bad_arguments_are_refused(draw: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(recorded(marks=2))
    assert plt.get_fignums() == []  # no empty figure is left
