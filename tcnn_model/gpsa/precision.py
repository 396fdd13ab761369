"""In which dtype attention is computed: softmaxes in float32 at least, and autocast where it was asked for only."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["at_least_float32", "autocast_dtype", "widen", "widest", "widest_dtype", "without_autocast"]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Float32 for the half precisions, the dtype itself otherwise."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """Half precision to float32: positions and gates are few, and softmaxes over far pixels need the range."""
    return x.to(at_least_float32(x.dtype))


def widest_dtype(device: torch.device) -> torch.dtype:
    """Float64 where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def widest(x: Tensor) -> Tensor:
    """In :func:`widest_dtype`."""
    return x.to(widest_dtype(x.device))


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast, where it is on, has a matrix product of ``x`` computed."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on and x.dtype == torch.float32 else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Operations on the device of ``x`` keep the dtypes they are given."""
    device = x.device.type  # there is no autocast for "meta"
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
