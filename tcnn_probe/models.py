"""Somebody else's model: the names of its layers, running it on images that were checked, and leaving it as it was."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from numbers import Integral
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from tcnn_model.conversion.selection import LayerFilter, select_layers
from tcnn_probe.hooks.modes import hidden_from_recorders

__all__ = [
    "batches",
    "check_model",
    "class_indices",
    "class_scores",
    "floating_tensor",
    "image_numbers",
    "layer_names",
    "progress_bar",
    "untouched",
    "unwrap",
    "wanted_layers",
    "whole_number",
]

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside wrappers such as DistributedDataParallel."""
    while isinstance(inner := getattr(model, "module", None), nn.Module) and len(list(model.children())) == 1:
        if not type(model).__module__.startswith("torch."):
            break
        model = inner
    return model


def layer_names(model: nn.Module) -> dict[nn.Module, str]:
    """The name of each module, in the model's order: without ``module.`` and other wrappers' parts; once if shared."""
    inner = unwrap(model)
    names = {}
    for name, module in inner.named_modules():
        names[module] = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return {module: names.get(module, "") for module in (*names, *model.modules())}


def wanted_layers(model: nn.Module, layers: LayerFilter | None) -> frozenset[str] | None:
    """Names that ``layers`` chooses among all modules, None for all; ValueError for one that the model lacks."""
    if layers is None:
        return None
    named = {name: module for module, name in layer_names(model).items()}
    return frozenset(select_layers(named, layers, what="layers"))


def check_model(model: nn.Module) -> None:
    """Refuse what hooks cannot follow: TypeError for no module, or a compiled one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(
                f"{f'the part {name!r} of the model' if name else 'the model'} is compiled, and hooks attached after "
                f"compilation are ignored: record the original model, or attach before torch.compile"
            )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and outside of the caller's inference mode; every flag and gradient is put back.

    What runs inside is not recorded by a recorder that is attached to the model. Threads wait for each other. TypeError
    if it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    with _LOCKS.setdefault(unwrap(model), RLock()):
        modes = [(module, module.training) for module in model.modules()]
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        try:
            model.eval()
            for parameter, _ in gradients:
                parameter.grad = None  # a method of the user's may go backward
            with hidden_from_recorders(), torch.inference_mode(False):
                yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient


def whole_number(number: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """The number as an int; TypeError if it is none, ValueError if it is out of range."""
    expected = f"expected an integer from {least}{'' if most is None else f' to {most}'} for {what}, got {number!r}"
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(expected)
    if (found := int(number)) < least or (most is not None and found > most):
        raise ValueError(expected)
    return found


def image_numbers(images: Any) -> tuple[int, ...]:
    """Numbers of images, ascending, from how many the first ones are, or from the numbers of some; None for none."""
    if images is not None and not isinstance(images, Collection):
        images = range(whole_number(images, "images, a number of them or the numbers of some"))
    return tuple(sorted({whole_number(number, "each of images") for number in (() if images is None else images)}))


def class_indices(given: Any, what: str, classes: int | None = None) -> Tensor:
    """Indices of classes as an int64 tensor on the CPU, a copy of any shape.

    TypeError if they are none, ValueError if they are not of so many classes.
    """
    try:
        indices = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"expected class indices for {what}, got {given!r}") from error
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"expected class indices for {what}, got {indices.dtype}")
    if (wrong := indices[(indices < 0) | (indices >= (torch.inf if classes is None else classes))]).numel():
        span = "" if classes is None else f" to {classes - 1}"
        raise ValueError(f"expected {what} from 0{span}, got {int(wrong[0])}")
    return indices.to(torch.int64, copy=True)


def floating_tensor(model: nn.Module) -> Tensor | None:
    """A parameter or buffer, which says what dtype and device the model's images need; None if it has none."""
    tensors = (x for group in (model.parameters(), model.buffers()) for x in group)
    return next((x for x in tensors if x.is_floating_point()), None)


def batches(model: nn.Module, images: Tensor, batch_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Copies of the images, some at a time, in the model's dtype and on its device; and which they are."""
    like = floating_tensor(model)
    like = images if like is None else like
    for start in range(0, len(images), batch_size):
        which = slice(start, min(start + batch_size, len(images)))
        yield which, images[which].detach().to(like.device, like.dtype, copy=True)


def class_scores(model: Callable[[Tensor], Any], images: Tensor) -> Tensor:
    """What the model gives, shape (B, K); TypeError if it is something else."""
    scores = model(images)
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(images):
        got = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"expected the model to give a score for each class, shape ({len(images)}, K), got {got}")
    return scores


def progress_bar(total: int | None, what: str, progress: bool | None, unit: str = "image") -> Any:
    """For so many images, if that is known: at once, never, or (None) after three seconds, on a terminal."""
    hidden = None if progress is None else not progress
    return tqdm(total=total, desc=what, unit=unit, leave=False, disable=hidden, delay=3 if progress is None else 0)
