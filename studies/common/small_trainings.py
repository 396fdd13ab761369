"""Trainings on small photographs: the CNN's fine-tuning,
and a schedule and image order that all arms share.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from common.small_images import SmallImages, normalized, views

__all__ = [
    "LABEL_SMOOTHING",
    "accuracy",
    "fine_tune_cnn",
    "order_of_images",
    "rate_factor",
]

LABEL_SMOOTHING = 0.1  # DeiT's, whose recipe the T-CNN paper follows
WARMUP = 0.05
"""Share of the steps in which learning rates rise from zero to their peak."""


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the peak:
    a linear warm-up, then a cosine to zero.
    """
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + np.cos(np.pi * (step - warmup) / max(1, steps - warmup)))


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


def fine_tune_cnn(
    model: nn.Module,
    images: SmallImages,
    held_out: SmallImages,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    weight_decay: float,
    amp: bool,
    report: Callable[[int, float], None],
) -> None:
    """Fine-tune the CNN in place with AdamW;
    ``report`` takes each epoch's number and accuracy on held-out images.
    """
    # Convolutions on the CPU are faster in this layout.
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, fused=True)
    steps_per_epoch = max(1, len(images) // batch_size)
    steps = epochs * steps_per_epoch
    for step, (rows, view) in enumerate(order_of_images(len(images), steps, batch_size, seed=0)):
        model.train()
        optimizer.param_groups[0]["lr"] = lr * rate_factor(step, steps)
        pixels = normalized(views(images, rows, view))
        labels = torch.from_numpy(images.labels[rows])
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            scores = model(pixels)
        # The loss is computed in float32, because that of bfloat16 scores has three digits.
        F.cross_entropy(scores.float(), labels, label_smoothing=LABEL_SMOOTHING).backward()
        optimizer.step()
        if (step + 1) % steps_per_epoch == 0:
            report((step + 1) // steps_per_epoch, accuracy(model, held_out))


@torch.inference_mode()
def accuracy(model: nn.Module, images: SmallImages, batch_size: int = 250) -> float:
    """Return the share of images that the model classifies correctly in eval mode."""
    model.eval()
    right = 0
    for start in range(0, len(images), batch_size):
        part = images.part(slice(start, start + batch_size))
        scores: Tensor = model(normalized(part.pixels))
        right += int((scores.argmax(1).numpy() == part.labels).sum())
    return right / len(images)
