"""Measures of features of images, on plain arrays:
how well they predict classes, and their geometry.

Features have the shape (n, ...) for n images; all dimensions after the first are flattened.
Measures that exist for single images are returned by image, for
:func:`tcnn_probe.evaluation.mean_interval`.
"""

from tcnn_probe.representation.by_layer import layer_cka, layer_scores
from tcnn_probe.representation.cka import linear_cka
from tcnn_probe.representation.linear_probes import (
    dense_probe,
    layer_dense_probe,
    linear_probe_correct,
)
from tcnn_probe.representation.neighbors import average_precision, knn_correct
from tcnn_probe.representation.spectrum import participation_ratio, pca_energy
from tcnn_probe.representation.token_similarity import token_cosine

__all__ = [
    "average_precision",
    "dense_probe",
    "knn_correct",
    "layer_cka",
    "layer_dense_probe",
    "layer_scores",
    "linear_cka",
    "linear_probe_correct",
    "participation_ratio",
    "pca_energy",
    "token_cosine",
]
