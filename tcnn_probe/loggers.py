"""``scalars()``: the last mark of a recording as a flat dict, for loggers."""

from itertools import product

import numpy as np
import xarray as xr

__all__ = ["scalars"]


def scalars(ds: xr.Dataset, *, heads: bool = False) -> dict[str, float]:
    """Return the last mark as ``{"entropy/blocks.3.attn": 3.9, "top1": 0.8, ...}``, without numbers that are NaN.

    ::

        recorder.mark(epoch=epoch, top1=top1)
        wandb.log(tcnn_probe.scalars(recorder.dataset))
        for name, value in tcnn_probe.scalars(recorder.dataset).items():
            writer.add_scalar(name, value, epoch)  # TensorBoard

    Args:
        ds: A recording: ``recorder.dataset``, or ``xr.open_zarr(path)``.
        heads: Return a number for each head, ``"entropy/blocks.3.attn/0"``, not the mean over a layer's heads.

    Returns:
        Numbers by variable, layer and head; scalars that were given to ``mark`` by their name.

    Raises:
        ValueError: The dataset is no recording.
    """
    along = ds.attrs.get("along")
    if along not in ds.dims:
        raise ValueError(
            "expected a recording: recorder.dataset, or xarray.open_zarr(path)"
        )
    flat: dict[str, float] = {}
    for name, values in ds.isel({along: -1}).data_vars.items():
        if not heads and "head" in values.dims:
            values = values.mean("head")
        # Histograms and kinds of tokens are no scalars of a layer or head.
        if values.dtype.kind not in "fiu" or not {"layer", "head"} >= {*values.dims}:
            continue
        labels = product(*(map(str, values[dim].values) for dim in values.dims))
        for label, value in zip(labels, values.values.ravel(), strict=True):
            if not np.isnan(value):
                flat["/".join([str(name), *label])] = float(value)
    return flat
