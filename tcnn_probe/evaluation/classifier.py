"""A user's model as a function from images in pixel space to class scores."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.outputs import class_scores
from tcnn_probe.evaluation.checks import check_labels
from tcnn_probe.hooks.modes import hidden_from_recorders
from tcnn_probe.models import floating_tensor, missing_head, untouched, unwrap

__all__ = ["Classifier", "Model", "Normalization", "as_classifier", "restored"]

Model = Callable[[Tensor], Any]
Normalization = tuple[float | Sequence[float] | Tensor, float | Sequence[float] | Tensor]


@dataclass(frozen=True)
class Classifier:
    """A model, the normalization of its images,
    the classes among which it predicts (None: all), and its scores.

    The score is "sigmoid" if each output is the log-odds of its class by itself; a single output is
    then that of class 1 against class 0. Else outputs are logits of a softmax.
    """

    model: Model
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[int, ...] | None = None
    device: torch.device | str | None = None
    score: str | None = None

    def place(self, images: Tensor) -> Tensor:
        """Copy images to the model's device, in float32 at least:
        the steps of attacks vanish in half precision.
        """
        device = self._reference(images).device if self.device is None else self.device
        return images.detach().to(
            device, torch.promote_types(images.dtype, torch.float32), copy=True
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Score placed images (B, C, H, W) in [0, 1]: shape (B, K), -inf for excluded classes."""
        mean = images.new_tensor(self.mean).view(-1, 1, 1)
        std = images.new_tensor(self.std).view(-1, 1, 1)
        scores = class_scores(self.model, ((images - mean) / std).to(self._reference(images).dtype))
        if scores.shape[1] == 1:
            if self.score != "sigmoid":
                raise ValueError(
                    "expected scores (B, K) of several classes, got one number for each image, "
                    "whose softmax is always 1: robustness(..., score='sigmoid') takes it for the "
                    "log-odds of class 1; other functions need a model that returns "
                    "torch.cat([-scores, scores], 1) / 2"
                )
            # The sigmoid of -s is 1 minus that of s.
            scores = torch.cat([-scores, scores], 1)
        if self.classes is None:
            return scores
        classes = torch.tensor(self.classes)
        check_labels(classes, scores.shape[1])
        excluded = torch.isin(torch.arange(scores.shape[1]), classes, invert=True)
        # With -inf a class is never the best and has no share of the softmax, and indices of other
        # classes stay.
        return scores.masked_fill(excluded.to(scores.device), -torch.inf)

    def confidence(self, scores: Tensor) -> Tensor:
        """Return the probability of the best class of scores (B, K): shape (B,)."""
        # In half precision confidences near 1 would have steps of up to 0.004.
        scores = scores.float()
        if self.score == "sigmoid":
            return scores.amax(1).sigmoid()
        return scores.softmax(1).amax(1)

    def _reference(self, images: Tensor) -> Tensor:
        """Return a tensor with the dtype and device that the model takes:
        one of the model's, or else the images.
        """
        tensor = floating_tensor(self.model) if isinstance(self.model, nn.Module) else None
        if tensor is not None and tensor.is_meta:  # it is offloaded between forwards
            return images[:0].to(tensor.dtype)
        return images if tensor is None else tensor


def as_classifier(
    model: Model,
    normalization: Normalization | None,
    channels: int,
    classes: tuple[int, ...] | None = None,
    device: torch.device | str | None = None,
    score: str | None = None,
) -> Classifier:
    """Combine a model with a normalization, None for that of timm's configuration."""
    if isinstance(model, nn.Module) and (reason := missing_head(model)):
        raise ValueError(f"expected a model with a classifier; this one gives features ({reason})")
    if not callable(model):
        raise TypeError(
            f"expected a module or a function from images to scores, got {type(model).__name__}"
        )
    if normalization is None:
        config = (
            getattr(
                unwrap(model) if isinstance(model, nn.Module) else model,
                "pretrained_cfg",
                None,
            )
            or {}
        )
        if config.get("mean") is None or config.get("std") is None:
            raise ValueError(
                "the model does not say how its images are normalised (it has no timm "
                "pretrained_cfg): give normalization=(mean, std), each a number or one for each "
                "channel; ((0,), (1,)) for none"
            )
        normalization = config["mean"], config["std"]
    try:  # flattened: normalisations of shape (C, 1, 1) are common
        mean, std = (
            torch.as_tensor(numbers, dtype=torch.float64).cpu().flatten()
            for numbers in normalization
        )
        valid = {len(mean), len(std)} <= {1, channels} and bool(
            (mean.isfinite() & std.isfinite() & (std > 0)).all()
        )
    except (TypeError, ValueError):  # not two values, or not numbers
        valid = False
    if not valid:
        raise ValueError(
            "expected normalization=(mean, std), finite numbers or one for each of the images' "
            f"{channels} channels, std positive; got {normalization!r}"
        )
    return Classifier(model, tuple(mean.tolist()), tuple(std.tolist()), classes, device, score)


@contextmanager
def restored(*models: Model) -> Iterator[None]:
    """Run modules in eval mode, outside of inference mode
    and hidden from recorders; restore them afterwards.
    """
    with ExitStack() as stack:
        for model in models:
            if isinstance(model, nn.Module):
                stack.enter_context(untouched(model))
        stack.enter_context(hidden_from_recorders())
        # Attacks need gradients, even if the caller is in inference mode.
        stack.enter_context(torch.inference_mode(False))
        yield
