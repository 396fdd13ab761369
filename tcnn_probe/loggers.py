"""The numbers of the last mark of a recording as a flat dict, for loggers."""

from itertools import product

import xarray as xr

__all__ = ["scalars"]


def scalars(ds: xr.Dataset, *, heads: bool = False) -> dict[str, float]:
    """Give the last mark as ``{"entropy/blocks.3.attn": 3.9, "top1": 0.8, ...}``, without numbers that are NaN.

    ::

        recorder.mark(epoch=epoch, top1=top1)
        wandb.log(tcnn_probe.scalars(recorder.dataset))
        for name, value in tcnn_probe.scalars(recorder.dataset).items():
            writer.add_scalar(name, value, epoch)  # TensorBoard

    Args:
        ds: a recording: ``recorder.dataset``, or ``xr.open_zarr(path)``.
        heads: whether each head has a number, ``"entropy/blocks.3.attn/0"``; else the mean over a layer's heads.

    Returns:
        by variable, layer and head; scalars that were given to ``mark`` by their name.

    Raises:
        ValueError: a dataset of another kind.
    """
    along = ds.attrs.get("along")
    if along not in ds.dims:
        raise ValueError("expected a recording: recorder.dataset, or xarray.open_zarr(path)")
    found: dict[str, float] = {}
    for name, values in ds.isel({along: -1}).data_vars.items():
        if not heads and "head" in values.dims:
            values = values.mean("head")
        labels = [map(str, values[dim].values) for dim in values.dims]
        for place, value in zip(product(*labels), values.values.ravel(), strict=True):
            if values.dtype.kind in "fiu" and value == value:
                found["/".join([str(name), *place])] = float(value)
    return found
