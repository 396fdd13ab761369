"""What is done to images to see what a model withstands: corruptions, adversarial perturbations, other test sets."""

from tcnn_probe.perturbations.adversarial import fgsm, pgd
from tcnn_probe.perturbations.comparison import improvement
from tcnn_probe.perturbations.corrupt import corrupt
from tcnn_probe.perturbations.corruption_error import mean_corruption_error
from tcnn_probe.perturbations.corruptions import CORRUPTIONS, GROUPS, Corruption
from tcnn_probe.perturbations.evaluate import robustness
from tcnn_probe.perturbations.imagenet_variants import Variant, imagenet_variant

__all__ = [
    "CORRUPTIONS",
    "GROUPS",
    "Corruption",
    "Variant",
    "corrupt",
    "fgsm",
    "imagenet_variant",
    "improvement",
    "mean_corruption_error",
    "pgd",
    "robustness",
]
