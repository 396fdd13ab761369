"""What kind of attention a head has: convolutional or content, local or global.

:func:`tcnn_probe.head_types` labels a recording; the functions here are its parts, on plain arrays.
"""

from tcnn_probe.heads.classify import head_types
from tcnn_probe.heads.mixture import Mixture, fit_mixture
from tcnn_probe.heads.thresholds import GATED, PLAIN, Thresholds, gated_types, plain_types

__all__ = ["GATED", "PLAIN", "Mixture", "Thresholds", "fit_mixture", "gated_types", "head_types", "plain_types"]
