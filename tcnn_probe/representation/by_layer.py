"""Measures of recorded features, labelled by epoch and layer."""

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from tcnn_probe.representation.cka import linear_cka
from tcnn_probe.representation.neighbors import knn_correct
from tcnn_probe.representation.spectrum import participation_ratio

__all__ = ["layer_cka", "layer_scores"]

_ABOUT = {
    "knn_correct": (
        "kNN accuracy",
        "Whether a vote of the nearest other images gives the image's class (thesis, Eq. 2.6).",
    ),
    "participation_ratio": (
        "participation ratio",
        "Effective number of principal components.",
    ),
}


def layer_scores(features: xr.DataArray, labels: ArrayLike, *, neighbors: int = 20) -> xr.Dataset:
    """Score each layer's features at each epoch: kNN accuracy and effective number of dimensions.

    ::

        features = recorder.tree["features"].feature.sel(token="mean")
        scores = tcnn_probe.representation.layer_scores(features, labels)
        scores.knn_correct.mean("image").plot.line(x="epoch")

    Args:
        features: Features with the dims "image" and "channel" and any others, NaN beyond a layer's
            own channels. They are loaded into memory.
        labels: Classes of the images, shape (image,).
        neighbors: Number of neighbours; see :func:`knn_correct`.

    Returns:
        ``knn_correct`` with the dim "image" and the others, ``participation_ratio`` with the
        others. NaN where the features of an image are missing, or infinite because large numbers
        overflow in float16.
    """
    features = features.compute()
    images = features.sizes["image"]

    def scores(values: np.ndarray) -> tuple[np.ndarray, float]:
        matrix = _own_channels(values)
        if matrix is None:
            return np.full(images, np.nan), np.nan
        # The result is a float, because NaN stands for missing features.
        return knn_correct(matrix, labels, neighbors=neighbors).astype(float), participation_ratio(
            matrix
        )

    arrays = xr.apply_ufunc(
        scores,
        features,
        input_core_dims=[["image", "channel"]],
        output_core_dims=[["image"], []],
        vectorize=True,
    )
    ds = xr.Dataset(dict(zip(_ABOUT, arrays, strict=True)))
    for name, (long_name, description) in _ABOUT.items():
        ds[name].attrs = {"units": "1", "long_name": long_name, "description": description}
    return ds


def layer_cka(features: xr.DataArray, others: xr.DataArray | None = None) -> xr.DataArray:
    """Compare the features of all pairs of layers by debiased linear CKA (:func:`linear_cka`).

    Args:
        features: Features with the dims "layer", "image" and "channel", and any others, such as
            "epoch".
        others: Features of the same images, for example from another model; None for the same
            features. Common dims, such as "epoch", are paired; features without "epoch" are
            compared with all epochs.

    Returns:
        CKA with the dims "layer", "other_layer" and the others; NaN where the features of an image
        are missing or infinite.
    """
    features = features.compute()
    others = features if others is None else others.compute()

    def cka(values: np.ndarray, other_values: np.ndarray) -> float:
        x, y = _own_channels(values), _own_channels(other_values)
        return np.nan if x is None or y is None else linear_cka(x, y)

    values = xr.apply_ufunc(
        cka,
        features,
        others.rename(layer="other_layer", channel="other_channel"),
        input_core_dims=[["image", "channel"], ["image", "other_channel"]],
        vectorize=True,
    )
    about = {
        "units": "1",
        "long_name": "linear CKA",
        "description": "Debiased linear CKA of the features of two layers.",
    }
    return values.rename("cka").assign_attrs(about)


def _own_channels(values: np.ndarray) -> np.ndarray | None:
    """Drop the channels beyond a layer's own, (image, channel);
    return None if a number is missing or infinite.
    """
    # Padding is NaN for all images; a channel that is NaN for some images has missing features.
    matrix = values[:, ~np.isnan(values).all(0)]
    return matrix if matrix.size and np.isfinite(matrix).all() else None
