"""Heads of a recording as rows of a table, and random heads as a control for selected ones."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from tcnn_probe.heads.classify import head_types

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

__all__ = ["head_table", "random_heads"]


def head_table(ds: xr.Dataset, epoch: int = -1) -> "pd.DataFrame":
    """Return the variables of heads at one mark of a recording, one row a head.

    ::

        table = tcnn_probe.head_table(recorder.dataset)
        print(table.groupby("head_type").attention_distance.mean())

    Args:
        ds: A recording, or any dataset with variables over layer and head.
        epoch: Position of the mark, the last by default.

    Returns:
        Rows with the index (layer, head), and a column for each variable over layer and head; for a
        recording with the parts of selectivity also ``head_type``. Heads without any number, which
        layers with fewer heads lack, are left out.

    Raises:
        ValueError: No variable has the dimensions layer and head.
    """
    if "epoch" in ds.dims:
        ds = ds.isel(epoch=[epoch])
    if "selectivity" in ds:
        ds = ds.assign(head_type=head_types(ds).drop_vars("uncertain"))
    if "epoch" in ds.dims:
        ds = ds.isel(epoch=0)
    names = [str(name) for name, x in ds.items() if {*x.dims} == {"layer", "head"}]
    if not names:
        raise ValueError(
            f"expected a dataset with variables over layer and head, got dims {tuple(ds.dims)}"
        )
    coords = set(ds[names].coords) - {"layer", "head"}
    table = ds[names].drop_vars(coords).to_dataframe(["layer", "head"])
    numbers = table.drop(columns="head_type", errors="ignore")
    return table[numbers.notna().any(axis=1)]


def random_heads(
    like: xr.DataArray, seed: int, *, among: xr.DataArray | None = None
) -> xr.DataArray:
    """Select random heads, as many in each layer as are selected: the control for an ablation.

    ::

        selected = tcnn_probe.head_types(ds) == "content"
        control = tcnn_probe.random_heads(selected, seed=0)

    Args:
        like: Selected heads, a boolean array over layer and head, of whose other dimension, if
            there is one, the last entry counts.
        seed: Seed; another one draws other heads. Selected heads can be drawn, too.
        among: Heads to draw from, a boolean array over layer and head, such as
            ``ds.selectivity.notnull()`` where layers have different numbers of heads; None for all.

    Returns:
        Boolean array over layer and head.

    Raises:
        TypeError: An array is not boolean.
        ValueError: An array has other dimensions, or a layer has more selected heads than there are
            to draw from.
    """
    selected = _over_heads(like, "like")
    pool = xr.ones_like(selected) if among is None else _over_heads(among, "among")
    pool = pool.reindex_like(selected, fill_value=False)
    generator = np.random.default_rng(seed)
    drawn = xr.zeros_like(selected)
    for layer, row in enumerate(selected.values):
        heads, count = np.flatnonzero(pool.values[layer]), int(row.sum())
        if count > len(heads):
            name = str(selected["layer"].values[layer])
            raise ValueError(
                f"expected at least {count} heads to draw from in {name!r}, got {len(heads)}"
            )
        drawn.values[layer, generator.choice(heads, count, replace=False)] = True
    return drawn


def _over_heads(array: xr.DataArray, name: str) -> xr.DataArray:
    """Return a boolean array over layer and head, the last entry of any other dimension."""
    if not isinstance(array, xr.DataArray) or array.dtype != bool:
        raise TypeError(
            f"expected a boolean DataArray for {name}, such as head_types(ds) == 'content'; got "
            f"{type(array).__name__}"
        )
    others = [dim for dim in array.dims if dim not in ("layer", "head")]
    if len(others) > 1 or not {"layer", "head"} <= {*array.dims}:
        raise ValueError(f"expected {name} over layer and head, got dims {array.dims}")
    last = array.isel(dict.fromkeys(others, -1))
    return last.drop_vars(set(last.coords) - {"layer", "head"}).transpose("layer", "head")
