"""The fifteen corruptions of ImageNet-C, on arrays: :func:`tcnn_probe.corrupt` is for images of any kind."""

from tcnn_probe.perturbations.corruptions.table import CORRUPTIONS, GROUPS, Corruption

__all__ = ["CORRUPTIONS", "GROUPS", "Corruption"]
