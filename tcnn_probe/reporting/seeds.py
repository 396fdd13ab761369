"""Recordings of the same training with different seeds as a single run:
means, and the range of the seeds.
"""

import json
from collections.abc import Sequence
from typing import Any

import xarray as xr

from tcnn_probe.heads import TYPES
from tcnn_probe.reporting.recordings import TYPE, Run, common_axes

__all__ = ["pool_seeds"]


def pool_seeds(name: str, runs: Sequence[Run]) -> Run:
    """Return means over recordings, with their smallest and largest values.

    A head's type is the one that it has in most recordings, the first in the order of ``TYPES`` of
    equals. A mark, layer or head that a recording lacks does not count. Maps are those of the first
    recording that has any: a mean of maps would be a map of no model.
    """
    axes = common_axes(runs)
    labels = {axes.along: axes.marks, "layer": list(axes.layers), "head": axes.heads}
    numbers = _stack([run.numbers for run in runs], labels)
    scalars = _stack([run.scalars for run in runs], labels)
    types = numbers.pop(TYPE, None)
    means = _means(numbers)
    if types is not None:
        means[TYPE] = _most_frequent_type(types)
        means[TYPE].attrs = _joined_types([run.numbers for run in runs])
    ranged = numbers | scalars
    with_maps = next((run for run in runs if run.maps), runs[0])
    return Run(
        name,
        axes.along,
        axes.marks,
        means,
        _means(scalars),
        [ds.reindex({axes.along: axes.marks}) for ds in with_maps.maps],
        with_maps.images,
        axes.layers,
        _joined_attrs(runs),
        sorted({hidden for run in runs for hidden in run.hidden}),
        seeds=tuple(runs),
        smallest=xr.Dataset({name: values.min("seed") for name, values in ranged.items()}),
        largest=xr.Dataset({name: values.max("seed") for name, values in ranged.items()}),
    )


def _stack(datasets: Sequence[xr.Dataset], labels: dict[str, list[Any]]) -> dict[str, xr.DataArray]:
    """Put variables on the same labels, along "seed"; of each, the datasets that have it."""
    stacked = {}
    for name in dict.fromkeys(str(name) for ds in datasets for name in ds.data_vars):
        parts = [ds[name].astype(float) for ds in datasets if name in ds]
        dims = {dim: labels[str(dim)] for dim in parts[0].dims}
        stacked[name] = xr.concat(
            [part.reset_coords(drop=True).reindex(dims) for part in parts],
            "seed",
            combine_attrs="override",
        )
    return stacked


def _means(stacked: dict[str, xr.DataArray]) -> xr.Dataset:
    return xr.Dataset(
        {name: values.mean("seed", keep_attrs=True) for name, values in stacked.items()}
    )


def _most_frequent_type(codes: xr.DataArray) -> xr.DataArray:
    """Return the code that most seeds have, the smallest of equals; NaN where none has one."""
    counts = xr.concat([(codes == code).sum("seed") for code in range(len(TYPES))], "type")
    return counts.argmax("type").astype(float).where(counts.max("type") > 0)


def _joined_types(datasets: Sequence[xr.Dataset]) -> dict[str, str]:
    """Return the attributes of types, with the layers that have none in any recording."""
    attrs = [ds[TYPE].attrs for ds in datasets if TYPE in ds]
    unlabelled: dict[str, str] = {}
    for recorded in attrs:
        unlabelled = json.loads(recorded["unlabelled"]) | unlabelled
    return attrs[0] | {"unlabelled": json.dumps(unlabelled)}


def _joined_attrs(runs: Sequence[Run]) -> dict[str, str]:
    """Return the attributes of all recordings, with all values where they differ."""
    joined: dict[str, str] = {}
    for key in dict.fromkeys(str(key) for run in runs for key in run.attrs):
        values = [run.attrs[key] for run in runs if key in run.attrs]
        if key in ("missing", "unsupported"):
            joined[key] = _joined_reasons(values)
        else:
            joined[key] = ", ".join(dict.fromkeys(map(str, values)))
    return joined


def _joined_reasons(texts: Sequence[str]) -> str:
    """Join tables of what is missing and why,
    by layer or by variable and layer; of two reasons, keep the first.
    """
    joined: dict[str, Any] = {}
    for text in texts:
        for name, reason in json.loads(text).items():
            if isinstance(reason, dict):
                joined[name] = reason | joined.get(name, {})
            else:
                joined.setdefault(name, reason)
    return json.dumps(joined)
