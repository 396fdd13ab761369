"""Taking the stride out of the operations that reduce a stage's resolution ("unit" stride)."""

import copy
from collections.abc import Iterable

import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn

from tcnn_model.conversion.tracing import FAILURES, Call

__all__ = ["at_unit_stride", "check_phases", "is_strided"]

Phase = tuple[int, int]

_POOLS = (nn.AvgPool2d, nn.MaxPool2d)
_TRIAL_PIXELS = 24  # at least, along each axis, where an operation is compared with its un-strided self


def is_strided(call: Call) -> bool:
    """Whether a call is a single operation (not a block of them) that reduces resolution by its own stride."""
    parts = call.module.children()
    return call.reduces and max(_stride(call.module)) > 1 and all(next(p.parameters(), None) is None for p in parts)


def at_unit_stride(call: Call, module: nn.Module) -> nn.Module:
    """Make an operation of stride 1 on the same grid, whose output at every s-th pixel is the strided output.

    Where it would fall short of the grid (2 x 2 convolutions and pools without padding, 3 x 3 without padding), its
    input is extended equally on both sides, an odd pixel to the right and down: for a pool the border is repeated, so
    that at the border it sees real pixels only; for a convolution by what it pads with, as a rule zeros.

    Args:
        call: the operation's run, as traced on the meta device.
        module: the operation itself, which is not changed.

    Returns:
        a new module that has the parameters of ``module``, under their names.

    Raises:
        ValueError: at stride 1 it would not keep the grid.
    """
    rows, cols = _missing_pixels(call)
    unit = copy.copy(module)
    _set_unit_stride(unit)
    if (rows, cols) == (0, 0):
        return unit
    if min(rows, cols) >= 0 and isinstance(unit, nn.Conv2d):
        return _padded_to_its_grid(unit)
    if min(rows, cols) >= 0 and isinstance(unit, _POOLS):
        beyond = (cols // 2, cols - cols // 2, rows // 2, rows - rows // 2)
        return nn.Sequential(nn.ReplicationPad2d(beyond), unit)
    raise ValueError(
        f"{call.name} ({type(module).__name__}) reduces {call.inputs} to {call.outputs}, "
        f"and at stride 1 would not keep the grid; use stride='keep'"
    )


def _padded_to_its_grid(conv: nn.Conv2d) -> nn.Conv2d:
    """A convolution of stride 1, changed so that its padding keeps the grid; a wrapper would rename its parameters."""
    rows, cols = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    conv._reversed_padding_repeated_twice = [cols // 2, cols - cols // 2, rows // 2, rows - rows // 2]
    if rows % 2 == cols % 2 == 0:
        conv.padding = (rows // 2, cols // 2)
    elif type(conv) is not nn.Conv2d or conv.padding_mode != "zeros":
        conv.padding = "same"
    else:  # torch's own padding="same" warns about even kernels
        same = Conv2dSame.__new__(Conv2dSame)
        vars(same).update(vars(conv))
        return same
    return conv


@torch.no_grad()
def check_phases(steps: Iterable[Call]) -> None:
    """Un-striding is sound only if what each operation gave is still there, at every s-th pixel, counted from the same
    first pixel in all operations that make the same step in resolution: else branches would be added out of place.

    With "same" padding a 3 x 3 convolution of stride 2 looks from pixels 1, 3, 5, ... of an even image, a 1 x 1 one
    from 0, 2, 4. Values do not matter, so random ones are taken, and images of every residue of the stride.

    Args:
        steps: runs of strided operations, as traced on the meta device.

    Raises:
        ValueError: an operation whose strided output is not part of the un-strided one, or two that disagree.
    """
    found: dict[tuple[object, object, int], tuple[str, set[Phase]]] = {}
    for call in steps:
        strided = _with_random_values(call.module)
        for residue in range(max(_stride(strided))):
            phases = _phases(call, strided, _TRIAL_PIXELS + residue)
            if not phases:
                raise ValueError(
                    f"{call.name} ({type(strided).__name__}): its output at stride 1 does not contain its output at "
                    f"stride {_stride(strided)}; use stride='keep'"
                )
            key = (call.inputs, call.outputs, residue)
            first, common = found.get(key, (call.name, phases))
            if not common & phases:
                raise ValueError(
                    f"{first} and {call.name} reduce {call.inputs} to {call.outputs} from different first pixels, so "
                    f"that at stride 1 they would not fit together; use stride='keep'"
                )
            found[key] = first, common & phases


def _phases(call: Call, strided: nn.Module, pixels: int) -> set[Phase]:
    """First pixels (y, x) from which every s-th output of the un-strided operation is the strided output."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, _channels(strided), pixels, pixels, generator=generator, device="cpu")
    sparse, dense = _run(call, strided, x), _run(call, at_unit_stride(call, strided), x)
    height, width = sparse.shape[2:]
    sy, sx = _stride(strided)

    def matches(phase: Phase) -> bool:
        part = dense[:, :, phase[0] :: sy, phase[1] :: sx][:, :, :height, :width]
        return part.shape == sparse.shape and bool((part - sparse).abs().max() <= 1e-3 * sparse.abs().max())

    return {(y, x) for y in range(sy) for x in range(sx) if matches((y, x))}


def _with_random_values(module: nn.Module) -> nn.Module:
    """A copy of an operation on the meta device, on the CPU and with random values."""
    duplicate = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator("cpu").manual_seed(0)
    tensors: list[Tensor] = [*duplicate.parameters(), *duplicate.buffers()]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cpu"))
    return duplicate


def _missing_pixels(call: Call) -> tuple[int, int]:
    """Rows and columns by which the operation at stride 1 falls short of its input's grid."""
    probe = copy.copy(call.module)
    _set_unit_stride(probe)
    dtype = next((t.dtype for t in [*probe.parameters(), *probe.buffers()]), torch.float32)
    with torch.no_grad():
        output = _run(call, probe, torch.empty(1, _channels(probe), *call.inputs, dtype=dtype, device="meta"))
    return call.inputs[0] - output.shape[2], call.inputs[1] - output.shape[3]


def _run(call: Call, operation: nn.Module, x: Tensor) -> Tensor:
    try:
        return operation(x)
    except FAILURES as error:
        kind = type(call.module).__name__
        raise ValueError(f"{call.name} ({kind}) cannot be tried by itself ({error}); use stride='keep'") from error


def _channels(module: nn.Module) -> int:
    """Channels of an image that the operation takes."""
    weight, groups = getattr(module, "weight", None), getattr(module, "groups", 1)
    return int(weight.shape[1] * groups if weight is not None else getattr(module, "channels", None) or 1)


def _stride(module: nn.Module) -> tuple[int, int]:
    """Its stride along y and x; (1, 1) where it has none."""
    stride = getattr(module, "stride", 1)
    if isinstance(stride, tuple | list):
        return int(stride[0]), int(stride[-1])
    return (stride, stride) if isinstance(stride, int) else (1, 1)


def _set_unit_stride(module: nn.Module) -> None:
    unit = (1, 1) if isinstance(module.stride, tuple | list) else 1
    setattr(module, "stride", unit)  # noqa: B010 (a plain attribute, which nn.Module's annotations do not know)
