"""The convolution that a module computes: its filters,
bias, stride and padding, taken from its call of ``conv2d``.

Weight-standardised and "same"-padded layers are subclasses of ``nn.Conv2d`` with their own forward
method. Rather than repeating their formulas, we run this method and take the arguments that it
passes to ``conv2d``.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcnn_model.gpsa.positional import Axis, Padding, axes

__all__ = ["Convolution", "describe"]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Convolution:
    """``conv2d(x, weight, bias, stride, padding, dilation, groups)``,
    as a module computes it in eval mode.

    Args:
        weight: Filters, shape (C_out, C_in / groups, k_h, k_w): the module's parameter if it is
            applied unchanged, else the tensor computed from the parameter (a standardised weight).
        bias: Bias, shape (C_out,), or None.
        stride, dilation: Steps along y and x.
        padding: Zeros on either side along y and x; or "same", TensorFlow's rule for any stride.
        groups: The argument of ``nn.Conv2d``.
        trainable: Whether filters and bias require gradients.
        training: Whether the module is in training mode.
    """

    weight: Tensor
    bias: Tensor | None
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    trainable: tuple[bool, bool]
    training: bool

    @property
    def kernel_size(self) -> Pair:
        """Size of the filters, (k_h, k_w)."""
        return _pair(self.weight.shape[2:])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the convolution: (B, C_in, H, W) -> (B, C_out, H_out, W_out)."""
        padding = self.padding
        if isinstance(padding, str):
            rows, cols = self.axes(*x.shape[2:])
            x = F.pad(x, (cols.before, cols.after, rows.before, rows.after))
            padding = (0, 0)
        return F.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def axes(self, height: int, width: int) -> tuple[Axis, Axis]:
        """Return the two spatial axes for an input of height x width pixels."""
        return axes((height, width), self.kernel_size, self.stride, self.padding, self.dilation)


def describe(module: nn.Module) -> Convolution:
    """Describe the convolution that a module computes.

    A copy of a subclass of ``nn.Conv2d`` is run in float64 on small random images, whose sizes have
    every residue of the stride, and its output must equal that of the description. (Values on the
    meta device cannot be compared.) If the module computes its filters or its bias from other
    parameters, these are dropped, and filters and bias are trainable if any of these parameters
    was.

    Raises:
        TypeError: If ``module`` is not an ``nn.Conv2d``.
        ValueError: If GPSA cannot replace the module: its padding is not zeros, its weight is
            parametrized or computed in a hook, its forward method was replaced or does anything
            else than one convolution with filters that do not depend on the image, or additional
            trainable parameters (such as LoRA's) are applied to a frozen weight.
    """
    # This check comes first, because torch gives a parametrized module a class of its own.
    if nn.utils.parametrize.is_parametrized(module):
        raise ValueError(
            "its weight is parametrized: call torch.nn.utils.parametrize.remove_parametrizations "
            "first"
        )
    if not isinstance(module, nn.Conv2d):
        raise TypeError(f"expected a torch.nn.Conv2d, got {type(module).__name__}")
    if module.padding_mode != "zeros":
        raise ValueError(f"expected padding_mode='zeros', got {module.padding_mode!r}")
    if "weight" not in module._parameters:
        raise ValueError(
            "its weight is computed at each forward (weight or spectral norm): remove the norm "
            "first"
        )
    # Libraries such as accelerate assign a forward method to the instance, which hides that of the
    # class.
    for name in ("forward", "_conv_forward"):
        if name in vars(module):
            raise ValueError(
                f"its {name} was replaced by another one, which would be lost: restore the "
                "original first"
            )
    if type(module) is nn.Conv2d:
        geometry = (module.stride, module.padding, module.dilation, module.groups)
        return _from_call(module, _bind(None, module.weight, module.bias, *geometry))
    return _from_trial(module)


def _from_trial(module: nn.Conv2d) -> Convolution:
    """Describe a subclass of ``nn.Conv2d`` by running a copy of it."""
    kind = type(module).__name__
    on_meta = module.weight.device.type == "meta"
    trial = copy.deepcopy(module).eval()
    if not on_meta:
        # In float64 the comparison below distinguishes a different function from rounding errors.
        trial = trial.to("cpu", torch.float64)
    images = _images(trial)
    outputs = []
    calls = []
    for image in images:
        output, arguments = _run(trial, image)
        if len(arguments) != 1:
            raise ValueError(
                f"{kind} makes {len(arguments)} calls of conv2d in its forward; expected one"
            )
        outputs.append(output)
        calls += arguments
    padded = any(
        call["input"].shape != image.shape for call, image in zip(calls, images, strict=True)
    )
    if padded and any(_zeros(call["padding"]) != (0, 0) for call in calls):
        raise ValueError(f"{kind} pads its input twice")
    # timm's Conv2dSame pads in its forward method. The comparison below shows whether it follows
    # the "same" rule.
    convolution = _from_call(trial, {**calls[0], "padding": "same"} if padded else calls[0])
    for image, output in zip(images, outputs, strict=True):
        expected = convolution(image)
        if expected.shape != output.shape or not (on_meta or torch.allclose(expected, output)):
            raise ValueError(
                f"{kind} computes something other than a single convolution with zero or 'same' "
                "padding"
            )
    return _with_parameters_of(module, trial, convolution)


