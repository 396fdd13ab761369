"""One loop for trainings that take steps of their own, and the trainings of small networks with it.

The recipes were fixed before the results on the pages, and :func:`tcnn_model.finetune` has none of
them: it decays only matrices and filters, warms up in whole epochs, learns classes, and seeds the
generators at every step. These trainings decay all weights, warm up for a share of the steps, learn
a teacher's scores, pixels or features, read features from a cache, or are made ill between steps.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from common.digits import plain_digits
from common.verdicts import all_learned

__all__ = [
    "LABEL_SMOOTHING",
    "SHAPE",
    "accuracy",
    "decisions",
    "digits_learned",
    "fit",
    "noisy",
    "order_of_images",
    "rate_factor",
    "shuffled_rows",
    "take_steps",
    "warm_up_and_anneal",
]

LABEL_SMOOTHING = 0.1  # DeiT's, whose recipe the T-CNN paper follows
WARMUP = 0.05
"""Share of the steps in which learning rates rise from zero to their peak."""

BATCH, LR, WEIGHT_DECAY = 48, 2e-3, 0.05
SHAPE = {
    "img_size": 8,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": 10,
    "embed_dim": 48,
}
"""Options of timm's models for digits of 8 x 8 pixels: 4 x 4 patches of width 48."""

Rate = Callable[[int, dict[str, Any]], float]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def take_steps(
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Any, ...]],
    loss_of: Callable[..., Tensor],
    rate: Rate | None = None,
    *,
    after: Callable[[int, Tensor], None] = lambda step, loss: None,
) -> None:
    """Take a step of an optimizer with each batch.

    Args:
        optimizer: Optimizer.
        batches: Arguments of ``loss_of`` for each step. A batch is drawn after the step before it.
        loss_of: Function that returns the loss of a batch.
        rate: Function of a step, counted from 0, and a group of the optimizer, that returns the
            learning rate; None to leave the rates as they are.
        after: Function of the number of steps done and the loss, called after each step.
    """
    for step, batch in enumerate(batches):
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, group)
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        after(step + 1, loss.detach())


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the peak:
    a linear warm-up, then a cosine to zero.
    """
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + np.cos(np.pi * (step - warmup) / max(1, steps - warmup)))


def warm_up_and_anneal(peak: float, steps: int) -> Rate:
    """Return the rate of :func:`take_steps` that reaches a peak and falls to zero."""
    return lambda step, _: peak * rate_factor(step, steps)


def shuffled_rows(count: int, batch: int, epochs: int) -> Iterator[Tensor]:
    """Yield the rows of full batches, in an order that is drawn anew for each epoch."""
    for _ in range(epochs):
        yield from torch.randperm(count)[: count // batch * batch].split(batch)


def order_of_images(
    count: int, steps: int, batch_size: int, seed: int
) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield rows and views of the images of each step:
    a permutation per epoch, and view e in epoch e.

    Args:
        count: Number of images.
        steps: Number of steps of the training.
        batch_size: Number of images in a step.
        seed: Seed of the permutations.

    Yields:
        Rows and views, shape (batch_size,) each.
    """
    rng = np.random.default_rng(seed)
    # The number is rounded up, since the last permutation may be used in part.
    epochs = -(-steps * batch_size // count)
    rows = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    view = np.repeat(np.arange(epochs), count)
    for step in range(steps):
        part = slice(step * batch_size, (step + 1) * batch_size)
        yield rows[part], view[part]


def noisy(images: Tensor) -> Tensor:
    """Return images with noise: so few of them, of 17 values each, would be learned by heart."""
    return images + 0.1 * torch.randn_like(images)


def by_labels(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of a model's scores with the labels."""
    return F.cross_entropy(model(images), labels)


def fit(
    model: nn.Module,
    epochs: int,
    seed: int,
    loss_of: Loss = by_labels,
    *,
    limit: int | None = None,
) -> None:
    """Train a model in place on digits of 8 x 8 pixels, in seconds, and leave it in eval mode.

    Args:
        model: Network for images (B, 1, 8, 8).
        epochs: Number of passes through the training images.
        seed: Seed of the order of the images, and of the noise that is added to them.
        loss_of: Function of the model, a batch of images and their labels.
        limit: Number of training images; None for all.
    """
    trained = [value for value in model.parameters() if value.requires_grad]
    # The fused optimizer makes one pass over all weights, instead of several for each tensor.
    optimizer = torch.optim.AdamW(trained, LR, weight_decay=WEIGHT_DECAY, fused=True)
    images, labels = (values[:limit] for values in plain_digits(training=True))
    torch.manual_seed(seed)
    rows = shuffled_rows(len(images), BATCH, epochs)
    rate = warm_up_and_anneal(LR, epochs * (len(images) // BATCH))
    batches = ((noisy(images[part]), labels[part]) for part in rows)
    take_steps(optimizer, batches, partial(loss_of, model.train()), rate)
    model.eval()


@torch.no_grad()
def decisions(model: nn.Module) -> Tensor:
    """Return the classes that a model gives the validation digits, (N,)."""
    images, _ = plain_digits(training=False)
    return model.eval()(images).argmax(1)


def accuracy(decided: Tensor) -> float:
    """Return the share of validation digits that are classified correctly."""
    _, labels = plain_digits(training=False)
    return float((decided == labels).float().mean())


def digits_learned(accuracies: Iterable[tuple[str, float]]) -> bool:
    """Return whether all models, given by name and accuracy on the validation digits,
    beat chance; print a line for each that does not.
    """
    _, labels = plain_digits(training=False)
    chance = float(labels.bincount().max() / len(labels))
    return all_learned(accuracies, len(labels), chance)
