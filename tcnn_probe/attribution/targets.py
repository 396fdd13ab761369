"""The class to explain, one for each image."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tcnn_probe.models import batches, class_scores

__all__ = ["find_targets"]


@torch.no_grad()
def find_targets(
    model: nn.Module, images: Tensor, target: int | Sequence[int] | Tensor | None, batch_size: int
) -> Tensor:
    """Classes, shape (B,): the model's own prediction, one class for all images, or those given.

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