def _images(module: nn.Conv2d) -> list[Tensor]:
    """Create small random images, whose sizes have each residue of the stride;
    at least two images.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    dilation, kernel_size, stride = (
        _pair(size) for size in (module.dilation, module.kernel_size, module.stride)
    )
    # The images are large enough for windows with and without padding.
    height, width = (
        2 * d * (k - 1) + 2 * s for d, k, s in zip(dilation, kernel_size, stride, strict=True)
    )
    images = []
    for residue in range(1 + max(module.stride)):
        shape = (2, module.in_channels, height + residue, width + residue)
        image = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        images.append(image.to(module.weight.device, module.weight.dtype))
    return images


class _Calls(TorchFunctionMode):
    """Mode that records the arguments of every ``conv2d``."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d:
            self.arguments.append(_bind(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _run(module: nn.Module, x: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """Run a module, and return its output and the arguments of its calls of ``conv2d``."""
    with _Calls() as calls:
        try:
            output = module(x)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{type(module).__name__} does not run on an image alone ({error})"
            ) from error
    return output, calls.arguments


def _bind(
    input: Any,  # noqa: A002 (torch's name)
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> dict[str, Any]:
    """Return the arguments of ``conv2d`` by name."""
    return {
        "input": input,
        "weight": weight,
        "bias": bias,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
    }


def _from_call(module: nn.Conv2d, call: dict[str, Any]) -> Convolution:
    """Describe the convolution of a module from the arguments of its call of ``conv2d``."""
    stride = _pair(call["stride"])
    padding = call["padding"]
    dilation = _pair(call["dilation"])
    if padding == "same":
        # At stride 1 and with odd extents, TensorFlow's rule gives symmetric padding for every
        # image size.
        total_y, total_x = (
            d * (k - 1) for d, k in zip(dilation, call["weight"].shape[2:], strict=True)
        )
        if stride == (1, 1) and total_y % 2 == total_x % 2 == 0:
            padding = (total_y // 2, total_x // 2)
    return Convolution(
        weight=call["weight"],
        bias=call["bias"],
        stride=stride,
        padding=padding if padding == "same" else _zeros(padding),
        dilation=dilation,
        groups=call["groups"],
        trainable=(
            module.weight.requires_grad,
            module.bias is not None and module.bias.requires_grad,
        ),
        training=module.training,
    )


def _with_parameters_of(
    module: nn.Conv2d, trial: nn.Module, convolution: Convolution
) -> Convolution:
    """Replace the parameters of a copy by those of the original in a description,
    if they are applied unchanged.
    """
    originals = {
        # Parameters are compared by identity, because different parameters can have equal values
        # (two gains of 1).
        id(copied): module.get_parameter(name)
        for name, copied in trial.named_parameters()
    }
    applied = {id(convolution.weight), id(convolution.bias)}
    dropped = {name: p for name, p in trial.named_parameters() if id(p) not in applied}
    computed_trains = _computed_trains(module, dropped)

    def original(tensor: Tensor) -> Tensor:
        return originals.get(id(tensor), tensor.to(module.weight))

    def trains(tensor: Tensor) -> bool:
        return originals[id(tensor)].requires_grad if id(tensor) in originals else computed_trains

    weight, bias = convolution.weight, convolution.bias
    return replace(
        convolution,
        weight=original(weight),
        bias=None if bias is None else original(bias),
        trainable=(trains(weight), bias is not None and trains(bias)),
        training=module.training,
    )


def _computed_trains(module: nn.Conv2d, dropped: dict[str, nn.Parameter]) -> bool:
    """Return whether filters computed from the dropped parameters,
    a single parameter in GPSA, should be trainable.

    A frozen gain is allowed. But if the weight is frozen while another parameter that is applied to
    it is trainable, a single parameter cannot be both.
    """
    base = []
    extra = []
    for name, parameter in dropped.items():
        if name in ("weight", "bias"):
            base.append(parameter.requires_grad)
        elif parameter.requires_grad:
            extra.append(name)
    if extra and not (base and all(base)):
        raise ValueError(
            f"{type(module).__name__} has further trainable parameters ({', '.join(extra)}), which "
            "would be lost in a weight that is frozen or not made from them: merge them into a "
            "plain nn.Conv2d, or freeze them, first"
        )
    return bool(extra) or any(base)


def _zeros(padding: Any) -> Pair:
    return (0, 0) if padding == "valid" else _pair(padding)


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    values = [int(v) for v in value]
    # torch accepts [3] for [3, 3].
    return values[0], values[-1]
