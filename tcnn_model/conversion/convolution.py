"""The convolution that a module computes: filters, bias, stride and padding, seen in the one call that it makes.

Weight-standardised and "same"-padded layers are subclasses of ``nn.Conv2d`` with a forward of their own. Rather than
retype their formulas, the forward is run and the arguments it hands to ``conv2d`` are taken.
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
    """``conv2d(x, weight, bias, stride, padding, dilation, groups)``, as one module computes it in eval mode.

    Args:
        weight: filters, shape (C_out, C_in / groups, k_h, k_w): the module's own parameter where it applies that as
            it is, else what it makes of it (a standardised weight).
        bias: shape (C_out,), or None.
        stride, dilation: along y and x.
        padding: zeros on either side along y and x; or "same", TensorFlow's rule for any stride.
        groups: as in ``nn.Conv2d``.
        trainable: whether filters and bias require gradients.
        training: the module's mode.
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
        """(k_h, k_w)."""
        return _pair(self.weight.shape[2:])

    def __call__(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H_out, W_out)."""
        if isinstance(self.padding, str):
            y, x_axis = self.axes(*x.shape[2:])
            x = F.pad(x, (x_axis.before, x_axis.after, y.before, y.after))
        padding = (0, 0) if isinstance(self.padding, str) else self.padding
        return F.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def axes(self, height: int, width: int) -> tuple[Axis, Axis]:
        """The two spatial axes for an input of height x width pixels."""
        return axes((height, width), self.kernel_size, self.stride, self.padding, self.dilation)


def describe(module: nn.Module) -> Convolution:
    """The convolution that a module computes.

    A subclass of ``nn.Conv2d`` is run in float64, on a copy, over small random images of every residue of its stride;
    what it gives there has to be what the description gives. (Values on the meta device cannot be compared.)
    Where it computes its filters or its bias, what it computes them from is dropped, and they train if any of that did.

    Raises:
        TypeError: ``module`` is no ``nn.Conv2d``.
        ValueError: GPSA cannot stand for it: its padding is not zeros, its weight is parametrized or computed in a
            hook, or its forward does anything else than one convolution with filters that do not depend on the image;
            it was given another forward; or trainable parameters of its own (as LoRA's) are applied to a frozen weight.
    """
    if nn.utils.parametrize.is_parametrized(module):
        raise ValueError("its weight is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first")
    if not isinstance(module, nn.Conv2d):
        raise TypeError(f"expected a torch.nn.Conv2d, got {type(module).__name__}")
    if module.padding_mode != "zeros":
        raise ValueError(f"expected padding_mode='zeros', got {module.padding_mode!r}")
    if "weight" not in module._parameters:
        raise ValueError("its weight is computed at each forward (weight or spectral norm): remove the norm first")
    if replaced := [name for name in ("forward", "_conv_forward") if name in vars(module)]:
        raise ValueError(f"its {replaced[0]} was replaced by another, which would be lost: take that off first")
    if type(module) is nn.Conv2d:
        return _described(module, _bind(None, module.weight, module.bias, *_geometry(module)))
    return _observed(module)


def _observed(module: nn.Conv2d) -> Convolution:
    kind = type(module).__name__
    real = module.weight.device.type != "meta"
    probe = copy.deepcopy(module).eval()
    probe = probe.to("cpu", torch.float64) if real else probe
    runs = [_run(probe, image) for image in _images(probe)]
    if any(len(calls) != 1 for _, _, calls in runs):
        count = next(len(calls) for _, _, calls in runs if len(calls) != 1)
        raise ValueError(f"{kind} makes {count} calls of conv2d in its forward; expected one")
    calls = [calls[0] for _, _, calls in runs]
    padded = any(call["input"].shape != x.shape for call, (x, _, _) in zip(calls, runs, strict=True))
    if padded and any(_zeros(call["padding"]) != (0, 0) for call in calls):
        raise ValueError(f"{kind} pads its input twice")
    own = _described(probe, {**calls[0], "padding": "same"} if padded else calls[0])
    for x, output, _ in runs:
        expected = own(x)
        if expected.shape != output.shape or (real and not torch.allclose(expected, output)):
            raise ValueError(f"{kind} computes something else than one convolution with zero or 'same' padding")
    return _in_terms_of(module, probe, own)


def _images(module: nn.Conv2d) -> list[Tensor]:
    """Small random images, one of each residue of the stride and at least two."""
    generator = torch.Generator("cpu").manual_seed(0)
    height, width = (2 * d * (k - 1) + 2 * s for d, k, s in zip(*map(_pair, _sizes(module)), strict=True))
    weight = module.weight
    shapes = [(2, module.in_channels, height + n, width + n) for n in range(1 + max(module.stride))]
    images = [torch.randn(s, generator=generator, dtype=torch.float64, device="cpu") for s in shapes]
    return [image.to(weight.device, weight.dtype) for image in images]


def _sizes(module: nn.Conv2d) -> tuple[Any, ...]:
    return module.dilation, module.kernel_size, module.stride


class _Calls(TorchFunctionMode):
    """Records the arguments of every ``conv2d``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d:
            self.seen.append(_bind(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _run(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
    with _Calls() as calls:
        try:
            output = module(x)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{type(module).__name__} does not run on an image alone ({error})") from error
    return x, output, calls.seen


def _bind(
    input: Any,  # noqa: A002 (torch's name)
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> dict[str, Any]:
    """The arguments of ``conv2d`` by name."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return dict(zip(names, (input, weight, bias, stride, padding, dilation, groups), strict=True))


def _geometry(module: nn.Conv2d) -> tuple[Any, ...]:
    return module.stride, module.padding, module.dilation, module.groups


def _described(module: nn.Conv2d, call: dict[str, Any]) -> Convolution:
    padding, dilation, kernel = call["padding"], _pair(call["dilation"]), _pair(call["weight"].shape[2:])
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        symmetric = _pair(call["stride"]) == (1, 1) and not any(t % 2 for t in total)
        padding = (total[0] // 2, total[1] // 2) if symmetric else "same"
    return Convolution(
        weight=call["weight"],
        bias=call["bias"],
        stride=_pair(call["stride"]),
        padding=padding if padding == "same" else _zeros(padding),
        dilation=dilation,
        groups=call["groups"],
        trainable=(module.weight.requires_grad, module.bias is not None and module.bias.requires_grad),
        training=module.training,
    )


def _in_terms_of(module: nn.Conv2d, probe: nn.Module, own: Convolution) -> Convolution:
    """The description of a probe with the parameters of the module that it is a copy of, where they are applied."""
    original = {id(copied): module.get_parameter(name) for name, copied in probe.named_parameters()}
    applied = {id(own.weight), id(own.bias)}
    dropped = {name: p for name, p in probe.named_parameters() if id(p) not in applied}
    trainable = _train_together(module, dropped)

    def tensor(found: Tensor | None) -> Tensor | None:
        return found if found is None else original.get(id(found), found.to(module.weight))

    def trains(found: Tensor | None) -> bool:
        return found is not None and (original[id(found)].requires_grad if id(found) in original else trainable)

    weight = tensor(own.weight)
    assert weight is not None
    return replace(
        own,
        weight=weight,
        bias=tensor(own.bias),
        trainable=(trains(own.weight), trains(own.bias)),
        training=module.training,
    )


def _train_together(module: nn.Conv2d, dropped: dict[str, nn.Parameter]) -> bool:
    """Whether the parameters that a module computes its filters from train: in GPSA they are one, the result.

    A gain may be frozen; but where the weight is, and what is applied to it trains, the result could do neither.
    """
    base = [p.requires_grad for name, p in dropped.items() if name in ("weight", "bias")]
    extra = [name for name, p in dropped.items() if name not in ("weight", "bias") and p.requires_grad]
    if extra and not (base and all(base)):
        raise ValueError(
            f"{type(module).__name__} has further trainable parameters ({', '.join(extra)}), which would be lost in a "
            f"weight that is frozen or not made from them: merge them into a plain nn.Conv2d, or freeze them, first"
        )
    return bool(extra) or any(base)


def _zeros(padding: Any) -> Pair:
    return (0, 0) if padding == "valid" else _pair(padding)


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    values = [int(v) for v in value]
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])
