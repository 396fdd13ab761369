"""Recordings on common axes: marks, layers and heads."""

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.diagnosis import Findings, health
from tcnn_probe.heads import TYPES, head_types
from tcnn_probe.heads.types import PARTS, PREFIX
from tcnn_probe.storage import numbers, open_recording

__all__ = ["TYPE", "Axes", "Run", "common_axes", "read_run", "thin_marks"]

KERNELS = "offset_kernel"
# Differences of halves of the images make types uncertain, and are no curves of their own.
_HALVES = {f"{part}_halves" for part in (*PARTS, PREFIX)}
TYPE = "head_type"
"""Name of the variable of types: indices into ``tcnn_probe.heads.TYPES``."""


@dataclass(frozen=True)
class Run:
    """Parts of a recording."""

    name: str  # name on the page
    along: str  # dimension of the marks
    marks: list[Any]  # labels of the marks, such as epochs
    numbers: (
        xr.Dataset
    )  # variables (marks, layer, head) and (marks, layer); TYPE is among them if a head has a type
    scalars: xr.Dataset  # variables of shape (marks,)
    maps: list[xr.Dataset]  # groups of maps: (marks, layer, image, ...)
    images: list[int]  # labels of the images that have maps
    heads: dict[str, int]  # number of heads of each layer, in the model's order
    attrs: Mapping[Any, Any]
    hidden: list[str]  # variables that have no place on the page
    findings: Findings | None = None  # None if no layer has numbers
    kernels: xr.DataArray | None = None  # (marks, layer, head, offset_y, offset_x)


@dataclass(frozen=True)
class Axes:
    """Axes that the grids of all runs share."""

    along: str
    marks: list[Any]
    layers: dict[str, int]  # largest number of heads in any run
    heads: list[int]
    images: list[int]
    numbers: dict[str, dict[str, str]]  # attributes of each variable that has a value
    scalars: dict[str, dict[str, str]]

    def values(self, run: Run, name: str) -> NDArray[np.float64] | None:
        """Put a run's variable on these axes, (marks, layers, heads),
        (marks, layers) or (marks,); None if it has none.

        NaN where the run has no such mark, layer or head.
        """
        variable = run.numbers.get(name, run.scalars.get(name))
        if variable is None:
            return None
        axes = {self.along: self.marks, "layer": list(self.layers), "head": self.heads}
        labels = {dim: axes[dim] for dim in axes if dim in variable.dims}
        return np.ascontiguousarray(
            variable.astype(float).reindex(labels).transpose(*labels).values
        )


def read_run(recording: Any) -> Run:
    """Split a recording into its parts; raise ValueError if it is none,
    or has no marks or layers.
    """
    tree, source = _as_tree(recording)
    name = str(
        source
        or tree.attrs.get("model_architecture")
        or tree.attrs.get("model_class")
        or "recording"
    )
    # On the page coordinates such as uniform_distance are variables like others.
    flat = numbers(tree).reset_coords()
    along = str(flat.attrs.get("along"))
    if along not in flat.dims:
        raise ValueError(
            "expected a recording: a path, recorder.tree, recorder.dataset, or "
            "tcnn_probe.open(path)"
        )
    if "run" in flat.dims:
        raise ValueError(
            "expected one recording, got several along 'run': give their paths, report([a, b])"
        )
    groups = [node.to_dataset().reset_coords() for node in tree.subtree]
    maps = [ds for ds in groups if {"layer", "image", "y", "x"} <= {*ds.dims}]
    head_groups = [
        flat,
        *(ds for ds in groups if "head" in ds.dims and "y" not in ds.dims),
    ]
    heads = _count_heads([*head_groups, *maps])
    if not flat.sizes[along] or not heads:
        raise ValueError(
            f"{name} has no {'layers' if flat.sizes[along] else along} yet: there is nothing to "
            "show"
        )
    by_head = _variables_by_layer(head_groups, along, list(heads))
    scalars = flat[[key for key, values in flat.data_vars.items() if values.dims == (along,)]]
    names = {str(key) for ds in groups for key in ds.data_vars}
    kernels = [ds[KERNELS] for ds in groups if KERNELS in ds]
    names = names.difference(by_head, scalars.data_vars, [KERNELS], _HALVES)
    hidden = sorted(names.difference(*(ds.data_vars for ds in maps)))
    marks = flat[along].values.tolist()
    images = maps[0]["image"].values.tolist() if maps else []
    return Run(
        name,
        along,
        marks,
        xr.Dataset(by_head | _types(flat)),
        scalars,
        maps,
        images,
        heads,
        tree.attrs,
        hidden,
        health(flat) if "layer" in flat.dims else None,
        kernels[0] if kernels else None,
    )


