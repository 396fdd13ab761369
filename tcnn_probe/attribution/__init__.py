"""Maps of the pixels on which a model's decision depends,
and measures of how faithful such maps are.

:func:`tcnn_probe.saliency` and :func:`tcnn_probe.faithfulness` return labelled arrays; the
functions here are their parts, which work on plain tensors.
"""

from tcnn_probe.attribution.agreement import (
    energy_inside,
    pointing_game,
    rank_correlation,
)
from tcnn_probe.attribution.captum_methods import captum_maps
from tcnn_probe.attribution.class_attention import class_attention
from tcnn_probe.attribution.deletion import area_under, deletion_curve, insertion_curve
from tcnn_probe.attribution.faithfulness import METRICS, faithfulness
from tcnn_probe.attribution.rollout import rollout
from tcnn_probe.attribution.saliency import METHODS, saliency

__all__ = [
    "METHODS",
    "METRICS",
    "area_under",
    "captum_maps",
    "class_attention",
    "deletion_curve",
    "energy_inside",
    "faithfulness",
    "insertion_curve",
    "pointing_game",
    "rank_correlation",
    "rollout",
    "saliency",
]
