"""Linear probes of frozen features: classes of images and of pixels by logistic regression."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from tcnn_probe.extras import needed_for
from tcnn_probe.representation.arrays import as_array, feature_matrix, label_vector

__all__ = ["dense_probe", "layer_dense_probe", "linear_probe_correct"]


def _classifier(regularization: float) -> Any:
    """Return scikit-learn's logistic regression on features of zero mean and unit variance."""
    with needed_for("a linear probe"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

    # lbfgs stops when it has converged, for which its default of 100 iterations is too low with
    # many channels.
    return make_pipeline(StandardScaler(), LogisticRegression(C=1 / regularization, max_iter=5000))


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
    train, test = feature_matrix(train_features, "train_features"), feature_matrix(features)
    model = _classifier(regularization).fit(
        train, label_vector(train_labels, train, "train_labels")
    )
    return np.asarray(model.predict(test) == label_vector(labels, test))


def dense_probe(
    features: ArrayLike,
    masks: ArrayLike,
    train_features: ArrayLike,
    train_masks: ArrayLike,
    *,
    regularization: float = 1.0,
    by_image: bool = False,
) -> np.ndarray:
    """Measure the intersection over union of each class,
    segmented by a linear classifier; the mean is the mIoU.

    The classifier is scikit-learn's logistic regression on features of zero mean and unit variance.
    A pixel has the features of its cell, so each cell counts once for each class in it, weighted by
    its number of pixels in the class.

    ::

        trunk = timm.create_model("resnet50", features_only=True, pretrained=True).eval()
        maps = trunk(images)[-1]  # (n, C, h, w)
        dense_probe(maps[100:], masks[100:], maps[:100], masks[:100]).mean()

    Args:
        features: Feature maps to classify, shape (n, C, h, w).
        masks: Class of each pixel, integers or booleans, shape (n, H, W); H and W are multiples of
            h and w.
        train_features, train_masks: Feature maps and masks to fit, shapes (m, C, h, w) and (m, H,
            W).
        regularization: Weight of the L2 penalty, 1 / C of scikit-learn, on a loss that is summed
            over pixels.
        by_image: Whether to score each image, for :func:`tcnn_probe.evaluation.mean_interval`,
            instead of all pixels together.

    Returns:
        Intersection over union from 0 to 1, shape (K,), or (n, K) by image, for the classes of both
        masks in ascending order. Scores by image are NaN where neither the mask nor the classifier
        has the class.

    Raises:
        ValueError: Shapes do not fit, features are not finite, or there is a single class.
    """
    with needed_for("a dense probe"):
        from sklearn.metrics import jaccard_score

    cells, pixels = _cells(features, masks, "")
    train_cells, train_pixels = _cells(train_features, train_masks, "train_")
    classes = np.unique(train_pixels)
    # (cells, K): pixels of each class in each cell.
    counts = np.stack([(train_pixels == label).sum(1) for label in classes], 1)
    cell, label_index = counts.nonzero()
    weight = counts[cell, label_index]
    # A cell with pixels of several classes is a sample of each of them, weighted by the number of
    # these pixels.
    weights = {
        "standardscaler__sample_weight": weight,
        "logisticregression__sample_weight": weight,
    }
    model = _classifier(regularization).fit(train_cells[cell], classes[label_index], **weights)
    predictions = np.repeat(model.predict(cells), pixels.shape[1])
    groups = len(as_array(masks)) if by_image else 1
    labels = np.union1d(classes, pixels)
    # With a column for each image and class, jaccard_score is called once instead of once for each
    # image.
    truth, predicted = (
        (values.reshape(groups, -1).T[:, :, None] == labels).reshape(-1, groups * len(labels))
        for values in (pixels, predictions)
    )
    iou = jaccard_score(truth, predicted, average=None, zero_division=0).reshape(groups, -1)
    if not by_image:
        return np.asarray(iou[0])
    # A score of 0 / 0 is not a failure, and becomes NaN.
    return np.where((truth | predicted).any(0).reshape(iou.shape), iou, np.nan)


def layer_dense_probe(
    features: Mapping[str, ArrayLike],
    masks: ArrayLike,
    train_features: Mapping[str, ArrayLike],
    train_masks: ArrayLike,
    *,
    regularization: float = 1.0,
) -> xr.DataArray:
    """Apply :func:`dense_probe` to each layer;
    all layers are evaluated on the same pixels, for any grids.

    Args:
        features, train_features: Feature maps by the layer's name.
        masks, train_masks, regularization: Arguments of :func:`dense_probe`.

    Returns:
        Intersection over union, with the dims "layer" and "class".

    Raises:
        ValueError: The layers to fit and to evaluate differ; or see :func:`dense_probe`.
    """
    if not features or features.keys() != train_features.keys():
        raise ValueError(
            f"expected the same layers to fit and to judge, got {[*train_features]} and "
            f"{[*features]}"
        )
    rows = [
        dense_probe(
            maps,
            masks,
            train_features[name],
            train_masks,
            regularization=regularization,
        )
        for name, maps in features.items()
    ]
    coords = {"layer": list(features), "class": np.union1d(masks, train_masks)}
    about = {
        "units": "1",
        "long_name": "intersection over union",
        "description": "Pixels of the class that a linear classifier of the layer's features "
        "finds, divided by those that are of the class or are taken for it.",
    }
    return xr.DataArray(np.stack(rows), coords, ("layer", "class"), "iou", about)


def _cells(features: ArrayLike, masks: ArrayLike, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return features of the cells, (cells, C),
    and the classes of their pixels, (cells, pixels of a cell).
    """
    maps, classes = as_array(features, np.float64), as_array(masks)
    if maps.ndim != 4 or classes.shape[:1] != maps.shape[:1] or classes.ndim != 3:
        expected = f"expected {prefix}features (n, C, h, w) and {prefix}masks (n, H, W)"
        raise ValueError(f"{expected}, got the shapes {maps.shape} and {classes.shape}")
    (n, channels, h, w), (height, width) = maps.shape, classes.shape[1:]
    if height % h or width % w:
        raise ValueError(
            f"expected {prefix}masks whose sides are multiples of {h} and {w}, got {height} and "
            f"{width}: resize them"
        )
    # (n, h, rows of a cell, w, columns of a cell) to (n, h, w, rows, columns of a cell).
    pixels = classes.reshape(n, h, height // h, w, width // w).transpose(0, 1, 3, 2, 4)
    cells = maps.transpose(0, 2, 3, 1).reshape(-1, channels)
    return feature_matrix(cells, f"{prefix}features"), pixels.reshape(len(cells), -1)
