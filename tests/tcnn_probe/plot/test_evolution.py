"""Evolution by head: the lines, their colours, and the labels of the axes."""

import itertools
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgba

import tcnn_probe

GATE = {"long_name": "gate", "units": "1"}


def recorded(marks: int = 5, layers: int = 3, heads: int = 7, **attrs: str) -> xr.DataArray:
    values = np.random.default_rng(0).random((marks, layers, heads))
    coords = {
        # Epochs are not 0, 1, 2, so that positions taken for epochs would show.
        "epoch": np.arange(marks) * 2,
        "layer": [f"stage.{n}.conv" for n in range(layers)],
        "head": range(heads),
    }
    return xr.DataArray(values, coords, ("epoch", "layer", "head"), "gate", GATE | attrs)


class DrawnLine(NamedTuple):
    x: list[float]
    y: list[float]
    width: float
    color: tuple[float, ...]


def drawn(ax: plt.Axes) -> list[DrawnLine]:
    return [
        DrawnLine(
            line.get_xdata().tolist(),
            line.get_ydata().tolist(),
            line.get_linewidth(),
            to_rgba(line.get_color()),
        )
        for line in ax.lines
    ]


def legend_texts(ax: plt.Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("dims", [("epoch", "layer", "head"), ("head", "epoch", "layer")])
def test_heads_are_thin_lines_and_layers_are_thick_ones(dims: tuple[str, ...]) -> None:
    values = recorded()
    ax = tcnn_probe.plot.evolution(values.transpose(*dims), colors=["r", "g", "b", "k"])
    lines = drawn(ax)
    assert len(lines) == 3 * (7 + 1)
    for layer, color in enumerate("rgb"):
        layer_lines = [line for line in lines if line.color == to_rgba(color)]
        assert all(line.x == [0, 2, 4, 6, 8] for line in layer_lines)
        by_head = values.values[:, layer]  # (marks, heads)
        # The line is found by its width, as a reader would find it.
        thick = max(layer_lines, key=lambda line: line.width)
        np.testing.assert_allclose(thick.y, by_head.sum(-1) / 7)
        thin = sorted(line.y for line in layer_lines if line is not thick)
        np.testing.assert_array_equal(thin, sorted(by_head.T.tolist()))
    assert ax.get_xlabel() == "epoch"
    assert ax.get_ylabel() == "gate"
    assert legend_texts(ax) == list(values.layer.values)


def test_variables_without_heads_or_layers() -> None:
    values = recorded()
    of_layers = tcnn_probe.plot.evolution(values.mean("head"), plt.figure().subplots())
    assert len(of_layers.lines) == 3
    of_heads = tcnn_probe.plot.evolution(values.isel(layer=1), plt.figure().subplots())
    assert len(of_heads.lines) == 8
    assert of_heads.get_legend() is None
    scalar = values.mean(["layer", "head"]).rename(epoch="step")
    ax = tcnn_probe.plot.evolution(scalar, plt.figure().subplots(), ls="--")
    (line,) = ax.lines
    assert line.get_linestyle() == "--"
    np.testing.assert_array_equal(line.get_ydata(), scalar)
    assert ax.get_xlabel() == "step"


def test_plot_on_current_or_given_axes() -> None:
    values = recorded()
    ax = tcnn_probe.plot.evolution(values, legend=False)
    assert ax.figure.get_layout_engine() is not None
    assert tcnn_probe.plot.evolution(values, ls=":") is ax is plt.gca()
    colors = [line.color for line in drawn(ax)]
    assert len(set(colors)) == 3
    assert colors[:24] == colors[24:]
    right = plt.figure().subplots()
    assert tcnn_probe.plot.evolution(values, ax) is ax is not right


@pytest.mark.parametrize(
    ("units", "label"),
    [("1", "span"), ("nat", "span (nat)"), ("pixel-2", "span (pixel$^{-2}$)")],
)
def test_units_label_the_axis(units: str, label: str) -> None:
    ax = tcnn_probe.plot.evolution(recorded(long_name="span", units=units))
    assert ax.get_ylabel() == label
    ax.figure.draw_without_rendering()  # matplotlib can typeset the label


def test_heads_and_layers_without_values_are_left_out() -> None:
    values = recorded()
    values[:, 1] = np.nan
    values[:, 2, 5:] = np.nan
    ax = tcnn_probe.plot.evolution(values, colors=["r", "g", "b"])
    lines = drawn(ax)
    assert len(lines) == 8 + 6
    assert to_rgba("g") not in [line.color for line in lines]
    # The last line is the mean over the remaining heads.
    np.testing.assert_allclose(lines[-1].y, values.values[:, 2, :5].mean(1))
    assert legend_texts(ax) == ["stage.0.conv", "stage.2.conv"]


def test_a_single_mark_is_a_point() -> None:
    ax = tcnn_probe.plot.evolution(recorded(marks=1))
    assert {line.get_marker() for line in ax.lines} == {"o"}


def test_bad_arguments_are_refused() -> None:
    values = recorded()
    evolution = tcnn_probe.plot.evolution
    with pytest.raises(TypeError, match=r"DataArray, for example dataset\['gate'\]; got Dataset"):
        evolution(values.to_dataset())
    types = xr.where(values > 0.5, "content", "convolutional")
    with pytest.raises(
        TypeError,
        match=r"expected values that are numbers, got .*\(types == 'content'\)",
    ):
        evolution(types)
    for dims in (values[0], values.expand_dims(image=2)):
        with pytest.raises(ValueError, match=r"that of the marks, got \(.*'layer', 'head'\)"):
            evolution(dims)
    with pytest.raises(ValueError, match=r"a colour for each of the 3 layers, got 2"):
        evolution(values, colors=["r", "g"])
    with pytest.raises(ValueError, match=r"gate are all NaN"):
        evolution(values * np.nan)
    assert plt.get_fignums() == []  # no empty figure is left


@pytest.mark.parametrize("legend", [True, "below"])
def test_long_names_of_layers_leave_room_for_the_lines(legend: Any) -> None:
    values = recorded(layers=24)
    values["layer"] = [f"vit.encoder.layer.{n}.attention.attention" for n in range(24)]
    figure, ax = plt.subplots()
    tcnn_probe.plot.evolution(values, ax, legend=legend)
    figure.draw_without_rendering()
    assert min(ax.get_position().size) > 0.4
    shown = ax.get_legend() or figure.legends[0]
    assert figure.bbox.contains(*shown.get_window_extent().max)
    assert [text.get_text() for text in shown.get_texts()] == [f"layer {n}" for n in range(24)]


def test_a_long_label_is_no_longer_than_the_axis() -> None:
    heads = tcnn_probe.load_example("vit")["heads"].dataset
    figure, panels = plt.subplots(2, 2, figsize=(7, 5), layout="constrained")
    tcnn_probe.plot.evolution(heads.content_information, panels[0, 0], legend=False)
    tcnn_probe.plot.depth(heads.class_content_information.isel(epoch=-1), panels[1, 1])
    figure.draw_without_rendering()
    for panel in (panels[0, 0], panels[1, 1]):
        label = panel.yaxis.label
        assert "\n" in label.get_text()
        assert label.get_window_extent().height < 1.1 * panel.bbox.height


def test_a_figure_has_one_legend_below() -> None:
    figure, panels = plt.subplots(1, 3, figsize=(9, 4))
    figure.legend(panels[0].plot([0, 1]), ["a line"], loc="upper left")
    heads = tcnn_probe.load_example("vit")["heads"].dataset
    tcnn_probe.plot.evolution(heads.entropy, panels[0], legend="below")
    tcnn_probe.plot.anatomy(heads, panels[1], legend="below")
    tcnn_probe.plot.evolution(heads.max_logit, panels[2], legend="below")
    mine, below = figure.legends
    names = [text.get_text() for text in below.get_texts()]
    assert len(names) == len(set(names)) == heads.sizes["layer"] + 5
    assert [text.get_text() for text in mine.get_texts()] == ["a line"]
    lines = [line for line in panels[0].lines if line.get_label() in names]
    assert [line.get_color() for line in below.get_lines()] == [line.get_color() for line in lines]


@pytest.mark.parametrize("layout", [None, "constrained"])
def test_the_legend_covers_no_line(layout: str | None) -> None:
    figure, (ax, neighbour) = plt.subplots(1, 2, figsize=(9, 4), layout=layout)
    tcnn_probe.plot.evolution(recorded(layers=12), ax)
    tcnn_probe.plot.evolution(recorded(layers=2), neighbour)
    figure.draw_without_rendering()
    for axes, end in ((ax, neighbour.get_tightbbox().x0), (neighbour, figure.bbox.x1)):
        legend = axes.get_legend().get_window_extent()
        assert axes.get_window_extent().x1 <= legend.x0 < legend.x1 <= end
    title = ax.title.get_window_extent()
    assert not title.overlaps(neighbour.title.get_window_extent())


@pytest.mark.parametrize("marks", [1, 2, 5])
def test_ticks_are_whole_epochs_and_full_numbers(marks: int) -> None:
    # For such values, matplotlib by default writes an offset above the axis.
    values = 1000 + 1e-4 * recorded(5)[:marks].assign_coords(epoch=range(marks))
    ax = tcnn_probe.plot.evolution(values.assign_attrs(GATE), plt.figure().subplots())
    ax.figure.draw_without_rendering()
    low, high = ax.get_xlim()
    # Ticks beyond the ends of the axis exist, but are not drawn.
    assert [tick for tick in ax.get_xticks() if low <= tick <= high] == [*range(marks)]
    assert ax.yaxis.get_offset_text().get_text() == ""


def test_default_title() -> None:
    ax = tcnn_probe.plot.evolution(recorded())
    assert ax.get_title() == "gate by head (thin), and mean (thick)"
    plt.figure()
    plt.title("mine")
    ax = tcnn_probe.plot.evolution(recorded().mean("head"))
    assert ax.get_title() == "mine"


def test_a_ratio_has_not_the_unit_of_its_parts() -> None:
    part, whole = (recorded(long_name=name, units="nat") for name in ("part", "whole"))
    part.name = whole.name = None
    ax = tcnn_probe.plot.evolution((part / whole).rename("share_of_whole"))
    assert ax.get_ylabel() == "share of whole"
    ax = tcnn_probe.plot.evolution(part / whole, plt.figure().subplots())
    assert ax.get_ylabel() == ""


def test_a_share_of_types_has_its_own_name() -> None:
    types = tcnn_probe.head_types(tcnn_probe.load_example("vit")["heads"].dataset)
    share = (types == "averaging").mean("head").rename("share of averaging heads")
    ax = tcnn_probe.plot.evolution(share)
    assert ax.get_ylabel() == "share of averaging heads"


def test_the_package_exports_its_plots() -> None:
    assert dir(tcnn_probe.plot) == sorted(tcnn_probe.plot.__all__)


def seeds(marks: int = 5, **attrs: str) -> xr.DataArray:
    """Return three runs as ``tcnn_probe.open`` joins them;
    the last is shorter and lacks a layer and two heads.
    """
    runs = [recorded(marks) + shift for shift in (0.0, 0.3, 0.5)]
    values = xr.concat(runs, xr.DataArray(["a", "b", "c"], dims="run", name="run"))
    values[2, -1] = np.nan
    values[2, :, 2] = np.nan
    values[2, :, :, 5:] = np.nan
    return values.assign_attrs(GATE | attrs)


def test_runs_form_a_band_from_the_smallest_to_the_largest() -> None:
    values = seeds()
    ax = tcnn_probe.plot.evolution(values, colors=["r", "g", "b"])
    assert len(ax.lines) == len(ax.collections) == 3
    drawings = zip(ax.lines, ax.collections, strict=True)
    for layer, (line, band) in enumerate(drawings):
        corners = band.get_paths()[0].vertices
        for mark, epoch in enumerate(values.epoch.values):
            # Each run has these heads at this mark.
            runs = [heads[~np.isnan(heads)] for heads in values.values[:, mark, layer]]
            means = [heads.mean() for heads in runs if len(heads)]
            mean = sum(means) / len(means)
            at_mark = corners[corners[:, 0] == epoch, 1]
            np.testing.assert_allclose(at_mark.min(), min(means))
            np.testing.assert_allclose(at_mark.max(), max(means))
            np.testing.assert_allclose(line.get_ydata()[mark], mean, rtol=1e-14)
        assert to_rgba(line.get_color()) == to_rgba("rgb"[layer])
        assert tuple(band.get_facecolor()[0]) == to_rgba("rgb"[layer], 0.2)
    assert ax.get_title().replace("\n", " ") == (
        "gate: mean over heads and runs (line), smallest to largest of 2 to 3 runs (band)"
    )
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    long_name = values.assign_attrs(long_name="content information of attention")
    for panel in panels:
        tcnn_probe.plot.evolution(long_name, panel, legend=False)
    figure.draw_without_rendering()
    titles = [panel.title.get_window_extent() for panel in panels]
    assert titles[0].x1 < titles[1].x0
    assert titles[1].x1 < figure.bbox.x1


def test_scores_of_runs_form_a_band() -> None:
    scores = seeds().mean(["layer", "head"]).rename("top1")
    ax = tcnn_probe.plot.evolution(scores)
    assert len(ax.lines) == len(ax.collections) == 1
    assert ": mean over runs (line)" in ax.get_title()
    ax = tcnn_probe.plot.evolution(scores.isel(epoch=[0]), plt.figure().subplots())
    assert "of 3 runs" in ax.get_title()
    # The band of a single mark has no area.
    assert ax.collections[0].get_linewidth() > 0


def test_a_narrow_figure_has_its_legend_below_and_thin_lines() -> None:
    """Nothing overlaps at 3.3 inches, and widths follow matplotlib's own setting."""
    ds = tcnn_probe.load_example()["heads"].dataset
    with plt.rc_context({"font.size": 7, "lines.linewidth": 0.6}):
        figure, panels = plt.subplots(1, 2, figsize=(3.3, 2.4), layout="constrained")
        tcnn_probe.plot.evolution(ds.gate, panels[0], legend=False)
        tcnn_probe.plot.evolution(ds.content_entropy, panels[1], legend="below")
        figure.draw_without_rendering()
    assert max(line.get_linewidth() for line in panels[0].lines) == pytest.approx(1)
    (legend,) = figure.legends
    texts = [axes.title for axes in panels] + [axes.xaxis.label for axes in panels]
    boxes = [text.get_window_extent() for text in texts] + [legend.get_window_extent()]
    for first, second in itertools.combinations(boxes, 2):
        assert not first.overlaps(second)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    with pytest.raises(ValueError, match="False or 'below', got 'under'"):
        tcnn_probe.plot.evolution(ds.gate, legend="under")  # type: ignore[arg-type]
