"""What is explained: images and classes, checked, and a model that is afterwards as it was."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_probe.names import layer_names
from tcnn_probe.seeing.forwards import aside

__all__ = [
    "as_baseline",
    "as_images",
    "batches",
    "captum",
    "check_batch_size",
    "class_scores",
    "find_layer",
    "find_targets",
    "untouched",
]


def captum(part: str) -> Any:
    """A part of captum, which is imported by what needs it only.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.import_module(f"captum.{part}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"this needs captum: pip install captum ({error})", name="captum") from error


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and outside of the caller's inference mode; every flag and gradient is put back.

    What runs inside is not recorded by a recorder that is attached to the model.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in gradients:
            parameter.grad = None  # a method of the user's may go backward
        with aside(), torch.inference_mode(False):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient


def as_images(images: Any) -> Tensor:
    """Images as a tensor, shape (B, C, H, W), floating point; not copied if they are one.

    Raises:
        TypeError, ValueError: they are none.
    """
    if not isinstance(images, Tensor):
        array = np.array(images)  # a copy: torch takes no array that is read-only or mirrored
        if array.dtype.kind not in "fiub":
            raise TypeError(f"expected images, a tensor or an array (B, C, H, W), got {type(images).__name__}")
        images = torch.from_numpy(array)
    if images.ndim != 4 or images.numel() == 0:
        hint = "; of one image: images[None]" if images.ndim == 3 else ""
        raise ValueError(f"expected images of shape (B, C, H, W), B > 0, got shape {tuple(images.shape)}{hint}")
    if not images.is_floating_point():
        raise TypeError(f"expected images as the model takes them, floating point and normalised, got {images.dtype}")
    return images


def as_baseline(baseline: Any, images: Tensor) -> float | Tensor:
    """What images are compared with: a number, or an image expanded to all of them, (B, C, H, W).

    Raises:
        ValueError: neither.
    """
    if isinstance(baseline, (int, float)):
        return float(baseline)
    image = torch.as_tensor(baseline).detach()
    try:
        return image.to(images).expand(images.shape[1:]).expand_as(images)
    except RuntimeError as error:
        shapes = f"{tuple(images.shape[1:])}, got shape {tuple(image.shape)}"
        raise ValueError(f"expected a number, or a baseline image that broadcasts to {shapes}") from error


def check_batch_size(batch_size: int) -> None:
    """Refuse what is no positive integer."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"expected a positive integer for batch_size, got {batch_size!r}")


def batches(model: nn.Module, images: Tensor, batch_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Copies of the images, some at a time, in the model's dtype and on its device; and which they are."""
    tensors = (x for group in (model.parameters(), model.buffers()) for x in group if x.is_floating_point())
    like = next(tensors, images)
    for start in range(0, len(images), batch_size):
        which = slice(start, min(start + batch_size, len(images)))
        yield which, images[which].detach().to(like.device, like.dtype, copy=True)


def class_scores(model: nn.Module, images: Tensor) -> Tensor:
    """What the model gives, shape (B, K).

    Raises:
        TypeError: it is something else.
    """
    scores = model(images)
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(images):
        got = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"expected the model to give a score for each class, shape ({len(images)}, K), got {got}")
    return scores


@torch.no_grad()
def find_targets(
    model: nn.Module, images: Tensor, target: int | Sequence[int] | Tensor | None, batch_size: int
) -> Tensor:
    """A class for each image, shape (B,): the model's own prediction, one for all, or those given.

    Raises:
        TypeError, ValueError: no classes, classes that the model does not have, or not one for each image.
    """
    if target is None:
        return torch.cat([class_scores(model, some).argmax(1).cpu() for _, some in batches(model, images, batch_size)])
    try:
        given = torch.as_tensor(target).cpu()
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected class indices for target, got {target!r}") from error
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"expected class indices for target, got {given.dtype}")
    if given.ndim and given.shape != images.shape[:1]:
        raise ValueError(f"expected one target, or {len(images)}: one an image; got shape {tuple(given.shape)}")
    classes = class_scores(model, next(batches(model, images, 1))[1]).shape[1]
    if (wrong := given[(given < 0) | (given >= classes)]).numel():
        raise ValueError(f"expected targets from 0 to {classes - 1}, got {int(wrong.flatten()[0])}")
    return given.long().expand(len(images)).clone()


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """A layer's name and itself, from either.

    Raises:
        ValueError: the model has none such.
    """
    for module, name in layer_names(model).items():
        if module is layer or name == layer:
            return name, module
    what = repr(layer) if isinstance(layer, str) else f"this {type(layer).__name__}"
    raise ValueError(f"the model has no layer {what}; model.named_modules() has their names")
