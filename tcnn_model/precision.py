"""Dtypes in which attention is computed:
softmaxes in float32 at least, and autocast only where it is enabled.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = [
    "at_least_float32",
    "autocast_dtype",
    "widen",
    "widest",
    "widest_dtype",
    "without_autocast",
]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for the half precisions and the dtype itself otherwise."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return x.to(at_least_float32(x.dtype))


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it, and float32 elsewhere."""
    return torch.float32 if device.type == "mps" else torch.float64


def widest(x: Tensor) -> Tensor:
    """Convert to :func:`widest_dtype`."""
    return x.to(widest_dtype(x.device))


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of ``x`` is computed, which autocast may lower."""
    device = x.device.type
    # torch.is_autocast_enabled raises for "meta"; autocast lowers float32 only, so float64 stays as
    # it is.
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled and x.dtype == torch.float32 else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Disable autocast on the device of ``x``,
    so that operations keep the dtypes of their inputs.
    """
    device = x.device.type
    # torch.autocast does not know the device type "meta".
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
