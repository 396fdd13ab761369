"""Checks that a figure is legible."""

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

__all__ = ["texts_within_and_apart"]


def texts_within_and_apart(figure: Figure) -> None:
    """Assert that texts, except numbers of y axes, lie within the figure and do not overlap."""
    figure.draw_without_rendering()
    # Some ticks are not drawn.
    numbers = {tick.label1 for axes in figure.axes for tick in axes.yaxis.majorTicks}
    drawn = [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text() and text not in numbers
    ]
    room = Bbox.from_extents(0, 0, *(figure.get_size_inches() * figure.dpi))
    for nth, (text, span) in enumerate(
        spans := [(text, text.get_window_extent()) for text in drawn]
    ):
        assert room.contains(*span.min), text.get_text()
        assert room.contains(*span.max), text.get_text()
        for label, its in spans[:nth]:
            overlap = span.overlaps(its)
            # Boxes of rotated texts overlap where the texts do not. Their distance counts, which is
            # sin 60 degrees times that along the axis.
            if text.get_rotation() == label.get_rotation() == 60:
                overlap = (
                    abs(span.x1 - its.x1) * 3**0.5 / 2 < 0.9 * text.get_fontsize() / 72 * figure.dpi
                )
            assert not overlap, (text.get_text(), label.get_text())
