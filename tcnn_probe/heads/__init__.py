"""What kind of attention a head has: convolutional, averaging or by content.

:func:`tcnn_probe.head_types` labels a recording; the functions here are its parts, on plain arrays.
"""

from tcnn_probe.heads.classify import head_types
from tcnn_probe.heads.mixture import fit_mixture
from tcnn_probe.heads.static_pattern import information, translation_equivariance
from tcnn_probe.heads.thresholds import GATED, TYPES, Thresholds, content_types, gate_types

__all__ = [
    "GATED",
    "TYPES",
    "Thresholds",
    "content_types",
    "fit_mixture",
    "gate_types",
    "head_types",
    "information",
    "translation_equivariance",
]
