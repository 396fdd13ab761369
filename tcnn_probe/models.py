"""Models of users: names of their layers, checked arguments, and runs that leave them unchanged."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from numbers import Integral
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from tcnn_model.conversion.selection import LayerFilter, select_layers
from tcnn_probe.hooks.calls import balanced_hooks
from tcnn_probe.hooks.compilation import Eagerness
from tcnn_probe.hooks.modes import balanced_modes, hidden_from_recorders
from tcnn_probe.hooks.private_torch import COMPILED_MODULE

__all__ = [
    "batches",
    "check_model",
    "check_module",
    "class_indices",
    "first_line",
    "floating_tensor",
    "for_model",
    "image_numbers",
    "layer_names",
    "missing_head",
    "module_name",
    "plain_filter",
    "plain_name",
    "progress_bar",
    "split_weights",
    "untouched",
    "unwrap",
    "wanted_layers",
    "whole_number",
]

# Names of the classifier in timm, DINO, torchvision and transformers; for features, an identity is
# put there.
_HEADS = ("head", "heads", "fc", "classifier")
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
# Packages whose wrappers have the model as their only part, "module": DistributedDataParallel and
# AveragedModel of torch, ModelEmaV3 of timm.
_PACKAGES = ("torch", "timm", "accelerate", "deepspeed")
# Private names under which torch 2.x keeps the module in FSDP, activation checkpointing and
# torch.compile.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", COMPILED_MODULE)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as DistributedDataParallel,
    averages of weights, and peft's.
    """
    while True:
        inner: Any = getattr(model, "module", None)
        base: Any = getattr(model, "get_base_model", None)
        if _is_of(model, "peft") and base is not None:
            inner = base()
        # A user's own module may have a single child called "module".
        elif len(list(model.children())) != 1 or not _is_of(model, *_PACKAGES):
            return model
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _is_of(module: nn.Module, *packages: str) -> bool:
    return type(module).__module__.partition(".")[0] in packages


def missing_head(model: nn.Module) -> str:
    """Return how it is known that the model has no classifier
    and returns features; "" if it is not.
    """
    network = unwrap(model)
    while True:
        if getattr(network, "num_classes", None) == 0:
            return "num_classes=0"
        for name in _HEADS:
            if isinstance(getattr(network, name, None), nn.Identity):
                return f"{name!r} is an identity"
        inner = [*network.children()]
        # A wrapper returns what the model inside returns.
        if len(inner) != 1 or isinstance(network, nn.Sequential):
            return ""
        network = inner[0]


def split_weights(module: nn.Module) -> Iterator[Any]:
    """Yield the parameters of which this rank has some rows,
    as of layers that tensor parallelism splits by column.

    Parameters that fully_shard has split are whole in the forward of their module, and are left
    out.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for part in module.modules():
        if part is not module and isinstance(part, FSDPModule):
            continue
        for parameter in part.parameters(recurse=False):
            if isinstance(parameter, DTensor) and any(
                placement.is_shard(0) and parameter.device_mesh.size(dim) > 1
                for dim, placement in enumerate(parameter.placements)
            ):
                yield parameter


def layer_names(model: nn.Module) -> dict[nn.Module, str]:
    """Map modules to their names, in the model's order, without the parts that wrappers add."""
    names = {}
    modules = dict(unwrap(model).named_modules())
    for name, module in modules.items():
        parts = name.split(".")
        kept = [
            part
            for place, part in enumerate(parts)
            if part not in _WRAPPERS and not _is_wrapped(modules[".".join(parts[:place])], part)
        ]
        names[module] = ".".join(kept)
    return names | {module: "" for module in model.modules() if module not in names}


def module_name(layer: str) -> str:
    """Return the name of a layer's module:
    "attn#1" is the second attention in each call of the module "attn".
    """
    return layer.split("#")[0]


def _is_wrapped(module: nn.Module, part: str) -> bool:
    """Return whether a part of a module is what the module wraps,
    which may itself be a part of the model.
    """
    # peft keeps the model as "base_model.model", and a layer that it adapts as "base_layer".
    if _is_of(module, "peft"):
        return part in ("base_model", "model", "base_layer")
    return part == "module" and _is_of(module, *_PACKAGES)


def plain_name(model: nn.Module, name: str) -> str:
    """Return a layer's name, or a glob, without the parts that wrappers add,
    as in "module.blocks.0".
    """
    modules = dict(model.named_modules())
    if name in modules:
        return layer_names(model)[modules[name]]
    inner = unwrap(model)
    prefix = next(name for name, module in model.named_modules() if module is inner)
    return name.removeprefix(f"{prefix}.") if prefix else name


def plain_filter(model: nn.Module, layers: LayerFilter) -> LayerFilter:
    """Return names and globs of layers without the names of wrappers; other filters as they are."""
    if isinstance(layers, str):
        return plain_name(model, layers)
    if callable(layers) or not isinstance(layers, Collection):
        return layers
    return [plain_name(model, layer) if isinstance(layer, str) else layer for layer in layers]


