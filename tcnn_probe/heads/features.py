"""Numbers that types of heads depend on: gates, entropies and distances, these as shares of uniform attention's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
import xarray as xr

__all__ = ["Features", "features_of"]

_OF_HEADS = ("gate", "positional_entropy", "entropy", "attention_distance")
_SCALES = {
    "positional_entropy": "uniform_entropy",
    "entropy": "uniform_entropy",
    "attention_distance": "uniform_distance",
}
_ALWAYS = ("attention_distance", "uniform_entropy", "uniform_distance")
_RECORD = "tcnn_probe.record(model) records it of GPSA, ConViT and softmax attention"


@dataclass(frozen=True)
class Features:
    """What is known of every head: arrays with the same dims, (marks, "layer", "head"), NaN where there is no head.

    Args:
        gated: whether the layer has gates.
        gate: share of positional attention.
        spread: entropy of the positional part, as a share of that of uniform attention.
        evenness: entropy of the whole attention, as a share of that of uniform attention.
        reach: distance of the whole attention, as a share of that of uniform attention.
        why: by layer, what its heads lack for a label.
    """

    gated: xr.DataArray
    gate: xr.DataArray
    spread: xr.DataArray
    evenness: xr.DataArray
    reach: xr.DataArray
    why: Mapping[str, str]


def features_of(ds: xr.Dataset, *, entropies: bool) -> Features:
    """Take the features out of a recording.

    Args:
        ds: a recording, with the dims "layer" and "head" or with these as coordinates.
        entropies: whether the entropy of the whole attention is needed, of layers without gates.

    Raises:
        TypeError: ``ds`` is no dataset.
        ValueError: a variable or coordinate that is needed is missing.
    """
    found = _loaded(ds)
    like = found.attention_distance
    raw = {name: found[name] if name in found else xr.full_like(like, np.nan) for name in _OF_HEADS}
    gated = _gated(found)
    there = reduce(or_, (np.isfinite(one) for one in raw.values())).any(like.dims[:-2])
    if entropies and "entropy" not in found and (~gated & there).any():
        raise ValueError(f"expected 'entropy' in the dataset, which the mixture needs: {_RECORD}")
    shares = {name: one / found[_SCALES[name]] if name in _SCALES else one for name, one in raw.items()}
    arrays = (gated, there, *shares.values())
    gated, there, gate, spread, evenness, reach = (one.broadcast_like(like).transpose(*like.dims) for one in arrays)
    needed = {"gate": (gate, gated), "positional_entropy": (spread, gated), "attention_distance": (reach, there)}
    needed |= {"entropy": (evenness, ~gated)} if entropies else {}
    lacking = {name: there & need & ~np.isfinite(value) for name, (value, need) in needed.items()}
    why = _reasons(lacking, there, json.loads(ds.attrs.get("missing", "{}")))
    return Features(gated, gate, spread, evenness, reach, why)


def _loaded(ds: xr.Dataset) -> xr.Dataset:
    """The variables that count, in memory, with the dims (marks, "layer", "head")."""
    if not isinstance(ds, xr.Dataset):
        what = "; of a tree, tree['heads'].dataset" if isinstance(ds, xr.DataTree) else ""
        raise TypeError(f"expected an xarray.Dataset that tcnn_probe.record has made{what}, got {type(ds).__name__}")
    for name in _ALWAYS:
        if name not in ds:
            raise ValueError(f"expected {name!r} in the dataset, got {_names(ds)}: {_RECORD}")
    for dim in ("layer", "head"):
        if dim not in ds.coords:
            raise ValueError(f"expected the coordinate {dim!r}, as recorded, got {list(ds.coords)}")
    found = ds[[name for name in dict.fromkeys((*_OF_HEADS, *_SCALES.values())) if name in ds]].compute()
    for dim in ("head", "layer"):
        if dim not in found.dims:
            found = found.expand_dims(dim)
    return found.transpose(..., "layer", "head")


def _gated(found: xr.Dataset) -> xr.DataArray:
    """Whether each layer has gates: dims ("layer",)."""
    of_gated = [name for name in ("gate", "positional_entropy") if name in found]
    known = [found[name].notnull() for name in of_gated] or [xr.zeros_like(found.attention_distance, dtype=bool)]
    gated = reduce(or_, (one.any([dim for dim in one.dims if dim != "layer"]) for one in known))
    if gated.any() and len(of_gated) < 2:
        lacks = "gate" if "gate" not in found else "positional_entropy"
        raise ValueError(f"expected {lacks!r} beside {of_gated[0]!r} in the dataset, got {_names(found)}: {_RECORD}")
    return gated


def _reasons(
    lacking: Mapping[str, xr.DataArray], there: xr.DataArray, recorded: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """By layer, why it, or some of its heads, have no label.

    Args:
        lacking: for each variable, where it is needed and not finite.
        there: which heads there are.
        recorded: what the recording itself says of variables, by layer.
    """
    why = {}
    for at, layer in enumerate(map(str, there.layer.values)):
        told = [] if there.isel(layer=at).any() else ["nothing finite is recorded of it"]
        for name, where in lacking.items():
            if where.isel(layer=at).any():
                known = recorded.get(name, {}).get(layer)
                what = f"{name} / {_SCALES[name]}" if name in _SCALES else name
                told.append(f"{what} is not finite" + (f" ({known})" if known else ""))
        if told:
            why[layer] = "; ".join(told)
    return why


def _names(ds: xr.Dataset) -> str:
    return f"the variables {[str(name) for name in ds.data_vars]}"
