"""Adversarial images, by small steps of all pixels
in the direction that increases the model's loss.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tcnn_probe.evaluation.checks import as_labels, as_pixels, check_labels
from tcnn_probe.evaluation.classifier import (
    Classifier,
    Model,
    Normalization,
    as_classifier,
    restored,
)
from tcnn_probe.models import whole_number

__all__ = ["Ascent", "as_attacks", "fgsm", "pgd"]


def fgsm(
    model: Model,
    images: Any,
    labels: Any,
    *,
    epsilon: float = 1 / 255,
    normalization: Normalization | None = None,
) -> Tensor:
    """Take one step of length ε along the sign of the loss's gradient,
    x + ε sign ∇ₓL(x, y), clipped to [0, 1].

    This is :func:`pgd` with one step of length ε and no random start. (Goodfellow et al. 2015,
    Explaining and harnessing adversarial examples, §4.)

    Args:
        model, images, labels, epsilon, normalization: Arguments of :func:`pgd`.

    Returns:
        Adversarial images; see :func:`pgd`.

    Raises:
        ValueError, TypeError: See :func:`pgd`.
    """
    length: dict[str, Any] = {"epsilon": epsilon, "step": epsilon}
    return pgd(
        model,
        images,
        labels,
        **length,
        steps=1,
        random_start=False,
        normalization=normalization,
    )


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
    """Attack by projected gradient ascent on the cross-entropy,
    within ε of each pixel and in [0, 1].

    (Madry et al. 2018, Towards deep learning models resistant to adversarial attacks, §2.1, in the
    L∞ norm.) The attack is untargeted. No pixel changes by more than ε: x ± ε is rounded towards x.
    A pixel whose gradient is 0 or NaN does not change.

    ::

        worse = tcnn_probe.evaluation.pgd(model, images, labels)
        accuracy = (model(normalize(worse)).argmax(1) == labels).float().mean()

    Args:
        model: A module, which runs in eval mode and is restored afterwards; or a function, which is
            called as it is. It maps normalised images to scores, shape (B, K).
        images: Images in pixel space, before normalisation: shape (B, C, H, W), in [0, 1]; or
            pictures, see :func:`tcnn_probe.images.as_images`.
        labels: True classes of the images, shape (B,).
        epsilon: Largest change of a pixel, at most 1.
        step: Length of a step, at most 1.
        steps: Number of steps.
        random_start: Whether to start at a uniformly random point within ε of the image, instead of
            the image itself.
        seed: Seed of the random start, which for image i of the batch depends only on (seed, first
            + i).
        first: Number of the batch's first image.
        normalization: Mean and standard deviation, applied before the model, each a number or one
            for each channel; None for those of timm's ``pretrained_cfg``; ((0,), (1,)) for no
            normalisation.

    Returns:
        Adversarial images, shape (B, C, H, W), in pixel space, on the device of ``images``; float64
        if the images are, else float32.

    Raises:
        ValueError: Images are outside of [0, 1], the model lacks the class of a label or a known
            normalisation, or an option is out of range.
        TypeError: The arguments are not images or labels, or the model does not return scores that
            can be differentiated.
    """
    ascent = Ascent(epsilon, step, steps, random_start)
    seed, first = whole_number(seed, "seed"), whole_number(first, "first")
    pixels = as_pixels(images, [model])
    classes = as_labels(labels, len(pixels))
    classifier = as_classifier(model, normalization, pixels.shape[1])
    with restored(model):
        return ascent(classifier, pixels, classes, seed, first)


@dataclass(frozen=True)
class Ascent:
    """Projected gradient ascent with these options; see :func:`pgd`."""

    # Defaults of the T-CNN paper's ICLR submission, after Mao et al. 2021, Towards Robust Vision
    # Transformer.
    epsilon: float = 1 / 255
    step: float = 0.5 / 255
    steps: int = 5
    random_start: bool = True

    def __post_init__(self) -> None:
        for name, length in (("epsilon", self.epsilon), ("step", self.step)):
            if not 0 < length <= 1:
                hint = f"; did you mean {length:g} / 255?" if 1 < length <= 255 else ""
                raise ValueError(
                    f"expected {name} above 0 and at most 1, the range of pixels, got "
                    f"{length!r}{hint}"
                )
        whole_number(self.steps, "steps", 1)

    @torch.enable_grad()
    def __call__(
        self,
        classifier: Classifier,
        images: Tensor,
        labels: Tensor,
        seed: int,
        first: int,
    ) -> Tensor:
        """Attack images that were checked, shape (B, C, H, W). Must be called within
        ``restored``.
        """
        adversarial = classifier.place(images)
        low, high = _box(adversarial, self.epsilon)
        if self.random_start:
            offset = _random_start(adversarial.shape, self.epsilon, seed, first).to(adversarial)
            adversarial = (adversarial + offset).clamp(low, high)
        for _ in range(self.steps):
            # sign(NaN) is 0 in torch, so a pixel with a gradient of NaN does not change.
            direction = _gradient(classifier, adversarial, labels).sign()
            adversarial = (adversarial + self.step * direction).clamp(low, high)
        return adversarial.to(images.device)


def _one_step(epsilon: float = 1 / 255) -> Ascent:
    return Ascent(epsilon, step=epsilon, steps=1, random_start=False)


def as_attacks(
    attacks: str | Collection[str] | Mapping[str, Mapping[str, Any]],
) -> dict[str, Ascent]:
    """Build attacks, FGSM first, from names or from options by name."""
    known: dict[str, Callable[..., Ascent]] = {"fgsm": _one_step, "pgd": Ascent}
    names = [attacks] if isinstance(attacks, str) else list(attacks)
    for name in names:
        if name not in known:
            raise ValueError(f"expected attacks among {', '.join(known)}; got {name!r}")
    options = attacks if isinstance(attacks, Mapping) else {}
    return {
        name: attack(**options.get(name, {})) for name, attack in known.items() if name in names
    }


def _gradient(classifier: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """Differentiate the cross-entropy with respect to the images,
    without changing the parameters' gradients.
    """
    images = images.detach().requires_grad_()
    scores = classifier(images)
    check_labels(labels, scores.shape[1])
    # Gradients in half precision would underflow to 0 without a scale, which does not change their
    # sign.
    scale = 1024.0 if scores.dtype == torch.float16 else 1.0
    logits = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # With the sum, an image's gradient does not depend on the batch size. Labels are copied,
    # because tensors created in inference mode cannot be saved for backward.
    loss = scale * F.cross_entropy(logits, labels.to(scores.device, copy=True), reduction="sum")
    gradient = (
        torch.autograd.grad(loss, images, allow_unused=True)[0] if loss.requires_grad else None
    )
    if gradient is None:
        raise TypeError(
            "expected scores that can be differentiated with respect to the images; the model "
            "detaches them"
        )
    return gradient


def _box(images: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest value of each pixel,
    in [0, 1] and, including rounding, within epsilon of it.
    """
    # x ± ε in the images' dtype may round away from x; such a bound is replaced by its neighbour
    # towards x.
    exact = images.double()
    low, high = (exact - epsilon).to(images), (exact + epsilon).to(images)
    low = torch.where(exact - low.double() > epsilon, low.nextafter(images), low)
    high = torch.where(high.double() - exact > epsilon, high.nextafter(images), high)
    return low.clamp(min=0), high.clamp(max=1)


def _random_start(shape: torch.Size, epsilon: float, seed: int, first: int) -> Tensor:
    """Draw offsets uniformly from [-epsilon,
    epsilon), float64, with a separate generator for each image.
    """
    generators = [
        # NumPy's generators are used, because torch's draw different numbers on different devices.
        np.random.default_rng((seed, number))
        for number in range(first, first + shape[0])
    ]
    return torch.from_numpy(
        np.stack([rng.uniform(-epsilon, epsilon, tuple(shape[1:])) for rng in generators])
    )
