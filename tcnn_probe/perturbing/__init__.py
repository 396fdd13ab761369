"""What is done to images to see what a model withstands: corruptions, adversarial perturbations, other test sets."""

from tcnn_probe.perturbing.attacks import fgsm, pgd
from tcnn_probe.perturbing.comparison import improvement
from tcnn_probe.perturbing.corrupting import corrupt
from tcnn_probe.perturbing.corruption_error import mean_corruption_error
from tcnn_probe.perturbing.corruptions import CORRUPTIONS, GROUPS, Corruption
from tcnn_probe.perturbing.measure import robustness
from tcnn_probe.perturbing.variants import Variant, imagenet_variant

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
