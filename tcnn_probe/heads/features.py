"""Features of heads on which types depend: information, entropies and distances, as shares of their bounds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal

import numpy as np
import xarray as xr

__all__ = ["FEATURES", "LEAST_IMAGES", "By", "Features", "features_of"]

By = Literal["content", "gate"]

FEATURES: Mapping[By, Sequence[str]] = {
    "content": (
        "content_information / log keys",
        "entropy / uniform_entropy",
        "attention_distance / uniform_distance",
        "translation_equivariance",
    ),
    "gate": (
        "gate",
        "positional_entropy / uniform_entropy",
        "attention_distance / uniform_distance",
    ),
}
"""Features on which types depend, in the order of the points."""
LEAST_IMAGES = 8
"""Number of images from which on types do not depend on the number of images.

In untrained networks and with simulated logits, the estimate of content information from eight images has little
scatter, and is a quarter too low for strong content; from two images it can be half or twice the true value.
"""
_SCALES = ("uniform_entropy", "uniform_distance")
_RECORD = "tcnn_probe.record(model) records it of GPSA, ConViT and softmax attention"


@dataclass(frozen=True)
class Features:
    """Features of every head of a recording."""

    points: np.ndarray  # (..., F) for F features; NaN where there is no head
    # bool, dims (marks, "layer", "head"): layers may have different numbers of heads.
    exists: xr.DataArray
    # Reasons why the recording lacks a variable, by variable and layer.
    missing: Mapping[str, Mapping[str, str]]
    names: Sequence[str]  # names of the features

    def reasons(self, unlabelled: np.ndarray) -> dict[str, str]:
        """Return the reasons why heads have no label, by layer."""
        by_layer = {}
        for number, layer in enumerate(map(str, self.exists.layer.values)):
            exists = self.exists.values[..., number, :]
            reasons = [] if exists.any() else ["nothing finite is recorded of it"]
            undefined = (
                ~np.isfinite(self.points[..., number, :, :])
                & (exists & unlabelled[..., number, :])[..., None]
            )
            for feature, name in enumerate(self.names):
                if undefined[..., feature].any():
                    cause = self.missing.get(name.split(" ")[0], {}).get(layer)
                    reasons.append(
                        f"{name} is not finite" + (f" ({cause})" if cause else "")
                    )
            if reasons:
                by_layer[layer] = "; ".join(reasons)
        return by_layer


def features_of(ds: xr.Dataset, by: By, least_images: int = LEAST_IMAGES) -> Features:
    """Extract the features of a recording; raise ValueError if a variable or coordinate is missing.

    Content information is NaN where it was measured from fewer than ``least_images`` images.
    """
    names = FEATURES[by]
    variables = [name.split(" ")[0] for name in names]
    ds = _load(ds, [*variables, *_SCALES, *(["images"] if by == "content" else [])], by)
    distance = ds.attention_distance
    scales = {
        "positional_entropy": ds.uniform_entropy,
        "attention_distance": ds.uniform_distance,
    }
    if by == "content":
        # For GPSA this is the log of the number of real pixels, because its content part does not reach the padding.
        keys = ds.get("uniform_content_entropy", ds.uniform_entropy).fillna(
            ds.uniform_entropy
        )
        scales["entropy"] = keys
        # log min(images, keys) would be a tighter bound, but types would then depend on the number of images.
        scales["content_information"] = keys.where(ds.images >= least_images)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [
            ds[name] / scales[name] if name in scales else ds[name]
            for name in variables
        ]
    # A head exists if any of its numbers is finite at any mark.
    exists = reduce(or_, (np.isfinite(ds[name]) for name in variables)).any(
        distance.dims[:-2]
    )
    *features, exists = (
        array.broadcast_like(distance).transpose(*distance.dims)
        for array in (*shares, exists)
    )
    missing = json.loads(ds.attrs.get("missing", "{}"))
    if by == "content":
        few = (ds.images < least_images).any(
            [dim for dim in ds.images.dims if dim != "layer"]
        )
        reason = (
            f"it was measured from fewer than {least_images} images: give more to each "
            "mark, or a smaller least_images"
        )
        reasons = dict.fromkeys(map(str, ds.layer.values[few]), reason)
        missing["content_information"] = reasons | missing.get(
            "content_information", {}
        )
    return Features(
        np.stack([feature.values for feature in features], -1), exists, missing, names
    )


def _load(ds: xr.Dataset, required: Sequence[str], by: By) -> xr.Dataset:
    """Load the required variables, with the dims (marks, "layer", "head")."""
    if not isinstance(ds, xr.Dataset):
        hint = (
            "; of a tree, tree['heads'].dataset" if isinstance(ds, xr.DataTree) else ""
        )
        raise TypeError(
            f"expected an xarray.Dataset that tcnn_probe.record has made{hint}, got {type(ds).__name__}"
        )
    for name in required:
        if name not in ds:
            hint = (
                "; by='gate' does without" if by == "content" and "gate" in ds else ""
            )
            got = [str(name) for name in ds.data_vars]
            raise ValueError(
                f"by={by!r} expects {name!r} in the dataset, got the variables {got}: {_RECORD}{hint}"
            )
    for dim in ("layer", "head"):
        if dim not in ds.coords:
            raise ValueError(
                f"expected the coordinate {dim!r}, as recorded, got {list(ds.coords)}"
            )
    ds = ds[
        [*dict.fromkeys(required), *({"uniform_content_entropy"} & set(ds.data_vars))]
    ].compute()
    for dim in ("head", "layer"):
        if dim not in ds.dims:  # a single layer or head was selected
            ds = ds.expand_dims(dim)
    return ds.transpose(..., "layer", "head")
