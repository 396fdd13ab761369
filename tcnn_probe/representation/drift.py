"""Drift: distances between features of the same images in different epochs or models."""

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from tcnn_probe.representation.arrays import as_array
from tcnn_probe.representation.by_layer import (
    load_features,
    own_channels,
    with_descriptions,
)
from tcnn_probe.representation.cka import linear_cka

__all__ = ["gram_distance", "layer_drift"]

_ABOUT = {
    "gram_distance": (
        "Gram distance",
        "Root mean square difference of the cosines between patches from those of the reference; "
        "its square is the Gram loss of DINOv3.",
    ),
    "cka": (
        "linear CKA",
        "Debiased linear CKA of a layer's mean features with those of the reference.",
    ),
}
# The estimate of HSIC divides by n - 3, so it needs four images.
_CKA_IMAGES = 4


def gram_distance(tokens: ArrayLike, others: ArrayLike) -> NDArray[np.float64]:
    """Compute how much the cosines between the patches
    of an image differ between two representations.

    The distance is ``|G(x) - G(y)|_F / N``, where G(x) is the N x N matrix of cosines between the N
    patches of an image: the root mean square difference of these cosines, from 0 to 2. It does not
    change if all features are rotated or scaled. Its square is the Gram loss of DINOv3 (arXiv
    2508.10104, Section 4.2), as a mean over pairs of patches.

    Args:
        tokens, others: The same N >= 2 patches in two representations, shapes (..., N, C) and (...,
            N, C').

    Returns:
        Distances in float64, shape (...,); NaN where features are not finite. A patch of zeros has
        the cosine 0 with all patches.

    Raises:
        ValueError: There are fewer than two patches, or the numbers of images or patches differ.
    """
    x, y = as_array(tokens, np.float64), as_array(others, np.float64)
    if x.ndim < 2 or x.shape[-2] < 2 or x.shape[:-1] != y.shape[:-1]:
        raise ValueError(
            "expected the same two or more tokens twice, shapes (..., N, C) and (..., N, C'), got "
            f"{x.shape} and {y.shape}"
        )
    # Products of channels (C x C) would cost less for many patches, but small distances would be
    # lost by cancellation.
    distances = [
        np.sqrt(np.mean((_cosines(x[image]) - _cosines(y[image])) ** 2))
        for image in np.ndindex(x.shape[:-2])
    ]
    return np.array(distances).reshape(x.shape[:-2])


def layer_drift(features: xr.DataArray, reference: xr.DataArray) -> xr.Dataset:
    """Measure how far the features of each layer are from those of a reference, at each epoch.

    ::

        probe = tcnn_probe.features(["blocks.11"], images=16, tokens=range(1, 197))
        with tcnn_probe.record(model, "run.zarr", probes=[*tcnn_probe.DEFAULT, probe]) as recorder:
            ...
        features = recorder.tree["features"].feature
        drift = tcnn_probe.representation.layer_drift(features, features.sel(epoch=0))
        drift.cka.plot.line(x="epoch")

    Args:
        features: Features with the dims "image", "token" and "channel", and any others, as the
            probe ``features`` records them: the mean over positions, and two patches or more. They
            should not include a class token.
        reference: Features of the same images and tokens, of an epoch or of another model. Common
            dims, such as "layer", are paired; if the dim "epoch" of the reference is renamed, all
            pairs of epochs are compared.

    Returns:
        ``gram_distance`` with the dim "image" and the others (:func:`gram_distance`), ``cka`` with
        the others (:func:`linear_cka`, of the mean features). NaN where the features of an image
        are missing or infinite; the CKA also if there are fewer than four images.

    Raises:
        ValueError: The features lack these dims or tokens, or have other images, tokens or layers
            than the reference.
    """
    pair = [load_features(features), load_features(reference)]
    for number, array in enumerate(pair):
        tokens = array["token"].values.tolist() if "token" in array.dims else []
        if "mean" not in tokens or len(tokens) < 3:
            raise ValueError(
                "expected the mean and two patches or more along 'token', as of "
                f"features(tokens=range(1, 197)), got {tokens}"
            )
        # A label that only one side has, such as the selected epoch, is not a label of the
        # distance.
        pair[number] = array.reset_coords(drop=True)
    x, y = pair[0], pair[1].rename(channel="other_channel")
    patches = [array.drop_sel(token="mean") for array in (x, y)]
    means = [array.sel(token="mean", drop=True) for array in (x, y)]
    try:
        distances = xr.apply_ufunc(
            _image_distance,
            *patches,
            input_core_dims=[["token", "channel"], ["token", "other_channel"]],
            vectorize=True,
        )
        cka = xr.apply_ufunc(
            _cka,
            *means,
            input_core_dims=[["image", "channel"], ["image", "other_channel"]],
            vectorize=True,
        )
    except ValueError as error:  # from xarray's alignment
        raise ValueError(
            f"expected a reference of the same images, tokens and layers: {error}"
        ) from error
    return with_descriptions(xr.Dataset({"gram_distance": distances, "cka": cka}), _ABOUT)


def _cosines(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosines between tokens, (N, C) -> (N, N)."""
    lengths = np.linalg.norm(tokens, axis=-1, keepdims=True)
    units = tokens / (lengths + (lengths == 0))
    return units @ units.T


def _image_distance(tokens: np.ndarray, others: np.ndarray) -> float:
    x, y = own_channels(tokens), own_channels(others)
    return np.nan if x is None or y is None else float(gram_distance(x, y))


def _cka(features: np.ndarray, others: np.ndarray) -> float:
    x, y = own_channels(features), own_channels(others)
    if x is None or y is None or len(x) < _CKA_IMAGES:
        return np.nan
    return linear_cka(x, y)
