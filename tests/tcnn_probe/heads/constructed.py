"""Recordings made by hand, so that every type is known."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

__all__ = ["EVEN_DISTANCE", "EVEN_ENTROPY", "gated", "plain", "recording"]

EVEN_ENTROPY, EVEN_DISTANCE = 4.0, 8.0  # of every layer: shares are then exact in binary


def recording(layers: Mapping[str, Mapping[str, Any]], marks: Sequence[int] = (0,)) -> xr.Dataset:
    """A dataset of these layers: for each, variables of shape (marks, heads), (marks,) of ``uniform_*``.

    Heads that a layer has not are NaN, as are variables.
    """
    names = list(dict.fromkeys(name for about in layers.values() for name in about))
    heads = max(np.shape(about["attention_distance"])[-1] for about in layers.values())
    ds = xr.Dataset(coords={"epoch": list(marks), "layer": np.array(list(layers), dtype=object), "head": range(heads)})
    for name in names:
        of_layer = name.startswith("uniform")
        shape = (len(marks), len(layers)) if of_layer else (len(marks), len(layers), heads)
        values = np.full(shape, np.nan)
        for at, about in enumerate(layers.values()):
            if name in about:
                given = np.asarray(about[name], dtype=float)
                values[(slice(None), at) if of_layer else (slice(None), at, slice(0, given.shape[-1]))] = given
        ds[name] = (("epoch", "layer") if of_layer else ("epoch", "layer", "head"), values)
    return ds


def gated(gate: Any, spread: Any = 0.5, reach: Any = 0.25, *, marks: int = 1) -> dict[str, Any]:
    """A layer with gates, by the shares that its types depend on, each of shape (heads,) or (marks, heads)."""
    rows = np.broadcast_arrays(np.atleast_1d(gate), spread, reach)
    gate, spread, reach = (np.broadcast_to(np.atleast_2d(one), (marks, np.shape(one)[-1])) for one in rows)
    return {
        "gate": gate,
        "positional_entropy": spread * EVEN_ENTROPY,
        "entropy": spread * EVEN_ENTROPY,
        "attention_distance": reach * EVEN_DISTANCE,
        "uniform_entropy": [EVEN_ENTROPY] * marks,
        "uniform_distance": [EVEN_DISTANCE] * marks,
    }


def plain(reach: Any, evenness: Any = 0.5, *, marks: int = 1) -> dict[str, Any]:
    """A layer of plain attention, likewise."""
    about = gated(0.5, evenness, reach, marks=marks)
    return {name: value for name, value in about.items() if name not in ("gate", "positional_entropy")}
