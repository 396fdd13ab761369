"""What is asked of a model in a step: the loss, and a teacher's opinion in it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

__all__ = ["Classification", "create_criterion", "create_task"]

Criterion = Callable[[Tensor, Tensor], Tensor]


class Classification:
    """The loss of the class scores.

    Args:
        forward: images (B, C, H, W) to scores (B, K): the model, compiled or distributed.
        criterion: scores and targets to a loss.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], criterion: Criterion) -> None:
        self.forward, self.criterion = forward, criterion

    def __call__(self, images: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """The loss, and the scores that it is of."""
        scores = self.forward(images)
        return {"loss": self.criterion(scores.float(), targets), "output": scores}


class _HardLogitDistillation(Classification):
    """Half the loss is of the labels, half of the teacher's decisions (DeiT, thesis Sec. 3.3, "hard-label")."""

    def __init__(self, forward: Callable[[Tensor], Tensor], criterion: Criterion, teacher: Any, norm: Any) -> None:
        super().__init__(forward, criterion)
        self.teacher, self._norm = teacher, norm

    def __call__(self, images: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        result = super().__call__(images, targets)
        with torch.no_grad():
            decided = self.teacher(self.teacher.normalize_input(images, *self._norm)).argmax(1)
        loss = (result["loss"] + F.cross_entropy(result["output"].float(), decided)) / 2
        return {**result, "loss": loss}


def create_criterion(loss: str, *, label_smoothing: float, mixed: bool) -> nn.Module:
    """Timm's loss: "ce" or "bce"; where images are mixed, smoothing is in the targets already.

    Args:
        loss: cross-entropy, or binary cross-entropy of each class.
        label_smoothing: in [0, 1).
        mixed: targets are shares of classes (B, K).
    """
    if loss == "bce":
        criterion: nn.Module = BinaryCrossEntropy(0.0 if mixed else label_smoothing)
    elif loss == "ce":
        criterion = SoftTargetCrossEntropy() if mixed else LabelSmoothingCrossEntropy(label_smoothing)
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
    """Classification, or distillation from a teacher by timm's tasks.

    Args:
        model: without wrappers.
        forward: the model, compiled or distributed.
        criterion: of the labels.
        teacher: of the same classes.
        distillation: "hard" by the scores, or "token" by the distillation token of a DeiT, hard too: "our
            distillation" of the paper.

    Raises:
        ValueError: an unknown distillation, or a model without the token.
        ImportError: timm is too old for tasks.
    """
    if teacher is None:
        return Classification(forward, criterion)
    try:
        from timm.task import DistillationTeacher, TokenDistillationTask
    except ImportError as error:
        raise ImportError("distillation needs timm.task: pip install -U timm") from error
    device = next(model.parameters()).device
    judge = DistillationTeacher(teacher, device=device).requires_grad_(False).to(device)
    if distillation == "token":
        half = {"distill_loss_weight": 0.5, "task_loss_weight": 0.5}
        task: Any = TokenDistillationTask(forward, judge, criterion, distill_type="hard", device=device, **half)
        return task
    if distillation != "hard":
        raise ValueError(f"expected distillation 'hard' or 'token', got {distillation!r}")
    config = getattr(model, "pretrained_cfg", None) or {}
    values = (config.get("mean", (0.485, 0.456, 0.406)), config.get("std", (0.229, 0.224, 0.225)))
    mean, std = (torch.tensor(each, device=device).view(1, -1, 1, 1) for each in values)
    return _HardLogitDistillation(forward, criterion, judge, (mean, std))
