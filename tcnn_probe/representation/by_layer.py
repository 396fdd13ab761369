"""The same for recorded features: labelled by epoch and layer."""

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from tcnn_probe.representation.cka import linear_cka
from tcnn_probe.representation.neighbors import knn_correct
from tcnn_probe.representation.spectrum import participation_ratio

__all__ = ["layer_cka", "layer_scores"]

_ABOUT = {
    "knn_correct": ("kNN accuracy", "Whether the nearest other images name the image's class (thesis, Eq. 2.6)."),
    "participation_ratio": ("participation ratio", "Effective number of principal components."),
}


def layer_scores(features: xr.DataArray, labels: ArrayLike, *, neighbors: int = 20) -> xr.Dataset:
    """Score the features of each layer, at each epoch: what they know of the classes, how many directions they fill.

    ::

        features = recorder.tree["features"].feature.sel(token="mean")
        scores = tcnn_probe.representation.layer_scores(features, labels)
        scores.knn_correct.mean("image").plot.line(x="epoch")

    Args:
        features: with the dims "image" and "channel" and any others; NaN beyond a layer's own channels. Loaded as
            a whole.
        labels: of the images, shape (image,).
        neighbors: as of :func:`knn_correct`.

    Returns:
        ``knn_correct`` with the dim "image" and the others, ``participation_ratio`` with the others; NaN where the
        features of an image are missing, or infinite as float16 has them of large numbers.
    """
    features = _loaded(features)
    images = features.sizes["image"]

    def scores(x: np.ndarray) -> tuple[np.ndarray, float]:
        x = x[:, ~np.isnan(x).all(0)]
        if not x.size or not np.isfinite(x).all():
            return np.full(images, np.nan), np.nan
        return knn_correct(x, labels, neighbors=neighbors).astype(float), participation_ratio(x)

    dims = [["image"], []]
    values = xr.apply_ufunc(
        scores, features, input_core_dims=[["image", "channel"]], output_core_dims=dims, vectorize=True
    )
    found = xr.Dataset(dict(zip(_ABOUT, values, strict=True)))
    for name, (long_name, description) in _ABOUT.items():
        found[name].attrs = {"units": "1", "long_name": long_name, "description": description}
    return found


def layer_cka(features: xr.DataArray, others: xr.DataArray | None = None) -> xr.DataArray:
    """Compare each layer's features with each other one's: debiased linear CKA (:func:`linear_cka`).

    Args:
        features: with the dims "layer", "image" and "channel", and any others, such as "epoch".
        others: of the same images, such as those of another model; None: the same features. Dims that both have, such
            as "epoch", go together; one without "epoch" is compared with all.

    Returns:
        dims "layer", "other_layer" and the others; NaN where the features of an image are missing or infinite.
    """
    features, others = (_loaded(features if one is None else one) for one in (features, others))

    def cka(x: np.ndarray, y: np.ndarray) -> float:
        x, y = (one[:, ~np.isnan(one).all(0)] for one in (x, y))
        return linear_cka(x, y) if x.size and y.size and np.isfinite(x).all() and np.isfinite(y).all() else np.nan

    found = xr.apply_ufunc(
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
    return found.rename("cka").assign_attrs(about)


def _loaded(features: xr.DataArray) -> xr.DataArray:
    if not isinstance(features, xr.DataArray) or not {"image", "channel"} <= {*features.dims}:
        got = features.dims if isinstance(features, xr.DataArray) else type(features).__name__
        raise ValueError(f"expected features, a DataArray with the dims 'image' and 'channel', got {got}")
    return features.compute()  # dask's too
