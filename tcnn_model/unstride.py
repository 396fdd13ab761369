"""Taking the stride out of the operations that reduce a stage's resolution ("unit" stride)."""

import copy

import torch
from torch import nn

from tcnn_model.tracing import Call

__all__ = ["is_strided", "unstride"]

_POOLS = (nn.AvgPool2d, nn.MaxPool2d)


def is_strided(call: Call) -> bool:
    """Whether a call is a single operation (not a block of them) that reduces resolution by its own stride."""
    stride = getattr(call.module, "stride", 1)
    strided = max(stride) > 1 if isinstance(stride, tuple | list) else stride > 1
    return call.reduces and strided and next(call.module.children(), None) is None


def unstride(call: Call, module: nn.Module) -> nn.Module:
    """The same operation at stride 1, on the same grid: its output at every s-th pixel is the strided output.

    A pool with an even kernel looks one pixel further right and down than left and up; there the last row and column
    are repeated, so that a 2 x 2 pool at the border sees real pixels only.

    Args:
        call: the operation's run, as traced on the meta device.
        module: the operation itself, which is not changed.

    Returns:
        a new module that shares the parameters of ``module``.

    Raises:
        ValueError: at stride 1 it would not keep the grid.
    """
    missing = _missing_pixels(call)
    unit = copy.copy(module)
    _set_unit_stride(unit)
    if missing == (0, 0):
        return unit
    if isinstance(module, _POOLS) and min(missing) >= 0:
        return nn.Sequential(nn.ReplicationPad2d((0, missing[1], 0, missing[0])), unit)
    raise ValueError(
        f"{call.name} ({type(module).__name__}) reduces {call.inputs} to {call.outputs}, "
        f"and at stride 1 would not keep the grid; use stride='keep'"
    )


def _missing_pixels(call: Call) -> tuple[int, int]:
    """Rows and columns by which the operation at stride 1 falls short of its input's grid."""
    probe = copy.copy(call.module)
    _set_unit_stride(probe)
    weight = getattr(probe, "weight", None)
    groups = getattr(probe, "groups", 1)
    channels = weight.shape[1] * groups if weight is not None else getattr(probe, "channels", None) or 1
    dtype = next((t.dtype for t in [*probe.parameters(), *probe.buffers()]), torch.float32)
    with torch.no_grad():
        output = probe(torch.empty(1, channels, *call.inputs, dtype=dtype, device="meta"))
    return call.inputs[0] - output.shape[2], call.inputs[1] - output.shape[3]


def _set_unit_stride(module: nn.Module) -> None:
    unit = (1, 1) if isinstance(module.stride, tuple | list) else 1
    setattr(module, "stride", unit)  # noqa: B010 (a plain attribute, which nn.Module's annotations do not know)
