"""One or two recordings on common axes: marks, layers and heads."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.heads import TYPES, head_types
from tcnn_probe.storage import numbers, open_recording

__all__ = ["TYPE", "Axes", "Run", "axes_of", "read"]

TYPE = "head_type"
"""The variable of the types of heads: the place of each in ``tcnn_probe.heads.TYPES``."""


@dataclass(frozen=True)
class Run:
    """A recording, taken apart."""

    name: str  # on the page
    along: str  # the dimension of the marks
    marks: list[Any]  # their labels, such as epochs
    numbers: xr.Dataset  # variables (marks, layer, head) and (marks, layer); TYPE is among them if a head has one
    scalars: xr.Dataset  # variables (marks,)
    maps: list[xr.Dataset]  # the groups of maps: (marks, layer, image, ...)
    images: list[int]  # labels of the images that have maps
    heads: dict[str, int]  # how many each layer has, in the model's order
    attrs: Mapping[Any, Any]
    hidden: list[str]  # variables that have no place on the page


@dataclass(frozen=True)
class Axes:
    """What the grids of all runs share."""

    along: str
    marks: list[Any]
    layers: dict[str, int]  # with the number of heads that the largest run has
    heads: list[int]
    images: list[int]
    numbers: dict[str, dict[str, str]]  # attributes of each variable that has a value
    scalars: dict[str, dict[str, str]]

    def values(self, run: Run, name: str) -> NDArray[np.float64] | None:
        """A variable of a run on these axes, (marks, layers, heads), (marks, layers) or (marks,); None if it has none.

        NaN where the run has no such mark, layer or head.
        """
        found = run.numbers.get(name, run.scalars.get(name))
        if found is None:
            return None
        labels = {self.along: self.marks, "layer": list(self.layers), "head": self.heads}
        here = {dim: label for dim, label in labels.items() if dim in found.dims}
        return np.ascontiguousarray(found.astype(float).reindex(here).transpose(*here).values)


def read(recording: Any) -> Run:
    """Take a recording apart; ValueError for something else, or one without marks or layers."""
    tree, source = _as_tree(recording)
    name = str(source or tree.attrs.get("model_architecture") or tree.attrs.get("model_class") or "recording")
    flat = numbers(tree)
    along = str(flat.attrs.get("along"))
    if along not in flat.dims:
        raise ValueError("expected a recording: a path, recorder.tree, recorder.dataset, or tcnn_probe.open(path)")
    if "run" in flat.dims:
        raise ValueError("expected one recording, got several along 'run': give their paths, report([a, b])")
    groups = [node.to_dataset() for node in tree.subtree]
    maps = [ds for ds in groups if {"layer", "image", "y", "x"} <= {*ds.dims}]
    of_heads = [flat, *(ds for ds in groups if "head" in ds.dims and "y" not in ds.dims)]
    heads = _heads([*of_heads, *maps])
    if not flat.sizes[along] or not heads:
        raise ValueError(f"{name} has no {'layers' if flat.sizes[along] else along} yet: there is nothing to show")
    shown = _numbers(of_heads, along, list(heads))
    scalars = flat[[key for key, values in flat.data_vars.items() if values.dims == (along,)]]
    on_page = {*shown, *map(str, scalars.data_vars), *(str(key) for ds in maps for key in ds.data_vars)}
    hidden = sorted({str(key) for ds in groups for key in ds.data_vars} - on_page)
    marks, by_head = flat[along].values.tolist(), xr.Dataset(shown | _types(flat))
    images = maps[0]["image"].values.tolist() if maps else []
    return Run(name, along, marks, by_head, scalars, maps, images, heads, tree.attrs, hidden)


def axes_of(runs: Sequence[Run]) -> Axes:
    """Axes that have room for all runs; ValueError if these were marked by different things."""
    if len({run.along for run in runs}) > 1:
        raise ValueError(f"{runs[0].name} was marked by {runs[0].along}, {runs[1].name} by {runs[1].along}")
    layers: dict[str, int] = {}
    for run in runs:
        layers |= {layer: max(count, layers.get(layer, 0)) for layer, count in run.heads.items()}
    return Axes(
        runs[0].along,
        sorted({mark for run in runs for mark in run.marks}),
        layers,
        sorted({head for run in runs if "head" in run.numbers.dims for head in run.numbers["head"].values.tolist()}),
        sorted({image for run in runs for image in run.images}),
        *(
            {str(name): one.attrs for ds in kind for name, one in ds.data_vars.items() if np.isfinite(one).any()}
            for kind in ([run.numbers for run in runs], [run.scalars for run in runs])
        ),
    )


def _as_tree(recording: Any) -> tuple[xr.DataTree, str | None]:
    """The tree of a recording, and the last part of its path, if it is known."""
    if isinstance(recording, xr.Dataset):
        tree, source = xr.DataTree(recording), recording.encoding.get("source")
    elif isinstance(recording, xr.DataTree):
        tree, source = recording, None
    elif isinstance(recording, str | os.PathLike):
        tree, source = open_recording(recording), os.fspath(recording)
    else:
        raise TypeError(f"expected a path, a dataset or a tree of a recording, got {type(recording).__name__}")
    return tree, PurePath(source).name if source else None


def _heads(groups: Iterable[xr.Dataset]) -> dict[str, int]:
    """Number of heads of each layer; one of a layer that has maps of classes alone."""
    found: dict[str, int] = {}
    for ds in groups:
        table = json.loads(ds.attrs.get("layers", "{}"))
        for layer in ds["layer"].values.tolist() if "layer" in ds.dims else ():
            found.setdefault(layer, table.get(layer, {}).get("heads", ds.sizes.get("head", 1)))
    return found


def _numbers(groups: Sequence[xr.Dataset], along: str, layers: list[str]) -> dict[str, xr.DataArray]:
    """Variables by (marks, layer, head) or (marks, layer), of all layers; of one name, those of the first group."""
    heads = sorted({head for ds in groups if "head" in ds.dims for head in ds["head"].values.tolist()})
    found: dict[str, xr.DataArray] = {}
    for ds in groups:
        for key, values in ds.data_vars.items():
            if {along, "layer"} <= {*values.dims} <= {along, "layer", "head"} and key not in found:
                labels = {"layer": layers} | ({"head": heads} if "head" in values.dims else {})
                found[str(key)] = values.astype(float).reindex(labels).transpose(along, *labels)
    return found


def _types(flat: xr.Dataset) -> dict[str, xr.DataArray]:
    """Types of heads as numbers, if the recording allows types."""
    try:
        types = head_types(flat)
    except ValueError:  # variables that it needs were not recorded
        return {}
    codes = xr.full_like(types, np.nan, dtype=float)
    for place, name in enumerate(TYPES):
        codes = codes.where(types != name, place)
    return {TYPE: codes}
