"""Trainings of small networks on digits of 8 x 8 pixels without clutter,
which take seconds each.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.digits import plain_digits
from common.ending import learned
from common.small_trainings import rate_factor

__all__ = ["SHAPE", "accuracy", "all_learned", "decisions", "fit", "widened"]

BATCH, LR, WEIGHT_DECAY = 48, 2e-3, 0.05
SHAPE = {
    "img_size": 8,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": 10,
    "embed_dim": 48,
}
"""Options of timm's models: 4 x 4 patches of width 48."""

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def by_labels(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of a model's scores with the labels."""
    return F.cross_entropy(model(images), labels)


def fit(model: nn.Module, epochs: int, seed: int, loss_of: Loss = by_labels) -> None:
    """Train a model in place with AdamW, and leave it in eval mode.

    Args:
        model: Network for images (B, 1, 8, 8).
        epochs: Number of passes through the training images.
        seed: Seed of the order of the images, and of the noise that is added to them.
        loss_of: Function of the model, a batch of images and their labels.
    """
    trained = [value for value in model.parameters() if value.requires_grad]
    # The fused optimizer makes one pass over all weights, instead of several for each tensor.
    optimizer = torch.optim.AdamW(trained, LR, weight_decay=WEIGHT_DECAY, fused=True)
    images, labels = plain_digits(training=True)
    torch.manual_seed(seed)
    steps = len(images) // BATCH
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(images))
        for step, rows in enumerate(order[: steps * BATCH].split(BATCH)):
            done = epoch * steps + step
            optimizer.param_groups[0]["lr"] = LR * rate_factor(done, epochs * steps)
            # Without noise so few images, whose pixels have 17 values, would be learned by heart.
            noisy = images[rows] + 0.1 * torch.randn(len(rows), 1, 8, 8)
            loss = loss_of(model, noisy, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def widened(model: nn.Module) -> nn.Module:
    """Reinitialise the linear layers of a model
    in place with torch's defaults, and return the model.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            # timm's initial values, for widths of 192 and more, are too small for 48.
            layer.reset_parameters()
    return model


@torch.no_grad()
def decisions(model: nn.Module) -> Tensor:
    """Return the classes that a model gives the validation images, (N,)."""
    images, _ = plain_digits(training=False)
    return model.eval()(images).argmax(1)


def accuracy(decided: Tensor) -> float:
    """Return the share of validation images that are classified correctly."""
    _, labels = plain_digits(training=False)
    return float((decided == labels).float().mean())


def all_learned(accuracies: Iterable[tuple[str, float]]) -> bool:
    """Return whether all models, given by name and accuracy,
    beat chance; print a line for each that does not.
    """
    _, labels = plain_digits(training=False)
    chance = float(labels.bincount().max() / len(labels))
    verdicts = [learned(name, top1, len(labels), chance) for name, top1 in accuracies]
    return all(verdicts)
