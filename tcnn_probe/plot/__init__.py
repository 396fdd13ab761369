"""Plots of what was recorded and measured, on matplotlib's axes, from labelled arrays.

Colours are ones that the colour-blind can tell apart (:mod:`tcnn_probe.plot.palette`); matplotlib's settings are left
alone.
"""

from tcnn_probe.plot.bars import robustness
from tcnn_probe.plot.grid import attention_grid
from tcnn_probe.plot.lines import evolution
from tcnn_probe.plot.overlay import saliency_overlay

__all__ = ["attention_grid", "evolution", "robustness", "saliency_overlay"]
