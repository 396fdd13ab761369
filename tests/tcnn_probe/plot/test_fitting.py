"""Words that fit the room they have."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes

from tcnn_probe.plot.fitting import caption_lines, legend_above, mark_above, name_ticks

NAMES = ["swin_tiny_patch4_window7_224", "my own model", "a", "vit.b-16"]


def bars(width: float, names: list[str] = NAMES) -> Axes:
    axes = plt.figure(figsize=(width, 3)).subplots()
    for place, name in enumerate(names):
        axes.bar(place, place + 1, label=name)
    return axes


@pytest.mark.parametrize(("width", "columns"), [(11, 4), (6, 3), (4.5, 2), (3, 1), (2, 1)])
def test_a_legend_as_wide_as_the_axes_at_most(width: float, columns: int) -> None:
    axes = bars(width)
    legend_above(axes)
    legend = axes.get_legend()
    assert legend._ncols == columns
    room, span = axes.get_window_extent(), legend.get_window_extent()
    assert span.width <= room.width
    assert span.y0 >= room.y1
    shown = [text.get_text() for text in legend.get_texts()]
    if width > 2:
        assert shown == NAMES
    else:
        assert shown == ["swin_tiny_\npatch4_\nwindow7_224", "my own model", "a", "vit.b-16"]


@pytest.mark.parametrize("count", [2, 5, 11, 23])
@pytest.mark.parametrize("width", [2, 5, 13])
def test_names_of_ticks_do_not_meet(count: int, width: float) -> None:
    axes = bars(width, ["bar"] * count)
    name_ticks(axes, np.arange(count), ["gaussian_noise"] * count)
    axes.figure.canvas.draw()
    labels = axes.get_xticklabels()
    (turned,) = {label.get_rotation() for label in labels}
    apart = np.diff(axes.transData.transform([[0, 0], [1, 0]])[:, 0])[0]
    if turned:
        height = labels[0].get_fontsize() / 72 * axes.figure.dpi
        assert height <= apart * np.sin(np.radians(turned))
    else:
        assert labels[0].get_window_extent().width < apart


def test_a_mark_within_the_axes_whatever_is_drawn_later() -> None:
    axes = bars(5)
    mark_above(axes, 3, 4, "no interval")
    mark_above(axes, 0, 0, "no interval")
    axes.figure.canvas.draw()
    assert all(mark.get_window_extent().y1 < axes.get_window_extent().y1 for mark in axes.texts)
    axes.bar(4, 100)
    assert axes.get_ylim()[1] > 100


def test_a_formula_is_never_broken() -> None:
    sentences = ["one and two", "of $a + b$ and $c$ too"]
    assert caption_lines(plt.figure(figsize=(5, 1)), sentences, 8) == "one and two; of $a + b$ and $c$ too"
    assert caption_lines(plt.figure(figsize=(1, 1)), sentences, 8) == "one and two\nof $a + b$ and $c$\ntoo"
    narrow = caption_lines(plt.figure(figsize=(0.2, 1)), sentences, 8)
    assert narrow.split("\n") == ["one", "and", "two", "of", "$a + b$", "and", "$c$", "too"]
