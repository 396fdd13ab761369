"""Numbers that types of heads depend on: information, entropies and distances, as shares of what they can be."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal

import numpy as np
import xarray as xr

__all__ = ["FEATURES", "By", "Features", "features_of"]

By = Literal["content", "gate"]

FEATURES: Mapping[By, Sequence[str]] = {
    "content": (
        "content_information / log min(images, keys)",
        "entropy / uniform_entropy",
        "attention_distance / uniform_distance",
        "translation_equivariance",
    ),
    "gate": ("gate", "positional_entropy / uniform_entropy", "attention_distance / uniform_distance"),
}
"""What types depend on, in the order of the points."""
_SCALES = ("uniform_entropy", "uniform_distance")
_RECORD = "tcnn_probe.record(model) records it of GPSA, ConViT and softmax attention"


@dataclass(frozen=True)
class Features:
    """What is known of every head."""

    points: np.ndarray  # (..., F), of F features; NaN where there is no head
    there: xr.DataArray  # which heads there are, with the dims (marks, "layer", "head")
    recorded: Mapping[str, Mapping[str, str]]  # why the recording lacks a variable, by variable and layer
    names: Sequence[str]  # of the features

    def reasons(self, unlabelled: np.ndarray) -> dict[str, str]:
        """By layer, why it, or some of its heads, have no label."""
        why = {}
        for at, layer in enumerate(map(str, self.there.layer.values)):
            there = self.there.values[..., at, :]
            told = [] if there.any() else ["nothing finite is recorded of it"]
            lacks = ~np.isfinite(self.points[..., at, :, :]) & (there & unlabelled[..., at, :])[..., None]
            for feature, name in enumerate(self.names):
                if lacks[..., feature].any():
                    known = self.recorded.get(name.split(" ")[0], {}).get(layer)
                    told.append(f"{name} is not finite" + (f" ({known})" if known else ""))
            if told:
                why[layer] = "; ".join(told)
        return why


def features_of(ds: xr.Dataset, by: By) -> Features:
    """Take the features out of a recording; ValueError if a variable or coordinate that is needed is missing."""
    names = FEATURES[by]
    of_heads = [name.split(" ")[0] for name in names]
    found = _loaded(ds, [*of_heads, *_SCALES, *(["images"] if by == "content" else [])], by)
    like = found.attention_distance
    scales = {"positional_entropy": found.uniform_entropy, "attention_distance": found.uniform_distance}
    if by == "content":
        real = found.get("uniform_content_entropy", found.uniform_entropy)  # over real pixels, without the padding
        scales["entropy"] = keys = real.fillna(found.uniform_entropy)
        scales["content_information"] = np.minimum(np.log(found.images.where(found.images >= 1)), keys)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [found[name] / scales[name] if name in scales else found[name] for name in of_heads]
    there = reduce(or_, (np.isfinite(found[name]) for name in of_heads)).any(like.dims[:-2])
    arrays = [one.broadcast_like(like).transpose(*like.dims) for one in (*shares, there)]
    recorded = json.loads(ds.attrs.get("missing", "{}"))
    if by == "content":
        single = found.layer.values[(found.images == 1).any([dim for dim in found.images.dims if dim != "layer"])]
        why = "of one image nothing is known: give at least two to each mark"
        recorded["content_information"] = dict.fromkeys(map(str, single), why) | recorded.get("content_information", {})
    return Features(np.stack([one.values for one in arrays[:-1]], -1), arrays[-1], recorded, names)


def _loaded(ds: xr.Dataset, needed: Sequence[str], by: By) -> xr.Dataset:
    """The variables that count, in memory, with the dims (marks, "layer", "head")."""
    if not isinstance(ds, xr.Dataset):
        what = "; of a tree, tree['heads'].dataset" if isinstance(ds, xr.DataTree) else ""
        raise TypeError(f"expected an xarray.Dataset that tcnn_probe.record has made{what}, got {type(ds).__name__}")
    for name in needed:
        if name not in ds:
            other = "; by='gate' does without" if by == "content" and "gate" in ds else ""
            got = [str(name) for name in ds.data_vars]
            raise ValueError(f"by={by!r} expects {name!r} in the dataset, got the variables {got}: {_RECORD}{other}")
    for dim in ("layer", "head"):
        if dim not in ds.coords:
            raise ValueError(f"expected the coordinate {dim!r}, as recorded, got {list(ds.coords)}")
    found = ds[[*dict.fromkeys(needed), *({"uniform_content_entropy"} & set(ds.data_vars))]].compute()
    for dim in ("head", "layer"):
        if dim not in found.dims:
            found = found.expand_dims(dim)
    return found.transpose(..., "layer", "head")
