"""Removal of the stride from the operations that reduce a stage's resolution ("unit" stride)."""

import copy
import itertools
from collections.abc import Iterable

import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn

from tcnn_model.conversion.tracing import FAILURES, Call

__all__ = ["at_unit_stride", "check_phases", "is_strided"]

Phase = tuple[int, int]

_POOLS = (nn.AvgPool2d, nn.MaxPool2d)
# Smallest height and width of the images on which an operation is compared with itself at stride 1.
# It exceeds the kernels of strided operations, so that windows without padding are compared, too.
_TRIAL_PIXELS = 24


def is_strided(call: Call) -> bool:
    """Return whether a call is a single operation,
    not a block of them, and reduces resolution by its own stride.
    """
    children = nn.ModuleList(call.module.children())
    has_layers = any(True for _ in children.parameters())
    return call.reduces and max(_stride(call.module)) > 1 and not has_layers


def at_unit_stride(call: Call, module: nn.Module) -> nn.Module:
    """Create an operation of stride 1 that keeps the grid,
    and whose output at every s-th pixel is the strided output.

    If its output would be smaller than the grid (2 x 2 convolutions and pools, or 3 x 3 without
    padding), its input is extended equally on both sides, with an odd pixel to the right and at the
    bottom. A pool repeats the border, so that its windows contain real values only; a convolution
    uses its own padding mode, which is usually zeros.

    Args:
        call: Run of the operation, as traced on the meta device.
        module: The operation itself, which is not changed.

    Returns:
        A new module that has the parameters of ``module``, under their names.

    Raises:
        ValueError: If the operation would not keep the grid at stride 1.
    """
    rows, cols = _missing_pixels(call)
    # A shallow copy shares the parameters, which keeps ties and an optimizer's state.
    unit = copy.copy(module)
    _set_unit_stride(unit)
    if (rows, cols) == (0, 0):
        return unit
    if min(rows, cols) >= 0 and isinstance(unit, nn.Conv2d):
        return _padded_to_its_grid(unit)
    if min(rows, cols) >= 0 and isinstance(unit, _POOLS):
        return nn.Sequential(nn.ReplicationPad2d(_both_sides(rows, cols)), unit)
    raise ValueError(
        f"{call.name} ({type(module).__name__}) reduces {call.inputs} to {call.outputs}, "
        f"and at stride 1 would not keep the grid; use stride='keep'"
    )


def _both_sides(rows: int, cols: int) -> tuple[int, int, int, int]:
    """Split rows and columns of padding into (left, right, top, bottom),
    with odd pixels right and at the bottom.
    """
    left = cols // 2
    top = rows // 2
    return left, cols - left, top, rows - top