def wanted_layers(model: nn.Module, layers: LayerFilter | None) -> frozenset[str] | None:
    """Return the names that ``layers`` selects, None for all;
    raise ValueError for a layer that the model lacks.
    """
    if layers is None:
        return None
    by_name = {name: module for module, name in layer_names(model).items()}
    return frozenset(select_layers(by_name, plain_filter(model, layers), noun="layers"))


def check_module(model: nn.Module) -> None:
    """Raise TypeError for objects that are no modules."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def check_model(model: nn.Module) -> None:
    """Raise TypeError for objects that hooks cannot follow."""
    check_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "the model is TorchScript, which runs outside of Python, where hooks see nothing: give "
            "the module that it was made from"
        )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode, uncompiled, outside of inference mode;
    restore every flag and gradient afterwards.

    Forwards inside are hidden from recorders that are attached to the model. Threads wait for each
    other. Raise TypeError if the model is not a module.
    """
    check_module(model)
    # Flags and gradients belong to the model, not to a thread, so two calls at once would restore
    # each other's changes.
    with _LOCKS.setdefault(unwrap(model), RLock()):
        modes = [(module, module.training) for module in model.modules()]
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        eagerness = Eagerness(model)

        def restore() -> None:
            eagerness.close()
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient

        try:
            eagerness.open()
            for module, _ in modes:
                # eval() is avoided, because modules of torch.export refuse it, and other modules
                # merge weights in it.
                module.training = False
            for parameter, _ in gradients:
                # Backward passes inside would add to the user's gradients.
                parameter.grad = None
            with (
                balanced_hooks(model),
                balanced_modes(),
                hidden_from_recorders(),
                # Inference tensors have no gradients, which many methods need.
                torch.inference_mode(False),
            ):
                yield
        finally:
            try:
                restore()
            except KeyboardInterrupt:
                restore()  # Ctrl-C interrupted the first attempt
                raise


def whole_number(number: Any, noun: str, low: int = 0, high: int | None = None) -> int:
    """Return the number as an int; raise TypeError if it is not an integer,
    ValueError if it is out of range.
    """
    expected = (
        f"expected an integer from {low}{'' if high is None else f' to {high}'} for {noun}, "
        f"got {number!r}"
    )
    # True is an Integral in Python, but is never meant as 1 here.
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(expected)
    value = int(number)
    if value < low or (high is not None and value > high):
        raise ValueError(expected)
    return value


def image_numbers(images: Any) -> tuple[int, ...]:
    """Return indices of images in ascending order,
    given a number n for the first n, indices, or None for none.
    """
    if images is None:
        return ()
    if isinstance(images, str) or not isinstance(images, Collection):
        images = range(whole_number(images, "images, a number of them or a list of their numbers"))
    return tuple(sorted({whole_number(number, "each of images") for number in images}))


def class_indices(labels: Any, noun: str, classes: int | None = None) -> Tensor:
    """Copy indices of classes, of any shape, to an int64 tensor on the CPU.

    Raise TypeError if they are not integers, ValueError if they are negative or not below
    ``classes``.
    """
    try:
        indices = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"expected class indices for {noun}, got {labels!r}") from error
    if (
        # Probabilities or masks instead of indices would be truncated silently.
        indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool
    ):
        raise TypeError(f"expected class indices for {noun}, got {indices.dtype}")
    outside = indices[(indices < 0) | (indices >= (torch.inf if classes is None else classes))]
    if outside.numel():
        span = "" if classes is None else f" to {classes - 1}"
        raise ValueError(f"expected {noun} from 0{span}, got {int(outside[0])}")
    return indices.to(torch.int64, copy=True)


def floating_tensor(model: nn.Module) -> Tensor | None:
    """Return a floating-point parameter or buffer,
    which gives the dtype and device of images; None without any.
    """
    return next(
        (
            tensor
            for tensor in chain(model.parameters(), model.buffers())
            if tensor.is_floating_point()
        ),
        None,
    )


def batches(model: nn.Module, images: Tensor, batch_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over batches: the slice of the images,
    and a copy in the model's dtype and on its device.
    """
    for start in range(0, len(images), batch_size):
        rows = slice(start, min(start + batch_size, len(images)))
        # Images are copied even if dtype and device agree, because methods such as PGD change their
        # images.
        yield rows, for_model(images[rows].detach().clone(), model)


def for_model(images: Tensor, model: nn.Module) -> Tensor:
    """Return images in the model's dtype and on its device;
    an offloaded model moves its images itself.
    """
    like = floating_tensor(model)
    if like is None:
        return images
    # Weights that accelerate has offloaded are on the meta device between forwards.
    return images.to(images.device if like.is_meta else like.device, like.dtype)


def progress_bar(total: int | None, title: str, progress: bool | None, unit: str = "image") -> Any:
    """Create a progress bar, shown at once (True),
    never (False), or on a screen after three seconds (None).
    """
    disable = None if progress is None else not progress  # None: unless on a terminal
    if progress is None and _in_notebook():
        disable = False
    return tqdm(
        total=total,
        desc=title,
        unit=unit,
        leave=False,
        disable=disable,
        delay=3 if progress is None else 0,
    )


def _in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, whose streams are not terminals."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return hasattr(get_shell(), "kernel")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type; without the colon before code."""
    return next(iter(str(error).splitlines()), type(error).__name__).removesuffix(":")
