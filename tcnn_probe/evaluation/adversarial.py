"""Adversarial images: small steps of all pixels in the direction that raises the model's loss."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tcnn_probe.evaluation.checks import as_labels, as_pixels, check_labels
from tcnn_probe.evaluation.classifier import Classifier, Model, Normalization, as_classifier, quiet
from tcnn_probe.models import whole_number

__all__ = ["Ascent", "as_attacks", "fgsm", "pgd"]


def fgsm(
    model: Model, images: Any, labels: Any, *, epsilon: float = 1 / 255, normalization: Normalization | None = None
) -> Tensor:
    """One step of length ε along the sign of the loss's gradient, x + ε sign ∇ₓL(x, y), cut off at 0 and 1.

    This is :func:`pgd` with one step of length ε and no random start. (Goodfellow et al. 2015, Explaining and
    harnessing adversarial examples, §4.)

    Args:
        model, images, labels, epsilon, normalization: as of :func:`pgd`.

    Returns:
        images, as of :func:`pgd`.

    Raises:
        ValueError, TypeError: as :func:`pgd`.
    """
    options: dict[str, Any] = {"epsilon": epsilon, "step": epsilon, "normalization": normalization}
    return pgd(model, images, labels, steps=1, random_start=False, **options)


def pgd(
    model: Model,
    images: Any,
    labels: Any,
    *,
    epsilon: float = 1 / 255,
    step: float = 0.5 / 255,
    steps: int = 5,
    random_start: bool = True,
    seed: int = 0,
    first: int = 0,
    normalization: Normalization | None = None,
) -> Tensor:
    """Projected gradient ascent on the cross-entropy of the true classes, within ε of each pixel and in [0, 1].

    (Madry et al. 2018, Towards deep learning models resistant to adversarial attacks, §2.1, in the L∞ norm.)
    Untargeted. No pixel moves by more than ε: x ± ε is rounded towards x. A pixel whose gradient is 0 or NaN stays
    where it is.

    ::

        worse = tcnn_probe.evaluation.pgd(model, images, labels)
        accuracy = (model(normalize(worse)).argmax(1) == labels).float().mean()

    Args:
        model: a module, which runs in eval mode and is afterwards as it was; or a function, which is called as it is.
            From normalised images to scores, shape (B, K).
        images: in pixel space, shape (B, C, H, W), in [0, 1], before normalisation.
        labels: their classes, shape (B,).
        epsilon: how far each pixel may move, at most 1.
        step: length of a step, at most 1.
        steps: number of steps.
        random_start: whether to start at a uniformly random point within ε of the image, not at the image itself.
        seed: of that point, which for image i of the batch depends on (seed, first + i) alone.
        first: number of the batch's first image.
        normalization: (mean, std), applied before the model, each a number or one for each channel; None for that of
            timm's ``pretrained_cfg``; ((0,), (1,)) for none.

    Returns:
        images, shape (B, C, H, W), in pixel space, on the device of those given; float64 if those are, else float32.

    Raises:
        ValueError: images outside of [0, 1], labels that the model does not have, an option out of range, or a model
            that does not say how its images are normalised.
        TypeError: no images or labels, or a model that gives no scores or none that can be differentiated.
    """
    ascent = Ascent(epsilon, step, steps, random_start)
    seed, first = whole_number(seed, "seed"), whole_number(first, "first")
    pixels = as_pixels(images)
    classes = as_labels(labels, len(pixels))
    classifier = as_classifier(model, normalization, pixels.shape[1])
    with quiet(model):
        return ascent(classifier, pixels, classes, seed, first)


@dataclass(frozen=True)
class Ascent:
    """Steps up the loss, as :func:`pgd` takes them."""

    epsilon: float = 1 / 255
    step: float = 0.5 / 255
    steps: int = 5
    random_start: bool = True

    def __post_init__(self) -> None:
        for name, length in (("epsilon", self.epsilon), ("step", self.step)):
            if not 0 < length <= 1:
                hint = f"; did you mean {length:g} / 255?" if 1 < length <= 255 else ""
                raise ValueError(f"expected {name} above 0 and at most 1, the range of pixels, got {length!r}{hint}")
        whole_number(self.steps, "steps", 1)

    @torch.enable_grad()
    def __call__(self, classifier: Classifier, images: Tensor, labels: Tensor, seed: int, first: int) -> Tensor:
        """Adversarial images, shape (B, C, H, W), of checked ones; within ``quiet``."""
        found = classifier.place(images)
        low, high = _box(found, self.epsilon)
        if self.random_start:
            start = _random_start(found.shape, self.epsilon, seed, first).to(found)
            found = (found + start).clamp(low, high)
        for _ in range(self.steps):
            direction = _gradient(classifier, found, labels).sign()  # 0 of NaN
            found = (found + self.step * direction).clamp(low, high)
        return found.to(images.device)


def _one_step(epsilon: float = 1 / 255) -> Ascent:
    return Ascent(epsilon, step=epsilon, steps=1, random_start=False)


def as_attacks(asked: str | Collection[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, Ascent]:
    """Attacks by name, from their names or options; FGSM first."""
    known: dict[str, Callable[..., Ascent]] = {"fgsm": _one_step, "pgd": Ascent}
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"expected attacks among {', '.join(known)}; got {unknown[0]!r}")
    options = asked if isinstance(asked, Mapping) else {}
    return {name: attack(**options.get(name, {})) for name, attack in known.items() if name in names}


def _gradient(classifier: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the cross-entropy with respect to the images; parameters' own gradients are not touched."""
    images = images.detach().requires_grad_()
    scores = classifier(images)
    check_labels(labels, scores.shape[1])
    scale = 1024.0 if scores.dtype == torch.float16 else 1.0  # its sign is wanted, and small halves would be zero
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    loss = scale * F.cross_entropy(wide, labels.to(scores.device, copy=True), reduction="sum")
    gradient = torch.autograd.grad(loss, images, allow_unused=True)[0] if loss.requires_grad else None
    if gradient is None:
        raise TypeError("expected scores that can be differentiated by the images; the model detaches them")
    return gradient


def _box(images: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each pixel, in [0, 1] and, rounding included, no further off than epsilon."""
    exact = images.double()
    low, high = (exact - epsilon).to(images), (exact + epsilon).to(images)
    low = torch.where(exact - low.double() > epsilon, low.nextafter(images), low)
    high = torch.where(high.double() - exact > epsilon, high.nextafter(images), high)
    return low.clamp(min=0), high.clamp(max=1)


def _random_start(shape: torch.Size, epsilon: float, seed: int, first: int) -> Tensor:
    """Uniform in [-epsilon, epsilon), float64; each image from its own generator."""
    generators = [np.random.default_rng((seed, first + i)) for i in range(shape[0])]
    return torch.from_numpy(np.stack([g.uniform(-epsilon, epsilon, tuple(shape[1:])) for g in generators]))
