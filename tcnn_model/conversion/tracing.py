"""The resolution at which each module of a network works,
measured by running the network once with hooks.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

__all__ = [
    "FAILURES",
    "Call",
    "InputSize",
    "Shapes",
    "carries_hooks",
    "copy_in_its_modes",
    "find_input_size",
    "meta_copy",
    "trace",
]

Grid = tuple[int, int]
InputSize = tuple[int, int, int]

# Norms keep the shape. On the meta device PyTorch runs them step by step in Python, which would
# take most of the time of a conversion.
_NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm")

# Errors that networks raise on an image that they do not accept, or after a change of resolution.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


@dataclass(frozen=True)
class Call:
    """A run of a module that maps a feature map to a feature map.

    Args:
        name: Name of the module in the model.
        module: The module, on the meta device.
        inputs, outputs: Sizes (H, W) of the feature maps.
        in_attention: Whether the module is inside an attention layer, whose resolution may differ
            from the network's.
        convolves: Whether the module itself calls conv2d with a k x k kernel, k > 1.
    """

    name: str
    module: nn.Module
    inputs: Grid
    outputs: Grid
    in_attention: bool = False
    convolves: bool = False

    @property
    def reduces(self) -> bool:
        """True if the output has fewer rows or columns than the input."""
        rows, columns = self.inputs
        return self.outputs[0] < rows or self.outputs[1] < columns


def copy_in_its_modes(model: nn.Module) -> nn.Module:
    """Return a deep copy in which every module has the mode of its original.

    Raises:
        ValueError: If an attribute of a module is a tensor computed from other tensors, which
            cannot be copied.
    """
    try:
        duplicate = copy.deepcopy(model)
    except RuntimeError as error:
        computed = [name for name, tensor in _plain_tensors(model).items() if not tensor.is_leaf]
        if not computed:
            raise
        raise ValueError(
            f"cannot copy {type(model).__name__}: {computed[0]} is computed from other tensors; if "
            "it is pruned or normed, call torch.nn.utils.prune.remove, remove_weight_norm or "
            "remove_spectral_norm first"
        ) from error
    # copy.deepcopy returns feature extractors made by torch.fx (timm's, torchvision's) in training
    # mode (torch 2.15).
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in duplicate.named_modules():
        module.training = modes.get(name, module.training)
    return duplicate


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode without storage or hooks,
    which runs without memory for values or calls of hooks.
    """
    duplicate = copy_in_its_modes(model).to("meta").eval()
    # Hooks of the user may record or print, which a trial run must not cause.
    for module in duplicate.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return duplicate


def _plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return tensors that are plain attributes of a module,
    not parameters or buffers, by their dotted names.
    """
    tensors = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}".strip(".")] = value
    return tensors


def trace(model: nn.Module, input_size: InputSize) -> list[Call]:
    """Run the feature extractor of a model on the meta device.

    Only ``forward_features`` is run if the model has it, so that the classifier's convolutions do
    not count.

    Args:
        model: Result of :func:`meta_copy`.
        input_size: Size of the image, (C, H, W).

    Returns:
        A :class:`Call` for each run of a module that maps a feature map to a feature map, in the
        order of their ends.
    """
    calls: list[Call] = []
    names = {module: name for name, module in model.named_modules()}
    operations = _Operations()

    def enter(module: nn.Module, inputs: tuple[object, ...]) -> None:
        # An nn.Softmax is treated as a function called by the module around it, which is the
        # attention layer.
        if not isinstance(module, nn.Softmax):
            operations.running.append(names[module])

    def leave(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if not isinstance(module, nn.Softmax):
            operations.running.pop()
        x = inputs[0] if inputs else None
        if isinstance(x, Tensor) and isinstance(output, Tensor) and x.ndim == output.ndim == 4:
            calls.append(
                Call(
                    names[module],
                    module,
                    (x.shape[2], x.shape[3]),
                    (output.shape[2], output.shape[3]),
                )
            )

    handles: list[RemovableHandle] = []
    for module in names:
        handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave),
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
        replace(
            call,
            in_attention=call.name.startswith(attention),
            convolves=call.name in operations.convolving,
        )
        for call in calls
    ]


class Shapes(TorchFunctionMode):
    """Mode in which norms return their input, which makes a run on the meta device much faster."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in _NORMS:
            return args[0]
        return func(*args, **(kwargs or {}))


class _Operations(Shapes):
    """Mode that collects modules that call conv2d,
    and attention layers: modules with a softmax over the last axis.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.attention: set[str] = set()
        self.convolving: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        module = self.running[-1] if self.running else ""
        if name == "conv2d":
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if max(weight.shape[2:]) > 1:
                self.convolving.add(module)
        attends = name == "scaled_dot_product_attention"
        if name == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            # The input of a classifier's softmax has only two axes, (B, K).
            axes = args[0].ndim
            attends = axes > 2 and dim in (-1, axes - 1)
        if module and attends:
            self.attention.add(module)
        return super().__torch_function__(func, types, args, kwargs)


def find_input_size(model: nn.Module, input_size: InputSize | None = None) -> InputSize:
    """Return the size (C, H, W) of an image that the model accepts.

    Args:
        model: Result of :func:`meta_copy`.
        input_size: Size to try. By default H and W are those of timm's ``pretrained_cfg``, or 224 x
            224.

    Raises:
        ValueError: If the model does not run on an image of this size (by default neither with the
            input channels of its first convolution nor with those of its ``pretrained_cfg``), or if
            a tensor does not move with it.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, height, width = config.get("input_size") or (3, 224, 224)
    first = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), channels)
    # The two differ for in_chans=1, and for stems that turn space into depth before their first
    # convolution.
    candidates = (
        [(first, height, width), (channels, height, width)] if input_size is None else [input_size]
    )
    for candidate in candidates:
        try:
            trace(model, candidate)
        except FAILURES as error:
            reason = error
        else:
            return candidate
    off_meta = [
        name for name, tensor in _plain_tensors(model).items() if tensor.device.type != "meta"
    ]
    if off_meta and "device" in str(reason):
        raise ValueError(
            f"could not run {type(model).__name__} without storage: {off_meta[0]} is a tensor that "
            "is neither a parameter nor a buffer, and so stays behind when the model is moved; "
            f"make it a buffer with register_buffer ({type(reason).__name__}: {reason})"
        ) from reason
    size = " x ".join(map(str, candidates[0]))
    raise ValueError(
        f"could not run {type(model).__name__} on an image of {size}: pass the input_size=(C, H, "
        f"W) of one that it accepts ({type(reason).__name__}: {reason})"
    ) from reason


def carries_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which would be lost if it were replaced."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
