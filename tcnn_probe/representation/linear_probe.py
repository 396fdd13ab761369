"""Linear probes of frozen features: classes by logistic regression."""

import numpy as np
from numpy.typing import ArrayLike

from tcnn_probe.extras import needed_for
from tcnn_probe.representation.arrays import feature_matrix, label_vector

__all__ = ["linear_probe_correct"]


def linear_probe_correct(
    features: ArrayLike,
    labels: ArrayLike,
    train_features: ArrayLike,
    train_labels: ArrayLike,
    *,
    regularization: float = 1.0,
) -> np.ndarray:
    """Classify images by a linear classifier that is fitted to other images;
    the mean of the result is its accuracy.

    The classifier is scikit-learn's logistic regression on features of zero mean and unit variance.

    Args:
        features, labels: Images to classify, shapes (n, ...) and (n,).
        train_features, train_labels: Images to fit, shapes (m, ...) and (m,).
        regularization: Weight of the L2 penalty, 1 / C of scikit-learn.

    Returns:
        Right answers, bool, shape (n,).

    Raises:
        ValueError: Shapes do not fit, features are not finite, or there is a single class.
    """
    with needed_for("a linear probe"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

    train, test = (
        feature_matrix(train_features, "train_features"),
        feature_matrix(features),
    )
    # lbfgs stops when it has converged, for which its default of 100 iterations is too low with
    # many channels.
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1 / regularization, max_iter=5000))
    model.fit(train, label_vector(train_labels, train, "train_labels"))
    return np.asarray(model.predict(test) == label_vector(labels, test))
