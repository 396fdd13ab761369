"""The task of a model in a step: its loss, with a teacher's part in it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.loss import (
    BinaryCrossEntropy,
    LabelSmoothingCrossEntropy,
    SoftTargetCrossEntropy,
)
from torch import Tensor, nn

from tcnn_model.outputs import class_scores

__all__ = ["Classification", "Criterion", "create_criterion", "create_task"]

Criterion = Callable[[Tensor, Tensor], Tensor]


class Classification:
    """The loss of the class scores.

    Args:
        forward: Function from images (B, C, H, W) to scores (B, K), or to an output of transformers with ``logits``:
            the model, compiled or distributed.
        criterion: Function from scores and targets to a loss.
    """

    def __init__(self, forward: Callable[[Tensor], Any], criterion: Criterion) -> None:
        self.forward = forward
        self.criterion = criterion

    def __call__(self, images: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Compute the loss, and the scores."""
        scores = class_scores(self.forward, images)
        return {"loss": self.criterion(scores.float(), targets), "output": scores}


class _HardLogitDistillation(Classification):
    """The mean of the labels' loss and that of a teacher's decisions (DeiT, thesis Sec. 3.3, "hard-label")."""

    def __init__(
        self,
        forward: Callable[[Tensor], Any],
        criterion: Criterion,
        teacher: Any,
        norm: Any,
    ) -> None:
        super().__init__(forward, criterion)
        self.teacher = teacher
        self._norm = norm

    def __call__(self, images: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        result = super().__call__(images, targets)
        with torch.no_grad():
            # The images are normalised for the student: the teacher undoes it, and applies its own mean and deviation.
            normalized = self.teacher.normalize_input(images, *self._norm)
            decisions = class_scores(self.teacher, normalized).argmax(1)
        loss = (
            result["loss"] + F.cross_entropy(result["output"].float(), decisions)
        ) / 2
        return {**result, "loss": loss}


def create_criterion(loss: str, *, label_smoothing: float, mixed: bool) -> nn.Module:
    """Create timm's loss. If images are mixed, smoothing is in the targets already.

    Args:
        loss: "ce" for cross-entropy, or "bce" for the binary cross-entropy of each class.
        label_smoothing: Share of the targets that is spread over all classes, in [0, 1).
        mixed: Whether targets are shares of classes (B, K).

    Raises:
        ValueError: The loss is unknown.
    """
    if loss == "bce":
        criterion: nn.Module = BinaryCrossEntropy(0.0 if mixed else label_smoothing)
    elif loss == "ce":
        criterion = (
            SoftTargetCrossEntropy()
            if mixed
            else LabelSmoothingCrossEntropy(label_smoothing)
        )
    else:
        raise ValueError(f"expected loss 'ce' or 'bce', got {loss!r}")
    return criterion


def create_task(
    model: nn.Module,
    forward: Any,
    criterion: nn.Module,
    *,
    teacher: nn.Module | None = None,
    distillation: str = "hard",
) -> Callable[[Tensor, Tensor], Mapping[str, Tensor]]:
    """Create a task: classification, or distillation from a teacher by timm's tasks.

    Args:
        model: Model without wrappers.
        forward: The model, compiled or distributed.
        criterion: Loss of the labels.
        teacher: Model of the same classes.
        distillation: "hard" by the scores, or "token" by the distillation token of a DeiT, hard too: "our
            distillation" of the paper.

    Raises:
        ValueError: The distillation is unknown, or the model has no distillation token.
        ImportError: timm is too old for tasks.
    """
    if teacher is None:
        return Classification(forward, criterion)
    try:
        from timm.task import DistillationTeacher, TokenDistillationTask
    except ImportError as error:
        raise ImportError(
            "distillation needs timm.task: pip install -U timm"
        ) from error
    device = next(model.parameters()).device
    judge = DistillationTeacher(teacher, device=device).requires_grad_(False).to(device)
    if distillation == "token":
        # timm's default is soft distillation.
        half = {"distill_loss_weight": 0.5, "task_loss_weight": 0.5}
        task: Any = TokenDistillationTask(
            forward, judge, criterion, distill_type="hard", device=device, **half
        )
        return task
    if distillation != "hard":
        raise ValueError(
            f"expected distillation 'hard' or 'token', got {distillation!r}"
        )
    config = getattr(model, "pretrained_cfg", None) or {}
    mean = torch.tensor(config.get("mean", IMAGENET_DEFAULT_MEAN), device=device).view(
        1, -1, 1, 1
    )
    std = torch.tensor(config.get("std", IMAGENET_DEFAULT_STD), device=device).view(
        1, -1, 1, 1
    )
    return _HardLogitDistillation(forward, criterion, judge, (mean, std))
