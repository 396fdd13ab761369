"""Words that fit the room they have, as wide as axes and figures are when these are drawn on."""

import math
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["caption_lines", "legend_above", "mark_above", "name_ticks"]

_COLUMNS = 4
_LEGEND: dict[str, Any] = {"frameon": False, "labelspacing": 0.2, "handlelength": 1.4, "columnspacing": 1.2}
_TURNED = 60  # degrees
_LEAST = 0.75  # of their size, of names that stand upright
_SHRINKS_TO = 0.5  # of its height, where a layout engine makes room for legend and labels


def legend_above(axes: "Axes") -> None:
    """A legend above the axes and no wider: in fewer columns where names are long, these in lines at the worst.

    Constrained layout would else make room for it, and take it from the axes.
    """
    handles, names = axes.get_legend_handles_labels()
    broken = [_in_lines(name) for name in names]
    for columns, shown in [*((n, names) for n in range(_COLUMNS, 0, -1)), (1, broken)]:
        legend = axes.legend(
            handles, shown, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize="small", **_LEGEND
        )
        if legend.get_window_extent().width <= axes.get_window_extent().width:
            break


def _in_lines(name: str, width: int = 16) -> str:
    """Broken at spaces, dots, dashes and underscores."""
    parts = textwrap.fill(re.sub(r"(?<=[._-])", "\0 ", name), width)
    return parts.replace("\0 ", "").replace("\0", "")


def name_ticks(axes: "Axes", places: np.ndarray, names: Sequence[str]) -> None:
    """Ticks at ``places`` of x, 1 apart; their names are made smaller, or turned as well, where they would meet."""
    axes.set_xticks(places, names)
    labels = axes.get_xticklabels()
    extents, size = [label.get_window_extent() for label in labels], float(labels[0].get_fontsize())
    left, right = axes.get_xlim()
    room = axes.get_window_extent().width / (right - left)
    shrink = 0.9 * room / max(extent.width for extent in extents)
    if shrink >= _LEAST:
        axes.set_xticks(places, names, fontsize=size * min(1, shrink))
        return
    apart = room * math.sin(math.radians(_TURNED))
    size *= min(1, apart / max(extent.height for extent in extents))
    axes.set_xticks(places, names, rotation=_TURNED, ha="right", fontsize=size)


def mark_above(axes: "Axes", x: float, y: float, text: str) -> None:
    """A small upright text that stands on (x, y), within the axes."""
    mark = axes.annotate(
        text, (x, y), (0, 2), textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize="xx-small"
    )
    bottom, top = axes.get_ylim()  # first: a mark outside the limits has no extent
    share = mark.get_window_extent().height / (_SHRINKS_TO * axes.get_window_extent().height)
    if share < 1 and (needed := (y - share * bottom) / (1 - share)) > top:
        axes.update_datalim([(x, needed)], updatex=False)
        axes.autoscale_view(scalex=False)


def caption_lines(figure: "Figure | SubFigure", sentences: Sequence[str], fontsize: float) -> str:
    """The sentences, a line or more each, or all in one line, that go into the figure's width.

    A formula is not broken, and counts as 4 letters.
    """
    inches = figure.bbox.width / figure.dpi
    letters = max(1, int(inches * 72 / (0.55 * fontsize)))  # DejaVu Sans, a wide font, takes 0.5
    formulas = iter(re.findall(r"\$.*?\$", "".join(sentences)))
    whole, *lines = (re.sub(r"\$.*?\$", "\0" * 4, text) for text in ("; ".join(sentences), *sentences))
    if len(whole) > letters:
        whole = "\n".join(textwrap.fill(line, letters, break_long_words=False) for line in lines)
    return re.sub("\0{4}", lambda _: next(formulas), whole)
