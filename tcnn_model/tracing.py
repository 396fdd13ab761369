"""Seeing at which resolution each module of a network works, by running it once with hooks."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["FAILURES", "Call", "InputSize", "find_input_size", "meta_copy", "trace"]

Grid = tuple[int, int]
InputSize = tuple[int, int, int]

# What a network raises on an image that it does not take, or whose resolution changed under it.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True)
class Call:
    """One run of a module that maps a feature map to a feature map.

    Args:
        name: the module's name in the model.
        module: the module, on the meta device.
        inputs, outputs: (H, W) of the feature maps.
        in_attention: whether it runs inside an attention layer: its resolution need not be that of the network.
        convolves: whether it calls conv2d itself, with a k x k kernel, k > 1.
    """

    name: str
    module: nn.Module
    inputs: Grid
    outputs: Grid
    in_attention: bool = False
    convolves: bool = False

    @property
    def reduces(self) -> bool:
        """Whether the output has fewer rows or columns than the input."""
        return self.outputs[0] < self.inputs[0] or self.outputs[1] < self.inputs[1]


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy without storage or hooks, in eval mode: running it costs no memory and nobody notices."""
    duplicate = copy.deepcopy(model).to("meta").eval()
    for module in duplicate.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return duplicate


def trace(model: nn.Module, input_size: InputSize) -> list[Call]:
    """Run the feature extractor of a model on the meta device.

    Only ``forward_features`` is run where the model has one, so that the classifier's convolutions do not count.

    Args:
        model: from :func:`meta_copy`.
        input_size: (C, H, W).

    Returns:
        a :class:`Call` for each run of each module with one feature map in and one out, in the order they ended.
    """
    calls: list[Call] = []
    names = {module: name for name, module in model.named_modules()}
    operations = _Operations()

    def enter(module: nn.Module, inputs: tuple[object, ...]) -> None:
        operations.running.append(names[module])

    def observe(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        operations.running.pop()
        x = inputs[0] if inputs else None
        if isinstance(x, Tensor) and isinstance(output, Tensor) and x.ndim == output.ndim == 4:
            calls.append(Call(names[module], module, (x.shape[2], x.shape[3]), (output.shape[2], output.shape[3])))

    handles = [
        handle for m in names for handle in (m.register_forward_pre_hook(enter), m.register_forward_hook(observe))
    ]
    try:
        parameter = next(model.parameters(), torch.empty(0))
        images = torch.empty(2, *input_size, dtype=parameter.dtype, device="meta")
        with torch.no_grad(), operations:
            getattr(model, "forward_features", model)(images)
    finally:
        for handle in handles:
            handle.remove()
    attention = tuple(f"{name}." for name in operations.attention)
    return [
        replace(call, in_attention=call.name.startswith(attention), convolves=call.name in operations.convolving)
        for call in calls
    ]


class _Operations(TorchFunctionMode):
    """Notes the modules that themselves convolve, and those that run a softmax over the last axis: attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.attention: set[str] = set()
        self.convolving: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        module = self.running[-1] if self.running else ""
        if name == "conv2d" and max(args[1].shape[2:] if len(args) > 1 else kwargs["weight"].shape[2:]) > 1:
            self.convolving.add(module)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        weights = name == "softmax" and args[0].ndim > 2 and dim in (-1, args[0].ndim - 1)  # no class scores
        if module and (weights or name == "scaled_dot_product_attention"):
            self.attention.add(module)
        return func(*args, **kwargs)


def find_input_size(model: nn.Module, given: InputSize | None = None) -> InputSize:
    """(C, H, W) of an image that the model accepts: the one given, or H and W of timm's pretrained_cfg, or 224 x 224.

    Args:
        model: from :func:`meta_copy`.
        given: by the user, if at all.

    Raises:
        ValueError: the model does not run on it, nor (where none is given) with as many channels as its first
            convolution takes or its pretrained_cfg says.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, height, width = config.get("input_size") or (3, 224, 224)
    first = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), channels)
    # The channels differ for in_chans=1, and for stems that turn space into depth before their first convolution.
    candidates = [(first, height, width), (channels, height, width)] if given is None else [given]
    for candidate in candidates:
        try:
            trace(model, candidate)
        except FAILURES as error:
            reason = error
        else:
            return candidate
    tried = " x ".join(map(str, candidates[0]))
    raise ValueError(
        f"could not run {type(model).__name__} on an image of {tried}: pass input_size=(C, H, W) of one that it takes "
        f"({type(reason).__name__}: {reason})"
    ) from reason
