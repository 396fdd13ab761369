"""What is explained, and by what: classes, layers and baselines, checked."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.models import batches, class_scores, layer_names

__all__ = ["as_baseline", "captum", "find_layer", "find_targets"]


def captum(part: str) -> Any:
    """A part of captum, which is imported by what needs it only.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.import_module(f"captum.{part}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"this needs captum: pip install captum ({error})", name="captum") from error


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
