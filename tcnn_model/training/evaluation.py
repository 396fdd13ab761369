"""Losses and accuracies of an epoch, and their computation."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from tcnn_model.outputs import check_targets, class_scores

__all__ = [
    "AveragedResult",
    "EpochResult",
    "best_result",
    "evaluate",
    "totals",
    "with_bar",
]


@dataclass(frozen=True)
class EpochResult:
    """Losses and accuracies of an epoch. Accuracies are top-1 in [0,
    1]; losses are means per image in nats.

    ``lr`` is the learning rate of the weights, not of the gates, at the epoch's last step. With
    mixup or CutMix, the training accuracy counts a prediction as right if it is the class with the
    larger share.

    Epoch 0 is the model before training; its training loss and accuracy are NaN.
    """

    epoch: int
    train_loss: float
    train_top1: float
    val_loss: float
    top1: float
    lr: float


@dataclass(frozen=True)
class AveragedResult(EpochResult):
    """Result of an epoch, with the loss and accuracy
    of the moving average of the weights as well.
    """

    ema_val_loss: float
    ema_top1: float


def best_result(history: Sequence[EpochResult]) -> EpochResult:
    """Return the result with the best accuracy, the latest one if several are equal."""
    return max(history, key=lambda result: (result.top1, result.epoch))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device | str | None = None,
    amp: bool | torch.dtype | None = False,
    progress: bool = True,
    over_ranks: Callable[[Tensor], Tensor] = lambda total: total,
    after_batch: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Compute mean cross-entropy (nats) and top-1 accuracy
    of ``model`` in eval mode, and restore its modes.

    Args:
        model: Any classifier, also one of the package transformers.
        loader: Batches of images (B, C, H, W) and class indices (B,).
        device: Device to validate on; None for the model's.
        amp: Dtype of autocast; True for bfloat16, False or None for no autocast.
        progress: Whether to show a progress bar.
        over_ranks: Function that sums the totals, shape (3,), over processes that each validate a
            part of the images.
        after_batch: Function that is called after each batch.

    Raises:
        ValueError: The loader has no images, or none of them can be read; or a label is none of the
            model's classes.
    """
    target = next(model.parameters()).device if device is None else torch.device(device)
    # Modes are saved by module, as model.train() afterwards would also switch frozen norms, which
    # stay in eval mode.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # In float64 the sum over 50,000 images has no visible rounding error, whatever the batch
        # size.
        total = torch.zeros(3, dtype=torch.float64, device=target)
        for images, labels in with_bar(loader, "validating", progress):
            images = images.to(target, non_blocking=True)
            with torch.autocast(
                target.type,
                torch.bfloat16 if amp is True else amp or None,
                enabled=bool(amp),
            ):
                logits = class_scores(model, images)
            # The labels are still on the CPU, where reading them waits for nothing.
            check_targets(labels, logits)
            labels = labels.to(target, non_blocking=True)
            # In bfloat16 the loss would have only 8 significant bits.
            loss = F.cross_entropy(logits.float(), labels)
            # No .item() here: it would make the CPU wait for the GPU in each batch.
            total += totals(logits, loss, labels)
            after_batch()
    finally:
        for module, training in modes.items():
            module.training = training
    loss, correct, count = over_ranks(total).tolist()
    if not count:
        raise ValueError("no validation image can be read")
    return loss / count, correct / count


@torch.no_grad()
def totals(logits: Tensor, loss: Tensor, targets: Tensor) -> Tensor:
    """Return [sum of losses, number correct, number of images].

    Args:
        logits: Scores, shape (B, K).
        loss: Mean loss of the images, shape ().
        targets: Class indices (B,) or class probabilities (B, K).
    """
    labels = targets if targets.ndim == 1 else targets.argmax(1)
    # For mixed images, the class with the larger share is the label.
    correct = (logits.argmax(1) == labels).sum()
    return torch.stack(
        [
            loss.double() * len(labels),
            correct.double(),
            correct.new_tensor(len(labels)).double(),
        ]
    )


def with_bar(batches: Iterable[Any], description: str, progress: bool) -> Iterator[Any]:
    """Yield the batches, and show a progress bar."""
    # Not tqdm(loader), because tqdm.auto opens a second iterator on the loader, and every image
    # would be loaded twice.
    count = len(batches) if isinstance(batches, Sized) else None
    with tqdm(total=count, desc=description, leave=False, disable=not progress) as bar:
        for batch in batches:
            yield batch
            bar.update()
