"""The resolution at which each module of a network works, seen by running it once with hooks."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["FAILURES", "Call", "InputSize", "Shapes", "copy_in_its_modes", "find_input_size", "meta_copy", "trace"]

Grid = tuple[int, int]
InputSize = tuple[int, int, int]

# They keep the shape, which PyTorch finds by running them step by step, in Python: most of the time of a conversion.
_NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm")

# What a network raises on an image that it does not take, or whose resolution changed under it.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


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


def copy_in_its_modes(model: nn.Module) -> nn.Module:
    """A deep copy, every module in the mode of its original: a copy of a ``torch.fx.GraphModule`` would be training.

    Raises:
        ValueError: a tensor of the model is computed from others, and kept as an attribute, which cannot be copied.
    """
    try:
        duplicate = copy.deepcopy(model)
    except RuntimeError as error:
        computed = [name for name, tensor in _plain_tensors(model).items() if not tensor.is_leaf]
        if not computed:
            raise
        raise ValueError(
            f"cannot copy {type(model).__name__}: {computed[0]} is computed from other tensors; if it is pruned or "
            f"normed, call torch.nn.utils.prune.remove, remove_weight_norm or remove_spectral_norm first"
        ) from error
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in duplicate.named_modules():
        module.training = modes.get(name, module.training)
    return duplicate


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy without storage or hooks, in eval mode: running it costs no memory and nobody notices."""
    duplicate = copy_in_its_modes(model).to("meta").eval()
    for module in duplicate.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return duplicate


def _plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors, by their dotted names, that are neither parameters nor buffers, but attributes of a module."""
    modules = model.named_modules()
    attributes = ((f"{name}.{key}".strip("."), value) for name, m in modules for key, value in vars(m).items())
    return {name: value for name, value in attributes if isinstance(value, Tensor)}


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
        if not isinstance(module, nn.Softmax):  # a function of the layer that it is in, which is the one attending
            operations.running.append(names[module])

    def observe(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if not isinstance(module, nn.Softmax):
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


class Shapes(TorchFunctionMode):
    """Norms give back what they are given: a network that runs without storage then gives its shapes much sooner."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in _NORMS:
            return args[0]
        return func(*args, **(kwargs or {}))


class _Operations(Shapes):
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
        return super().__torch_function__(func, types, args, kwargs)


def find_input_size(model: nn.Module, given: InputSize | None = None) -> InputSize:
    """(C, H, W) of an image that the model accepts: the one given, or H and W of timm's pretrained_cfg, or 224 x 224.

    Args:
        model: from :func:`meta_copy`.
        given: by the user, if at all.

    Raises:
        ValueError: the model does not run on it, nor (where none is given) with as many channels as its first
            convolution takes or its pretrained_cfg says; or a tensor of its own does not move with the model.
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
    left = [name for name, tensor in _plain_tensors(model).items() if tensor.device.type != "meta"]
    if left and "device" in str(reason):
        raise ValueError(
            f"could not run {type(model).__name__} without storage: {left[0]} is a tensor that is neither a parameter "
            f"nor a buffer, and so stays behind when the model is moved; make it a buffer with register_buffer "
            f"({type(reason).__name__}: {reason})"
        ) from reason
    tried = " x ".join(map(str, candidates[0]))
    raise ValueError(
        f"could not run {type(model).__name__} on an image of {tried}: pass input_size=(C, H, W) of one that it takes "
        f"({type(reason).__name__}: {reason})"
    ) from reason
