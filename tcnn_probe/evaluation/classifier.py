"""A user's model as a function from images in pixel space to scores of classes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.evaluation.checks import check_labels
from tcnn_probe.hooks.modes import hidden_from_recorders
from tcnn_probe.models import class_scores, floating_tensor, untouched, unwrap

__all__ = ["Classifier", "Model", "Normalization", "as_classifier", "quiet"]

Model = Callable[[Tensor], Any]
Normalization = tuple[float | Sequence[float] | Tensor, float | Sequence[float] | Tensor]


@dataclass(frozen=True)
class Classifier:
    """A model, the normalization of its images, and the classes that its prediction is taken of (None: all)."""

    model: Model
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[int, ...] | None = None
    device: torch.device | str | None = None

    def place(self, images: Tensor) -> Tensor:
        """A copy where the model is, in float32 at least."""
        like = self._like(images)
        device = like.device if self.device is None else self.device
        return images.detach().to(device, torch.promote_types(images.dtype, torch.float32), copy=True)

    def __call__(self, images: Tensor) -> Tensor:
        """Scores, shape (B, K), of placed images (B, C, H, W) in [0, 1]; -inf for classes that do not count."""
        mean, std = (images.new_tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        scores = class_scores(self.model, ((images - mean) / std).to(self._like(images).dtype))
        if self.classes is None:
            return scores
        check_labels(torch.tensor(self.classes), scores.shape[1])
        kept = torch.isin(torch.arange(scores.shape[1]), torch.tensor(self.classes))
        return scores.masked_fill(~kept.to(scores.device), -torch.inf)

    def _like(self, images: Tensor) -> Tensor:
        """A tensor of the model, or the images: of the dtype and on the device that the model needs."""
        found = floating_tensor(self.model) if isinstance(self.model, nn.Module) else None
        return images if found is None else found


def as_classifier(
    model: Model,
    normalization: Normalization | None,
    channels: int,
    classes: tuple[int, ...] | None = None,
    device: torch.device | str | None = None,
) -> Classifier:
    """The model with the normalization that is given, or that of timm's configuration."""
    if not callable(model):
        raise TypeError(f"expected a module or a function from images to scores, got {type(model).__name__}")
    if normalization is None:
        config = getattr(unwrap(model) if isinstance(model, nn.Module) else model, "pretrained_cfg", None) or {}
        if config.get("mean") is None or config.get("std") is None:
            raise ValueError(
                "the model does not say how its images are normalised (it has no pretrained_cfg of timm's): give "
                "normalization=(mean, std), each a number or one for each channel; ((0,), (1,)) for none"
            )
        normalization = config["mean"], config["std"]
    try:
        mean, std = (torch.as_tensor(each, dtype=torch.float64).cpu().flatten() for each in normalization)
        fits = all(len(each) in (1, channels) and bool(each.isfinite().all()) for each in (mean, std))
    except (TypeError, ValueError):
        fits = False
    if not fits or (std <= 0).any():
        raise ValueError(
            "expected normalization=(mean, std), finite numbers or one for each of the images' "
            f"{channels} channels, std positive; got {normalization!r}"
        )
    return Classifier(model, tuple(mean.tolist()), tuple(std.tolist()), classes, device)


@contextmanager
def quiet(*models: Model) -> Iterator[None]:
    """Modules in eval mode, outside of the caller's inference mode and unseen by recorders; afterwards as they were."""
    with ExitStack() as stack:
        for model in models:
            if isinstance(model, nn.Module):
                stack.enter_context(untouched(model))
        stack.enter_context(hidden_from_recorders())
        stack.enter_context(torch.inference_mode(False))
        yield
