"""How well a linear classifier reads classes off features that are not trained any more."""

import numpy as np
from numpy.typing import ArrayLike

from tcnn_probe.representation.arrays import as_features, as_labels

__all__ = ["linear_probe_correct"]


def linear_probe_correct(
    features: ArrayLike,
    labels: ArrayLike,
    train_features: ArrayLike,
    train_labels: ArrayLike,
    *,
    regularization: float = 1.0,
) -> np.ndarray:
    """Test a linear classifier, fitted to other images' features, on these; the mean is its accuracy.

    scikit-learn's logistic regression on features of zero mean and unit variance.

    Args:
        features, labels: to be classified, shapes (n, ...) and (n,).
        train_features, train_labels: to fit, shapes (m, ...) and (m,).
        regularization: weight of the L2 penalty, 1 / C of scikit-learn.

    Returns:
        bool, shape (n,).

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, a single class.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, test = as_features(train_features, "train_features"), as_features(features)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1 / regularization, max_iter=5000))
    model.fit(train, as_labels(train_labels, train, "train_labels"))
    return np.asarray(model.predict(test) == as_labels(labels, test))
