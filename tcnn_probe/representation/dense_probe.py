"""How well a linear classifier reads what each pixel shows off feature maps that are not trained any more."""

from collections.abc import Mapping

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from tcnn_probe.representation.arrays import as_features

__all__ = ["dense_probe", "layer_dense_probe"]


def dense_probe(
    features: ArrayLike,
    masks: ArrayLike,
    train_features: ArrayLike,
    train_masks: ArrayLike,
    *,
    regularization: float = 1.0,
    by_image: bool = False,
) -> np.ndarray:
    """Intersection over union of each class, as a linear classifier of pixels finds it; the mean is the mIoU.

    scikit-learn's logistic regression on features of zero mean and unit variance. A pixel has the features of its cell,
    so each cell counts once for each class in it, with the number of pixels of this class as its weight.

    ::

        trunk = timm.create_model("resnet50", features_only=True, pretrained=True).eval()
        maps = trunk(images)[-1]  # (n, C, h, w)
        dense_probe(maps[100:], masks[100:], maps[:100], masks[:100]).mean()

    Args:
        features: feature maps to classify, shape (n, C, h, w).
        masks: the class of each pixel, integers or booleans, shape (n, H, W); H and W are multiples of h and w.
        train_features, train_masks: to fit, shapes (m, C, h, w) and (m, H, W).
        regularization: weight of the L2 penalty, 1 / C of scikit-learn, on a loss that is summed over pixels.
        by_image: Score each image, for :func:`tcnn_probe.evaluation.mean_interval`, not all pixels together.

    Returns:
        shape (K,), or (n, K) by image, for the classes of both masks in ascending order: pixels that are of the class
        and are classified so, divided by those that are one of both. From 0 to 1; by image NaN where there are none.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, a single class.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import jaccard_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    cells, pixels = _cells(features, masks, "")
    train_cells, train_pixels = _cells(train_features, train_masks, "train_")
    classes, found = np.unique(train_pixels), np.unique(pixels)
    counts = np.stack([(train_pixels == one).sum(1) for one in classes], 1)  # (cells, K)
    cell, of_class = counts.nonzero()
    weight = counts[cell, of_class]
    scaler, classifier = StandardScaler(), LogisticRegression(C=1 / regularization, max_iter=5000)
    weights = {"standardscaler__sample_weight": weight, "logisticregression__sample_weight": weight}
    model = make_pipeline(scaler, classifier).fit(train_cells[cell], classes[of_class], **weights)
    named, labels = np.repeat(model.predict(cells), pixels.shape[1]), np.union1d(classes, found)
    count = len(np.asarray(masks)) if by_image else 1
    shown, taken = (  # a column for each image and class: one call for all
        (each.reshape(count, -1).T[:, :, None] == labels).reshape(-1, count * len(labels)) for each in (pixels, named)
    )
    iou = jaccard_score(shown, taken, average=None, zero_division=0).reshape(count, -1)
    if not by_image:
        return np.asarray(iou[0])
    return np.where((shown | taken).any(0).reshape(iou.shape), iou, np.nan)


def layer_dense_probe(
    features: Mapping[str, ArrayLike],
    masks: ArrayLike,
    train_features: Mapping[str, ArrayLike],
    train_masks: ArrayLike,
    *,
    regularization: float = 1.0,
) -> xr.DataArray:
    """:func:`dense_probe` of each layer; all layers are judged by the same pixels, whatever their grids.

    Args:
        features, train_features: feature maps by the layer's name.
        masks, train_masks, regularization: as of :func:`dense_probe`.

    Returns:
        dims "layer" and "class".

    Raises:
        ValueError: other layers to fit than to judge, or as of :func:`dense_probe`.
    """
    if not features or features.keys() != train_features.keys():
        raise ValueError(f"expected the same layers to fit and to judge, got {[*train_features]} and {[*features]}")
    found = [
        dense_probe(maps, masks, train_features[name], train_masks, regularization=regularization)
        for name, maps in features.items()
    ]
    coords = {"layer": list(features), "class": np.union1d(masks, train_masks)}
    about = {
        "units": "1",
        "long_name": "intersection over union",
        "description": "Pixels of the class that a linear classifier of the layer's features finds, divided by those "
        "that are of the class or are taken for it.",
    }
    return xr.DataArray(np.stack(found), coords, ("layer", "class"), "iou", about)


def _cells(features: ArrayLike, masks: ArrayLike, which: str) -> tuple[np.ndarray, np.ndarray]:
    """Features of each cell, (cells, C), and the classes of its pixels, (cells, pixels of a cell)."""
    maps, classes = np.asarray(features, dtype=np.float64), np.asarray(masks)
    if maps.ndim != 4 or classes.shape[:1] != maps.shape[:1] or classes.ndim != 3:
        expected = f"expected {which}features (n, C, h, w) and {which}masks (n, H, W)"
        raise ValueError(f"{expected}, got the shapes {maps.shape} and {classes.shape}")
    (n, channels, h, w), (height, width) = maps.shape, classes.shape[1:]
    if height % h or width % w:
        raise ValueError(
            f"expected {which}masks whose sides are multiples of {h} and {w}, got {height} and {width}: resize them"
        )
    pixels = classes.reshape(n, h, height // h, w, width // w).transpose(0, 1, 3, 2, 4)
    cells = maps.transpose(0, 2, 3, 1).reshape(-1, channels)
    return as_features(cells, f"{which}features"), pixels.reshape(len(cells), -1)
