"""What is perturbed: images in pixel space and their labels, checked; and models that are afterwards as they were."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.hooks.modes import aside
from tcnn_probe.models import as_images, class_scores, untouched, unwrap
from tcnn_probe.perturbations.corrupt import SLACK

__all__ = ["Classifier", "Model", "Normalization", "as_classifier", "as_labels", "as_pixels", "check_classes", "quiet"]

Model = Callable[[Tensor], Any]

Normalization = tuple[float | Sequence[float] | Tensor, float | Sequence[float] | Tensor]


@dataclass(frozen=True)
class Classifier:
    """A model's scores of images in pixel space, only some classes allowed."""

    model: Model
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: Tensor | None = None
    device: torch.device | str | None = None

    def place(self, images: Tensor) -> Tensor:
        """A copy where the model is, in float32 at least."""
        like = self._like()
        device = self.device if self.device is not None else images.device if like is None else like.device
        return images.detach().to(device, torch.promote_types(images.dtype, torch.float32), copy=True)

    def __call__(self, images: Tensor) -> Tensor:
        """Scores, shape (B, K): of placed images (B, C, H, W) in [0, 1]; -inf for classes that are not allowed."""
        like = self._like()
        mean, std = (images.new_tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        normalized = (images - mean) / std
        scores = class_scores(self.model, normalized if like is None else normalized.to(like.dtype))
        if self.classes is None:
            return scores
        if (top := int(self.classes.max())) >= scores.shape[1]:
            raise ValueError(
                f"predictions are taken of a variant's classes, or of classes=: expected them from 0 to "
                f"{scores.shape[1] - 1}, the model having {scores.shape[1]} classes; got {top}"
            )
        out = torch.ones(scores.shape[1], dtype=torch.bool)
        out[self.classes] = False
        return scores.masked_fill(out.to(scores.device), -torch.inf)

    def _like(self) -> Tensor | None:
        """A tensor of the dtype and on the device of the model's parameters, if it has any."""
        if not isinstance(self.model, nn.Module):
            return None
        tensors = (x for group in (self.model.parameters(), self.model.buffers()) for x in group)
        return next((x for x in tensors if x.is_floating_point()), None)


def as_classifier(
    model: Model,
    normalization: Normalization | None,
    channels: int,
    classes: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Classifier:
    """A model with what normalises its images: given, or that of timm's configuration.

    Raises:
        TypeError: no callable.
        ValueError: no normalization is given and the model does not say; or one that is none for so many channels.
    """
    if not callable(model):
        raise TypeError(f"expected a module or a function from images to scores, got {type(model).__name__}")
    if normalization is None:
        config = getattr(unwrap(model) if isinstance(model, nn.Module) else model, "pretrained_cfg", None)
        if not isinstance(config, Mapping) or config.get("mean") is None or config.get("std") is None:
            raise ValueError(
                "the model does not say how its images are normalised (it has no pretrained_cfg of timm's): give "
                "normalization=(mean, std), each a number or one for each channel; ((0,), (1,)) for none"
            )
        normalization = config["mean"], config["std"]
    try:
        mean, std = (torch.as_tensor(each, dtype=torch.float64).cpu().flatten() for each in normalization)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected normalization=(mean, std), got {normalization!r}") from error
    for each in (mean, std):
        if len(each) not in (1, channels):
            raise ValueError(
                f"expected mean and std to be numbers, or one for each of the images' {channels} channels; got "
                f"{len(each)}: give normalization=(mean, std)"
            )
    if not (mean.isfinite().all() and (std > 0).all() and std.isfinite().all()):
        raise ValueError(f"expected a finite mean and a positive std, got {normalization!r}")
    return Classifier(model, tuple(mean.tolist()), tuple(std.tolist()), classes, device)


@contextmanager
def quiet(*models: Model) -> Iterator[None]:
    """Modules in eval mode, outside of the caller's inference mode and unseen by recorders; afterwards as they were.

    Of a function that is no module, nothing can be put into eval mode.
    """
    with ExitStack() as stack:
        for model in models:
            if isinstance(model, nn.Module):
                stack.enter_context(untouched(model))
        stack.enter_context(aside())
        stack.enter_context(torch.inference_mode(False))
        yield


def as_pixels(images: Any) -> Tensor:
    """Images in pixel space as a tensor, shape (B, C, H, W), floating point, in [0, 1].

    Raises:
        TypeError, ValueError: they are none.
    """
    images = as_images(images, "in pixel space, floating point in [0, 1] (of bytes: images / 255)")
    low, high = (float(x) for x in images.detach().aminmax())
    if not (low >= -SLACK and high <= 1 + SLACK):
        raise ValueError(
            f"expected images in pixel space, in [0, 1], before normalisation; got values from {low:.4g} to {high:.4g}"
        )
    return images.detach() if low >= 0 and high <= 1 else images.detach().clamp(0, 1)


def as_labels(labels: Any, images: int) -> Tensor:
    """Classes of images, shape (B,), int64.

    Raises:
        TypeError, ValueError: they are none.
    """
    try:
        given = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"expected class indices for labels, got {type(labels).__name__}") from error
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"expected class indices for labels, got {given.dtype}")
    if given.shape != (images,):
        raise ValueError(f"expected {images} labels, one for each image, got shape {tuple(given.shape)}")
    if (given < 0).any():
        raise ValueError(f"expected labels from 0, got {int(given.min())}")
    return given.to(torch.int64, copy=True)


def check_classes(labels: Tensor, classes: int, who: str = "the model") -> None:
    """Refuse labels that are none of the model's classes."""
    if (top := int(labels.max())) >= classes:
        raise ValueError(f"expected labels from 0 to {classes - 1}, {who} having {classes} classes; got {top}")
