"""Plots of recordings and measurements, on matplotlib's axes, from labelled arrays.

Colours are those of ``OKABE_ITO``, which the colour-blind can tell apart; matplotlib's settings are
left alone.
"""

from tcnn_probe.plot.anatomy import anatomy
from tcnn_probe.plot.attention_grid import attention_grid
from tcnn_probe.plot.attention_over_image import attention_maps
from tcnn_probe.plot.depth import depth
from tcnn_probe.plot.evolution import evolution
from tcnn_probe.plot.generalization import generalization
from tcnn_probe.plot.head_costs import head_costs
from tcnn_probe.plot.health import health
from tcnn_probe.plot.offset_kernels import offset_kernels
from tcnn_probe.plot.robustness import robustness
from tcnn_probe.plot.saliency_over_image import saliency_overlay
from tcnn_probe.plot.style import OKABE_ITO

__all__ = [
    "OKABE_ITO",
    "anatomy",
    "attention_grid",
    "attention_maps",
    "depth",
    "evolution",
    "generalization",
    "head_costs",
    "health",
    "offset_kernels",
    "robustness",
    "saliency_overlay",
]


def __dir__() -> list[str]:
    return __all__
