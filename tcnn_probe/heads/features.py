"""What types of heads are made of, out of a recording: gates, and entropies and distances as shares of even ones."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import xarray as xr

from tcnn_probe.attention.uniform import uniform_distance

__all__ = ["Features", "Grid", "features_of"]

Grid = Sequence[int] | Mapping[str, Sequence[int]]

_OF_HEADS = ("gate", "positional_entropy", "entropy", "attention_distance")
_EVEN = {
    "positional_entropy": "uniform_entropy",
    "entropy": "uniform_entropy",
    "attention_distance": "uniform_distance",
}
_RECORD = "tcnn_probe.record(model) records it of GPSA, ConViT and softmax attention"


@dataclass(frozen=True)
class Features:
    """Of every head, each of the same dims, (marks, "layer", "head"); NaN where there is none.

    Args:
        gated: whether the layer has gates.
        gate: share of positional attention.
        spread: entropy of the positional part, as a share of that of even attention.
        evenness: entropy of the whole attention, as a share of that of even attention.
        reach: distance of the whole attention, as a share of that of even attention.
        why: of layers with heads that lack something, what.
    """

    gated: xr.DataArray
    gate: xr.DataArray
    spread: xr.DataArray
    evenness: xr.DataArray
    reach: xr.DataArray
    why: Mapping[str, str]


def features_of(ds: xr.Dataset, grid: Grid | None, *, entropies: bool) -> Features:
    """See :class:`Features`.

    Args:
        ds: a recording, with the dims "layer" and "head" or with these as coordinates.
        grid: rows and columns of keys, of all layers or by name or glob; for layers without ``uniform_*``.
        entropies: whether the entropy of the whole attention of plain layers is needed.

    Raises:
        TypeError: ``ds`` is no dataset, or ``grid`` no grid.
        ValueError: a variable that is needed is missing.
    """
    found = _loaded(ds)
    gated = _gated(found)
    finite = [xr.apply_ufunc(np.isfinite, found[name]) for name in _OF_HEADS if name in found]
    there = reduce(or_, finite)
    there = there.any([dim for dim in there.dims if dim not in ("layer", "head")])
    if entropies and "entropy" not in found and (~gated & there).any():
        raise ValueError(f"expected 'entropy' in the dataset, which the mixture needs: {_RECORD}")
    heads = there.any("head")
    even = _even(found, grid, {"uniform_entropy": heads & (gated | entropies), "uniform_distance": heads})
    like = found.attention_distance
    nothing = xr.full_like(like, np.nan)
    shares = {name: found[name] / even[scale] if name in found else nothing for name, scale in _EVEN.items()}
    arrays = (gated, found.get("gate", nothing), *(shares[name] for name in _EVEN), there)
    gated, gate, spread, evenness, reach, there = (one.broadcast_like(like).transpose(*like.dims) for one in arrays)
    needed = {"gate": (gate, gated), "positional_entropy": (spread, gated), "attention_distance": (reach, there)}
    needed |= {"entropy": (evenness, ~gated)} if entropies else {}
    lacking = {name: there & need & ~np.isfinite(value) for name, (value, need) in needed.items()}
    why = _reasons(lacking, there, json.loads(ds.attrs.get("missing", "{}")))
    return Features(gated, gate, spread, evenness, reach, why)


def _loaded(ds: xr.Dataset) -> xr.Dataset:
    """The numbers that count, in memory, with the dims (marks, "layer", "head")."""
    if not isinstance(ds, xr.Dataset):
        what = "; of a tree, tree['heads'].dataset" if isinstance(ds, xr.DataTree) else ""
        raise TypeError(f"expected an xarray.Dataset that tcnn_probe.record has made{what}, got {type(ds).__name__}")
    if "attention_distance" not in ds:
        raise ValueError(f"expected 'attention_distance' in the dataset, got {_names(ds)}: {_RECORD}")
    for dim in ("layer", "head"):
        if dim not in ds.coords:
            raise ValueError(f"expected the coordinate {dim!r}, as recorded, got {list(ds.coords)}")
    found = ds[[name for name in (*_OF_HEADS, *dict.fromkeys(_EVEN.values())) if name in ds]].compute()
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


def _even(found: xr.Dataset, grid: Grid | None, needed: Mapping[str, xr.DataArray]) -> dict[str, xr.DataArray]:
    """The scales by name, where they are not recorded by the grid; ``needed`` says of which layers."""
    layers = [str(name) for name in found.layer.values]
    cells = {layer: (np.arange(rows), np.arange(columns)) for layer, (rows, columns) in _grids(grid, layers).items()}
    by_grid = {
        "uniform_entropy": {layer: math.log(len(y) * len(x)) for layer, (y, x) in cells.items()},
        "uniform_distance": {layer: uniform_distance(y, y, x, x) for layer, (y, x) in cells.items()},
    }
    even = {}
    for name, values in by_grid.items():
        scale = xr.DataArray([values.get(layer, np.nan) for layer in layers], {"layer": found.layer}, ("layer",))
        if name in found:
            scale = found[name].fillna(scale)
        elif (lacking := needed[name] & scale.isnull()).any():
            first = layers[int(lacking.values.argmax())]
            raise ValueError(
                f"expected {name!r} in the dataset, which recordings of older versions do not have; give the grid of "
                f"keys instead: grid=(rows, columns), or by layer, grid={{{first!r}: (rows, columns)}}"
            )
        even[name] = scale
    return even


def _grids(grid: Grid | None, layers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By layer."""
    if grid is None:
        return {}
    given = grid if isinstance(grid, Mapping) else {"*": grid}
    grids: dict[str, tuple[int, int]] = {}
    for pattern, size in given.items():
        if not (isinstance(size, Sequence) and len(size) == 2 and all(_is_count(one) for one in size)):
            raise TypeError(
                f"expected grid=(rows, columns), two integers of at least 1, or these by layer, got {grid!r}"
            )
        chosen = [layer for layer in layers if layer == pattern or fnmatchcase(layer, pattern)]
        if not chosen:
            raise ValueError(f"no layer {pattern!r} to have a grid; the dataset has {layers}")
        grids |= {layer: (int(size[0]), int(size[1])) for layer in chosen}
    return grids


def _is_count(given: Any) -> bool:
    return isinstance(given, (int, np.integer)) and not isinstance(given, bool) and int(given) >= 1


def _reasons(
    lacking: Mapping[str, xr.DataArray], there: xr.DataArray, recorded: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Which layers have heads, or are, without a label, and why.

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
                what = f"{name} / {_EVEN[name]}" if name in _EVEN else name
                told.append(f"{what} is not finite" + (f" ({known})" if known else ""))
        if told:
            why[layer] = "; ".join(told)
    return why


def _names(ds: xr.Dataset) -> str:
    return f"the variables {[str(name) for name in ds.data_vars]}"