def common_axes(runs: Sequence[Run]) -> Axes:
    """Join the axes of all runs; raise ValueError
    if they were marked along different dimensions.
    """
    for run in runs:
        if run.along != runs[0].along:
            raise ValueError(
                f"{runs[0].name} was marked by {runs[0].along}, {run.name} by {run.along}"
            )
    layers: dict[str, int] = {}
    for run in runs:
        layers |= {layer: max(count, layers.get(layer, 0)) for layer, count in run.heads.items()}
    heads = {
        head
        for run in runs
        if "head" in run.numbers.dims
        for head in run.numbers["head"].values.tolist()
    }
    return Axes(
        runs[0].along,
        sorted({mark for run in runs for mark in run.marks}),
        layers,
        # A recording of maps alone has no variable of heads.
        sorted(heads) or list(range(max(layers.values()))),
        sorted({image for run in runs for image in run.images}),
        _attrs([run.numbers for run in runs]),
        _attrs([run.scalars for run in runs]),
    )


def thin_marks(runs: Sequence[Run], most: int) -> list[Run]:
    """Leave evenly spread marks, about ``most`` of them, and the last one of each run."""
    marks = sorted({mark for run in runs for mark in run.marks})
    places = np.linspace(len(marks) - 1, 0, max(most, 1)).round().astype(int)
    kept = {marks[place] for place in places} | {run.marks[-1] for run in runs}
    thinned = []
    for run in runs:
        own = {run.along: [mark for mark in run.marks if mark in kept]}
        changes: dict[str, Any] = {"marks": own[run.along]}
        for name in ("numbers", "scalars"):
            ds = getattr(run, name)
            if run.along in ds.dims:
                changes[name] = ds.sel(own)
        changes["maps"] = [ds.sel(own) for ds in run.maps]
        thinned.append(replace(run, **changes))
    return thinned


def _attrs(datasets: Sequence[xr.Dataset]) -> dict[str, dict[str, str]]:
    """Return the attributes of all variables that have a value."""
    attrs: dict[str, dict[str, str]] = {}
    for ds in datasets:
        attrs |= {
            str(name): values.attrs
            for name, values in ds.data_vars.items()
            if np.isfinite(values).any()
        }
    return attrs


def _as_tree(recording: Any) -> tuple[xr.DataTree, str | None]:
    """Return the tree of a recording, and the last part of its path, None if unknown."""
    if isinstance(recording, xr.Dataset):
        tree, source = xr.DataTree(recording), recording.encoding.get("source")
    elif isinstance(recording, xr.DataTree):
        tree, source = recording, None
    elif isinstance(recording, str | os.PathLike):
        tree, source = open_recording(recording), os.fspath(recording)
    else:
        raise TypeError(
            f"expected a path, a dataset or a tree of a recording, got {type(recording).__name__}"
        )
    return tree, PurePath(source).name if source else None


def _count_heads(groups: Iterable[xr.Dataset]) -> dict[str, int]:
    """Count the heads of each layer; a layer with maps of classes alone has one."""
    heads: dict[str, int] = {}
    for ds in groups:
        table = json.loads(ds.attrs.get("layers", "{}"))
        for layer in ds["layer"].values.tolist() if "layer" in ds.dims else ():
            heads.setdefault(layer, table.get(layer, {}).get("heads", ds.sizes.get("head", 1)))
    return heads


def _variables_by_layer(
    groups: Sequence[xr.Dataset], along: str, layers: list[str]
) -> dict[str, xr.DataArray]:
    """Put all variables, (marks, layer) or (marks, layer, head),
    on the same layers and heads, NaN where there is none.

    Of variables of the same name, the first group's is taken.
    """
    heads = sorted(
        {head for ds in groups if "head" in ds.dims for head in ds["head"].values.tolist()}
    )
    variables: dict[str, xr.DataArray] = {}
    for ds in groups:
        for key, values in ds.data_vars.items():
            if {along, "layer"} <= {*values.dims} <= {
                along,
                "layer",
                "head",
            } and key not in {*variables, *_HALVES}:
                labels = {"layer": layers} | ({"head": heads} if "head" in values.dims else {})
                variables[str(key)] = values.astype(float).reindex(labels).transpose(along, *labels)
    return variables


def _types(flat: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the types of heads as numbers,
    unless variables that they depend on were not recorded.
    """
    try:
        with warnings.catch_warnings():
            # The page says by which rule heads of an earlier version are typed.
            warnings.simplefilter("ignore", FutureWarning)
            types = head_types(flat)
    except ValueError:
        return {}
    codes = xr.full_like(types, np.nan, dtype=float)
    for code, name in enumerate(TYPES):
        codes = codes.where(types != name, code)
    if "uncertain" not in types.coords:
        return {TYPE: codes}
    # As a variable, it is a column of the table and can colour the grid.
    uncertain = types.uncertain.astype(float).where(types != "")
    return {
        name: values.reset_coords("uncertain", drop=True)
        for name, values in ((TYPE, codes), ("uncertain_type", uncertain))
    }