def _padded_to_its_grid(conv: nn.Conv2d) -> nn.Conv2d:
    """Set the padding of a convolution of stride 1 so that it keeps the grid;
    a wrapper would rename its parameters.
    """
    axes = zip(conv.dilation, conv.kernel_size, strict=True)
    rows, cols = (d * (k - 1) for d, k in axes)
    # nn.Conv2d computes this attribute in its constructor, and uses it for padding modes other than
    # zeros.
    conv._reversed_padding_repeated_twice = list(_both_sides(rows, cols))
    if rows % 2 == cols % 2 == 0:
        conv.padding = (rows // 2, cols // 2)
    elif type(conv) is not nn.Conv2d or conv.padding_mode != "zeros":
        conv.padding = "same"
    else:
        # torch's padding="same" warns about even kernels, and the constructor of Conv2dSame would
        # allocate a weight.
        same = Conv2dSame.__new__(Conv2dSame)
        vars(same).update(vars(conv))
        return same
    return conv


@torch.no_grad()
def check_phases(steps: Iterable[Call]) -> None:
    """Check that operations which make the same step in resolution still fit together at stride 1.

    The stride can be removed only if the strided output of each operation is its output at stride 1
    at every s-th pixel, starting from the same first pixel in all operations that make the same
    step: otherwise branches would be added with an offset. With "same" padding the windows of a 3 x
    3 convolution of stride 2 are centred at pixels 1, 3, 5, ... of an even image, those of a 1 x 1
    convolution at 0, 2, 4. Values do not matter, so they are random, and image sizes have every
    residue of the stride.

    Args:
        steps: Runs of strided operations, as traced on the meta device.

    Raises:
        ValueError: If an operation's strided output is not part of its output at stride 1, or the
            first pixels of two operations differ.
    """
    # For each step and residue: the name of its first operation, and the phases common to all
    # operations so far.
    common: dict[tuple[object, object, int], tuple[str, set[Phase]]] = {}
    for call in steps:
        strided = _with_random_values(call.module)
        for residue in range(max(_stride(strided))):
            phases = _phases(call, strided, _TRIAL_PIXELS + residue)
            if not phases:
                raise ValueError(
                    f"{call.name} ({type(strided).__name__}): its output at stride 1 does not "
                    f"contain its output at stride {_stride(strided)}; use stride='keep'"
                )
            key = (call.inputs, call.outputs, residue)
            first, shared = common.get(key, (call.name, phases))
            if shared.isdisjoint(phases):
                raise ValueError(
                    f"{first} and {call.name} reduce {call.inputs} to {call.outputs} from "
                    "different first pixels, so that at stride 1 they would not fit together; use "
                    "stride='keep'"
                )
            common[key] = first, shared & phases


def _phases(call: Call, strided: nn.Module, pixels: int) -> set[Phase]:
    """Return the first pixels (y, x) from which every s-th output at stride 1 is the strided
    output.
    """
    # Device and dtype are given explicitly, because the caller may have set other defaults.
    generator = torch.Generator("cpu").manual_seed(0)
    shape = 1, _channels(strided), pixels, pixels
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    sparse = _run(call, strided, x)
    dense = _run(call, at_unit_stride(call, strided), x)
    height, width = sparse.shape[2:]
    sy, sx = _stride(strided)

    def matches(phase: Phase) -> bool:
        y, x = phase
        every_sth = dense[:, :, y::sy, x::sx]
        part = every_sth[:, :, :height, :width]
        if part.shape != sparse.shape:
            return False
        # Outputs at a wrong phase differ by about their magnitude; rounding in float32 is a
        # thousand times below 1e-3.
        error = (part - sparse).abs().max()
        return bool(error <= 1e-3 * sparse.abs().max())

    candidates = itertools.product(range(sy), range(sx))
    return {phase for phase in candidates if matches(phase)}


def _with_random_values(module: nn.Module) -> nn.Module:
    """Copy an operation from the meta device,
    where it has no values, to the CPU with random values.
    """
    duplicate = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator("cpu").manual_seed(0)
    tensors: list[Tensor] = [*duplicate.parameters(), *duplicate.buffers()]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cpu"))
    return duplicate


def _missing_pixels(call: Call) -> tuple[int, int]:
    """Return the numbers of rows and columns
    that the output at stride 1 lacks to the grid of the input.
    """
    unit = copy.copy(call.module)
    _set_unit_stride(unit)
    tensors = itertools.chain(unit.parameters(), unit.buffers())
    dtype = next((tensor.dtype for tensor in tensors), torch.float32)
    x = torch.empty(1, _channels(unit), *call.inputs, dtype=dtype, device="meta")
    with torch.no_grad():
        output = _run(call, unit, x)
    rows, cols = call.inputs
    return rows - output.shape[2], cols - output.shape[3]


def _run(call: Call, operation: nn.Module, x: Tensor) -> Tensor:
    try:
        return operation(x)
    except FAILURES as error:
        kind = type(call.module).__name__
        raise ValueError(
            f"{call.name} ({kind}) cannot be tried by itself ({error}); use stride='keep'"
        ) from error


def _channels(module: nn.Module) -> int:
    """Return the number of input channels of an operation."""
    weight = getattr(module, "weight", None)
    if weight is not None:
        return int(weight.shape[1] * getattr(module, "groups", 1))
    # timm's BlurPool2d has one filter per channel; other pools accept any number of channels.
    return getattr(module, "channels", None) or 1


def _stride(module: nn.Module) -> tuple[int, int]:
    """Return the stride along y and x, (1, 1) for a module without one."""
    stride = getattr(module, "stride", 1)
    if isinstance(stride, tuple | list):
        return int(stride[0]), int(stride[-1])
    return (stride, stride) if isinstance(stride, int) else (1, 1)


def _set_unit_stride(module: nn.Module) -> None:
    unit = (1, 1) if isinstance(module.stride, tuple | list) else 1
    # A plain attribute, which the annotations of nn.Module do not know.
    setattr(module, "stride", unit)  # noqa: B010
