"""Numbers of a recording on which types of heads depend,
on common axes, and the reasons why some are missing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Literal

import numpy as np
import xarray as xr

from tcnn_probe.heads.types import PARTS, PREFIX

__all__ = ["LEAST_IMAGES", "By", "Features", "Rule", "read_features", "read_heads"]

By = Literal["content", "gate"]
Rule = Literal["parts", "gate", "former"]

_FEATURES: Mapping[Rule, Sequence[str]] = {
    "parts": (*PARTS, "selectivity"),
    "gate": (
        "gate",
        "positional_entropy / uniform_entropy",
        "attention_distance / uniform_distance",
    ),
    "former": (
        "content_information / log keys",
        "entropy / uniform_entropy",
        "attention_distance / uniform_distance",
        "translation_equivariance",
    ),
}
LEAST_IMAGES = 8
"""Number of images from which on types are given.

In a DINOv2 ViT-S/14, 82 to 92 % of heads have the type from 8 photographs that they have from 160,
and 97 to 99 % from 64.
"""
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
            causes = [self.missing.get(name.split(" ")[0], {}).get(layer) for name in self.names]
            reasons = []
            if not exists.any():
                reason = next(filter(None, causes), "nothing finite is recorded of it")
                reasons.append(f"what types follow from is not recorded ({reason})")
            undefined = (
                ~np.isfinite(self.points[..., number, :, :])
                & (exists & unlabelled[..., number, :])[..., None]
            )
            for feature, (name, cause) in enumerate(zip(self.names, causes, strict=True)):
                if undefined[..., feature].any():
                    reasons.append(f"{name}: {cause}" if cause else f"{name} is not finite")
            if reasons:
                by_layer[layer] = "; ".join(reasons)
        return by_layer


def read_features(ds: xr.Dataset, rule: Rule, least_images: int) -> Features:
    """Extract the features of a recording that :func:`read_heads` has read.

    Information on content is NaN where it was measured from fewer than ``least_images`` images.
    """
    names = _FEATURES[rule]
    variables = [name.split(" ")[0] for name in names]
    enough = xr.ones_like(ds.uniform_entropy, bool)
    if rule != "gate":  # the gate is a parameter, which is known without images
        enough = ds.images >= least_images
    # For GPSA this is the log of the number of real pixels, because its content part does not reach
    # the padding.
    keys = ds.get("uniform_content_entropy", ds.uniform_entropy)
    keys = keys.fillna(ds.uniform_entropy)
    scales = {
        "positional_entropy": ds.uniform_entropy,
        "attention_distance": ds.get("uniform_distance"),
        "entropy": keys,
        "content_information": keys,
    }
    of_images = {*PARTS, "content_information"}
    features = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for name in variables:
            feature = ds[name] / scales[name] if name in scales else ds[name]
            features.append(feature.where(enough) if name in of_images else feature)
    like = ds[variables[-1]]
    # A head exists if any of its numbers is finite at any mark.
    finite: list[Any] = [np.isfinite(ds[name]) for name in variables]
    exists: xr.DataArray = reduce(or_, finite)
    exists = exists.any(exists.dims[:-2])
    *features, exists = (
        array.broadcast_like(like).transpose(*like.dims) for array in (*features, exists)
    )
    missing = json.loads(ds.attrs.get("missing", "{}"))
    few = (~enough).any([dim for dim in enough.dims if dim != "layer"])
    reason = (
        f"it was measured from fewer than {least_images} images: give more to each "
        "mark, or a smaller least_images"
    )
    for name in of_images & {*variables}:
        reasons = dict.fromkeys(map(str, ds.layer.values[few]), reason)
        missing[name] = reasons | missing.get(name, {})
    points = np.stack([feature.values for feature in features], -1)
    return Features(points, exists, missing, names)


def read_heads(ds: xr.Dataset, rule: Rule) -> xr.Dataset:
    """Load the variables that a rule requires,
    with the dims (marks, "layer", "head"); raise if one is missing.
    """
    names = [name.split(" ")[0] for name in _FEATURES[rule]]
    required = [*names, "uniform_entropy", *(["images"] if rule != "gate" else [])]
    required += ["uniform_distance"] if rule != "parts" else []
    for name in required:
        if name not in ds:
            hint = "; by='gate' does without" * (rule != "gate" and "gate" in ds)
            got = [str(name) for name in ds.data_vars]
            raise ValueError(
                f"types expect {name!r} in the dataset, got the variables {got}: {_RECORD}{hint}"
            )
    for dim in ("layer", "head"):
        if dim not in ds.coords:
            raise ValueError(f"expected the coordinate {dim!r}, as recorded, got {list(ds.coords)}")
    optional = {
        "images", "uniform_content_entropy", "class_selectivity", "class_content_information",
        PREFIX, *(f"{part}_halves" for part in (*PARTS, PREFIX)),
    } & {*map(str, ds.data_vars)}  # fmt: skip
    ds = ds[[*dict.fromkeys([*required, *sorted(optional)])]].compute()
    for dim in ("head", "layer"):
        if dim not in ds.dims:  # a single layer or head was selected
            ds = ds.expand_dims(dim)
    return ds.transpose(..., "layer", "head")
