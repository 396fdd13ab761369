"""Which pixels a model's decision depends on, and how far such maps can be believed.

:func:`tcnn_probe.saliency` and :func:`tcnn_probe.faithfulness` give labelled arrays; the functions here are what they
consist of, with plain tensors.
"""

from tcnn_probe.explaining.activation_maps import gradcam
from tcnn_probe.explaining.agreement import rank_correlation
from tcnn_probe.explaining.attended import class_attention
from tcnn_probe.explaining.curves import area_under, deletion_curve, insertion_curve
from tcnn_probe.explaining.flow import rollout
from tcnn_probe.explaining.labelled import saliency
from tcnn_probe.explaining.localisation import energy_inside, pointing_game
from tcnn_probe.explaining.methods import METHODS
from tcnn_probe.explaining.metrics import METRICS
from tcnn_probe.explaining.perturbation import infidelity, sensitivity
from tcnn_probe.explaining.pixels import input_x_gradient, integrated_gradients, occlusion
from tcnn_probe.explaining.scores import faithfulness

__all__ = [
    "METHODS",
    "METRICS",
    "area_under",
    "class_attention",
    "deletion_curve",
    "energy_inside",
    "faithfulness",
    "gradcam",
    "infidelity",
    "input_x_gradient",
    "insertion_curve",
    "integrated_gradients",
    "occlusion",
    "pointing_game",
    "rank_correlation",
    "rollout",
    "saliency",
    "sensitivity",
]
