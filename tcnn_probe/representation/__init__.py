"""What features of images know and how they are arranged: plain arrays in, numbers out.

Features are of n images, shape (n, ...); all dimensions after the first are taken together. Numbers come by image where
there are some, so that :func:`tcnn_probe.evaluation.mean_interval` can say how sure their mean is.
"""

from tcnn_probe.representation.by_layer import layer_cka, layer_scores
from tcnn_probe.representation.cka import LinearCKA, linear_cka
from tcnn_probe.representation.dense_probe import dense_probe, layer_dense_probe
from tcnn_probe.representation.linear_probe import linear_probe_correct
from tcnn_probe.representation.neighbors import average_precision, knn_correct
from tcnn_probe.representation.spectrum import participation_ratio, pca_energy
from tcnn_probe.representation.token_similarity import token_cosine

__all__ = [
    "LinearCKA",
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
