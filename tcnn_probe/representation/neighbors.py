"""Nearest neighbours: a classifier without training,
and retrieval by category (Grafit; Touvron's thesis, Chapter 2).

Neighbours are searched in a gallery, or, without one, among the other images of the same set.
"""

import numpy as np
from numpy.typing import ArrayLike

from tcnn_probe.extras import needed_for
from tcnn_probe.representation.arrays import as_array, feature_matrix, label_vector

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
    """Classify each image by its nearest neighbours; the mean of the result is the kNN accuracy.

    The k neighbours x_j with the largest cosines vote, each with the weight exp(cos(x, x_j) /
    sigma) (thesis, Eq. 2.6).

    Args:
        features: Features of the images, shape (n, ...).
        labels: Classes of the images, shape (n,).
        gallery, gallery_labels: Features and classes of the images to search, shapes (m, ...) and
            (m,); None for the n - 1 other images.
        neighbors: Number k of neighbours, at most m (or n - 1).
        temperature: Temperature sigma; 0.05 in the thesis.

    Returns:
        Right answers, bool, shape (n,).

    Raises:
        ValueError: Shapes do not fit, features are not finite, there are more neighbours than
            images, or the temperature is not above 0.
    """
    with needed_for("a search for neighbours"):
        from sklearn.neighbors import KNeighborsClassifier

    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    queries, labels, searched, searched_labels = _with_gallery(
        features, labels, gallery, gallery_labels
    )

    def weights(distance: np.ndarray) -> np.ndarray:
        # The distance is 1 - cos. A constant factor has no effect; this factor keeps the nearest
        # weight from underflow.
        return np.exp((distance.min(1, keepdims=True) - distance) / temperature)

    # scikit-learn's trees do not support cosine distances.
    model = KNeighborsClassifier(neighbors, weights=weights, metric="cosine", algorithm="brute")
    model.fit(searched, searched_labels)
    # With None the fitted images are searched, each without itself; as queries, images would find
    # themselves first.
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
    """Compute the average precision of ranking a gallery
    by similarity to each image; the mean is the mAP.

    The score is the cosine, or, with coarse labels, cos(x', x) + log(p / (1 - p)), where p is the
    probability that the query x' has the coarse label of the gallery's image x (thesis, Eq. 2.5).
    Probabilities of 0 and 1, such as those of the thesis' oracle, are changed by the machine
    epsilon, so that images of that label come first, ranked by cosine.

    Args:
        features: Features of the queries, shape (n, ...).
        labels: Classes of the queries, shape (n,).
        gallery, gallery_labels: Features and classes of the images to rank, shapes (m, ...) and
            (m,); None for the n - 1 other images.
        coarse_probabilities: Probability of each coarse label for each query, shape (n, K).
        gallery_coarse: Coarse labels of the images to rank, from 0 to K - 1, shape (m,).

    Returns:
        Average precisions, shape (n,); NaN for a query whose class the gallery lacks.

    Raises:
        ValueError: Shapes do not fit, features are not finite, one of the two coarse arguments is
            missing, or a coarse label has no probability.
    """
    with needed_for("a search for neighbours"):
        from sklearn.metrics.pairwise import cosine_similarity

    queries, labels, ranked, ranked_labels = _with_gallery(
        features, labels, gallery, gallery_labels
    )
    scores = cosine_similarity(queries, ranked)
    if (coarse_probabilities is None) != (gallery_coarse is None):
        raise ValueError(
            "expected coarse_probabilities and gallery_coarse together, got one of them"
        )
    if coarse_probabilities is not None and gallery_coarse is not None:
        odds = _log_odds(coarse_probabilities, queries)
        coarse = label_vector(gallery_coarse, ranked, "gallery_coarse")
        if not np.isin(coarse, range(odds.shape[1])).all():
            raise ValueError(
                f"expected gallery_coarse from 0 to {odds.shape[1] - 1}, got {np.unique(coarse)}"
            )
        scores = scores + odds[:, coarse.astype(int)]
    precisions = np.full(len(queries), np.nan)
    for query, (score, label) in enumerate(zip(scores, labels, strict=True)):
        candidates = np.arange(len(ranked)) != query if gallery is None else slice(None)
        relevant = ranked_labels[candidates] == label
        if relevant.any():
            precisions[query] = _precision(score[candidates], relevant)
    return precisions


def _precision(scores: np.ndarray, relevant: np.ndarray) -> float:
    """Return the mean over the relevant images of the precision at their rank;
    equal scores share a rank.

    This is scikit-learn's average_precision_score, whose input checks take most of its time for a
    single query.
    """
    order = np.argsort(-scores)
    # Index of the last image of each score: images with equal scores are counted together, in any
    # order.
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(relevant[order])[last]
    precisions = hits / (last + 1)
    return float(precisions @ np.diff(hits, prepend=0) / hits[-1])


def _with_gallery(
    features: ArrayLike,
    labels: ArrayLike,
    gallery: ArrayLike | None,
    gallery_labels: ArrayLike | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("expected gallery and gallery_labels together, got one of them")
    queries = feature_matrix(features, images=2 if gallery is None else 1)
    query_labels = label_vector(labels, queries)
    if gallery is None or gallery_labels is None:
        return queries, query_labels, queries, query_labels
    matrix = feature_matrix(gallery, "a gallery")
    return (
        queries,
        query_labels,
        matrix,
        label_vector(gallery_labels, matrix, "gallery_labels"),
    )


def _log_odds(probabilities: ArrayLike, queries: np.ndarray) -> np.ndarray:
    with needed_for("a search for neighbours"):
        from scipy.special import logit

    p = as_array(probabilities, np.float64)
    if p.ndim != 2 or len(p) != len(queries) or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"expected coarse_probabilities from 0 to 1 of shape ({len(queries)}, K), got {p.shape}"
        )
    # Log odds are at most 36, which is large compared with cosines; infinite log odds would hide
    # the cosines.
    eps = np.finfo(p.dtype).eps
    return np.asarray(logit(p.clip(eps, 1 - eps)))
