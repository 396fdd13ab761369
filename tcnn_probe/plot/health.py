"""Findings of health as bars over the marks of a training."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

import tcnn_probe.diagnosis as diagnosis
from tcnn_probe.plot.style import (
    OKABE_ITO,
    RED,
    axes_or_current,
    axis_label,
    letters_across,
    names_that_fit,
    whole_number_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["health"]


def health(ds: xr.Dataset, ax: "Axes | None" = None, **limits: float) -> "Axes":
    """Draw the findings of :func:`tcnn_probe.health` as bars,
    from the mark where each begins to where it ends.

    ::

        tcnn_probe.plot.health(xr.open_zarr("run.zarr"))

    Alarms are red and at the top, notices orange. If a bar reaches the last mark, the finding has
    not ended.

    Args:
        ds: A recording: ``recorder.dataset``, ``xarray.open_zarr(path)``, or a selection of marks.
        ax: Axes to draw on; None for the current axes.
        **limits: Limits in place of the defaults, see :class:`~tcnn_probe.diagnosis.HealthLimits`.

    Returns:
        The axes, with a row for each finding, and with a title if they had none.

    Raises:
        TypeError, ValueError: As :func:`tcnn_probe.health` does.
    """
    findings = diagnosis.health(ds, **limits)
    axes, along = axes_or_current(ax), ds[findings.along]
    marks = along.values
    # Bars extend beyond their marks by half of the smallest distance of marks, so that a single
    # mark is visible.
    half = np.diff(marks).min() / 2 if len(marks) > 1 else 0.5
    layers = ds.layer.values.ravel().tolist()
    names = dict(zip(layers, names_that_fit(layers, letters_across(axes) / 3), strict=True))
    labels = []
    for row, finding in enumerate(findings):
        last = marks[-1] if finding.until is None else finding.until
        color = RED if finding.is_alarm else OKABE_ITO["orange"]
        start = finding.since - half
        axes.barh(row, last + half - start, left=start, color=color, height=0.7)
        heads = f" ({', '.join(map(str, finding.heads))})" if finding.heads else ""
        labels.append(f"{finding.sign}: {names.get(finding.layer, finding.layer)}{heads}")
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel=axis_label(along), xlim=(marks[0] - half, marks[-1] + half))
    whole_number_ticks(axes, along)
    # From top to bottom: the worst finding comes first.
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    if not labels:
        axes.text(
            0.5,
            0.5,
            "nothing found",
            ha="center",
            va="center",
            transform=axes.transAxes,
        )
    if not axes.get_title():
        axes.set_title("health: layer (heads)", fontsize="small")
    return axes
