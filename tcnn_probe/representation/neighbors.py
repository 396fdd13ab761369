"""Nearest neighbours: a classifier without training, and retrieval by category (Grafit; Touvron's thesis, Chapter 2).

Neighbours are looked for in a gallery, or, without one, among the other images of the same set.
"""

import numpy as np
from numpy.typing import ArrayLike

from tcnn_probe.representation.arrays import as_features, as_labels

__all__ = ["average_precision", "knn_correct"]


def knn_correct(
    features: ArrayLike,
    labels: ArrayLike,
    gallery: ArrayLike | None = None,
    gallery_labels: ArrayLike | None = None,
    *,
    neighbors: int = 20,
    temperature: float = 0.05,
) -> np.ndarray:
    """Test whether the nearest neighbours of each image name its class; the mean is the kNN accuracy.

    The k neighbours x_j of the largest cosine vote, each with the weight exp(cos(x, x_j) / sigma) (thesis, Eq. 2.6).

    Args:
        features: shape (n, ...).
        labels: shape (n,).
        gallery, gallery_labels: the images that are known, shapes (m, ...) and (m,); None: the n - 1 other images.
        neighbors: k, at most m (or n - 1).
        temperature: sigma; 0.05 in the thesis.

    Returns:
        bool, shape (n,).

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, more neighbours than images, a temperature that
            is not above 0.
    """
    from sklearn.neighbors import KNeighborsClassifier

    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    queries, labels, known, known_labels = _with_gallery(features, labels, gallery, gallery_labels)
    most = len(known) - (gallery is None)
    if not 1 <= neighbors <= most:
        raise ValueError(f"expected neighbors from 1 to {most}, the images to choose from, got {neighbors}")
    # The distance is 1 - cos. Of the constants that divide out, that of the nearest one keeps a weight from being 0.
    weights = lambda distance: np.exp((distance.min(1, keepdims=True) - distance) / temperature)  # noqa: E731
    model = KNeighborsClassifier(neighbors, weights=weights, metric="cosine", algorithm="brute")
    model.fit(known, known_labels)
    return np.asarray(model.predict(None if gallery is None else queries) == labels)


def average_precision(
    features: ArrayLike,
    labels: ArrayLike,
    gallery: ArrayLike | None = None,
    gallery_labels: ArrayLike | None = None,
    *,
    coarse_probabilities: ArrayLike | None = None,
    gallery_coarse: ArrayLike | None = None,
) -> np.ndarray:
    """Average precision: how early images of its own class come when the gallery is ranked by similarity; mean: mAP.

    The score is the cosine, or, with coarse labels, cos(x', x) + log(p / (1 - p)), where p is the probability that the
    query x' has the coarse label of the gallery's image x (thesis, Eq. 2.5). Probabilities of 0 and 1, such as those of
    the thesis' oracle, count as if they were nearly so: images of that label then come first, by cosine among
    themselves.

    Args:
        features: of the queries, shape (n, ...).
        labels: shape (n,).
        gallery, gallery_labels: what is ranked, shapes (m, ...) and (m,); None: the n - 1 other images.
        coarse_probabilities: of each coarse label for each query, shape (n, K).
        gallery_coarse: coarse labels of what is ranked, from 0 and below K, shape (m,).

    Returns:
        shape (n,); NaN for a query whose class the gallery lacks.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, one of the two coarse arguments without the
            other, a coarse label that has no probability.
    """
    from sklearn.metrics import average_precision_score
    from sklearn.metrics.pairwise import cosine_similarity

    queries, labels, known, known_labels = _with_gallery(features, labels, gallery, gallery_labels)
    scores = cosine_similarity(queries, known)
    if (coarse_probabilities is None) != (gallery_coarse is None):
        raise ValueError("expected coarse_probabilities and gallery_coarse together, got one of them")
    if coarse_probabilities is not None and gallery_coarse is not None:
        odds, coarse = _log_odds(coarse_probabilities, queries), as_labels(gallery_coarse, known, "gallery_coarse")
        if not np.isin(coarse, range(odds.shape[1])).all():
            raise ValueError(f"expected gallery_coarse from 0 to {odds.shape[1] - 1}, got {np.unique(coarse)}")
        scores = scores + odds[:, coarse.astype(int)]
    found = np.full(len(queries), np.nan)
    for query, (score, label) in enumerate(zip(scores, labels, strict=True)):
        others = np.arange(len(known)) != query if gallery is None else slice(None)
        relevant = known_labels[others] == label
        if relevant.any():
            found[query] = average_precision_score(relevant, score[others])
    return found


def _with_gallery(
    features: ArrayLike, labels: ArrayLike, gallery: ArrayLike | None, gallery_labels: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("expected gallery and gallery_labels together, got one of them")
    queries = as_features(features, least=2 if gallery is None else 1)
    of_queries = as_labels(labels, queries)
    if gallery is None or gallery_labels is None:
        return queries, of_queries, queries, of_queries
    known = as_features(gallery, "a gallery")
    if known.shape[1] != queries.shape[1]:
        raise ValueError(f"expected a gallery of {queries.shape[1]} numbers an image, got {known.shape[1]}")
    return queries, of_queries, known, as_labels(gallery_labels, known, "gallery_labels")


def _log_odds(probabilities: ArrayLike, queries: np.ndarray) -> np.ndarray:
    from scipy.special import logit

    p = np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 2 or len(p) != len(queries) or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"expected coarse_probabilities from 0 to 1 of shape ({len(queries)}, K), got {p.shape}")
    # log odds of +-36 at most, next to cosines of at most 1
    return np.asarray(logit(p.clip(np.finfo(p.dtype).eps, 1 - np.finfo(p.dtype).eps)))
