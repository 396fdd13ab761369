"""Tasks, which compute a model's loss in a step, with or without a teacher."""

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

from tcnn_model.outputs import check_targets, class_scores

__all__ = ["Classification", "Criterion", "create_criterion", "create_task"]

Criterion = Callable[[Tensor, Tensor], Tensor]

SOFT_TEMPERATURE, SOFT_WEIGHT = 3.0, 0.1
"""tau and lambda of soft distillation, from the thesis, Section 3.4."""


class Classification:
    """Classification loss of the class scores.

    Args:
        forward: The model, plain, compiled or distributed: a function from images (B, C, H, W) to
            scores (B, K), or to an output of transformers with ``logits``.
        criterion: Function from scores and targets to a loss.
    """

    def __init__(self, forward: Callable[[Tensor], Any], criterion: Criterion) -> None:
        self.forward = forward
        self.criterion = criterion

    def __call__(self, images: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Compute the loss, and the scores."""
        scores = class_scores(self.forward, images)
        check_targets(targets, scores)
        return {"loss": self.criterion(scores.float(), targets), "output": scores}


class _LogitDistillation(Classification):
    """Weighted mean of the labels' loss and
    of the distance between the scores and those of a teacher.

    Args:
        forward: Function from images to scores, as in :class:`Classification`.
        criterion: Function from scores and targets to the labels' loss.
        teacher: timm's ``DistillationTeacher``.
        norm: Mean and standard deviation, (1, C, 1, 1), with which the student's images are
            normalised.
        imitation: Function from scores and the teacher's scores, both (B, K), to a loss.
        weight: Weight of the imitation loss, in [0, 1].
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Any],
        criterion: Criterion,
        teacher: Any,
        norm: tuple[Tensor, Tensor],
        imitation: Criterion,
        weight: float,
    ) -> None:
        super().__init__(forward, criterion)
        self.teacher = teacher
        self._norm = norm
        self._imitation = imitation
        self._weight = weight

    def __call__(self, images: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        result = super().__call__(images, targets)
        with torch.no_grad():
            # The images are normalised for the student: normalize_input replaces this by the
            # teacher's normalisation.
            normalized = self.teacher.normalize_input(images, *self._norm)
            judged = class_scores(self.teacher, normalized).float()
        imitation = self._imitation(result["output"].float(), judged)
        loss = torch.lerp(result["loss"], imitation, self._weight)
        return {**result, "loss": loss}


def _hard_imitation(scores: Tensor, judged: Tensor) -> Tensor:
    """Return the cross-entropy with the teacher's predicted classes (thesis, Eq. 3.3)."""
    return F.cross_entropy(scores, judged.argmax(1))


def _soft_imitation(scores: Tensor, judged: Tensor) -> Tensor:
    """Return the KL divergence from the teacher's probabilities,
    both at a temperature of tau (thesis, Eq. 3.2).
    """
    soft = (scores / SOFT_TEMPERATURE).log_softmax(1)
    target = (judged / SOFT_TEMPERATURE).log_softmax(1)
    divergence = F.kl_div(soft, target, reduction="batchmean", log_target=True)
    return SOFT_TEMPERATURE**2 * divergence


_IMITATIONS = {"hard": (_hard_imitation, 0.5), "soft": (_soft_imitation, SOFT_WEIGHT)}


def create_criterion(loss: str, *, label_smoothing: float, mixed: bool) -> nn.Module:
    """Create timm's loss function. If images are mixed, the targets are smoothed already.

    Args:
        loss: "ce" for cross-entropy, or "bce" for the binary cross-entropy of each class.
        label_smoothing: Probability that is spread over all classes, in [0, 1).
        mixed: Whether targets are class probabilities (B, K).

    Raises:
        ValueError: The loss is unknown.
    """
    if loss == "bce":
        criterion: nn.Module = BinaryCrossEntropy(0.0 if mixed else label_smoothing)
    elif loss == "ce":
        criterion = (
            SoftTargetCrossEntropy() if mixed else LabelSmoothingCrossEntropy(label_smoothing)
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
    """Create a task: classification, or distillation from a teacher, for which timm has the parts.

    Args:
        model: Model without wrappers.
        forward: The model, compiled or distributed.
        criterion: Loss of the labels.
        teacher: Model with the same classes.
        distillation: "hard" for distillation from the teacher's predicted classes (Eq. 3.3), "soft"
            from its probabilities (Eq. 3.2), "token" for hard distillation with the distillation
            token of a DeiT, which the thesis calls "our distillation".

    Raises:
        ValueError: The distillation is unknown, or the model has no distillation token.
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
        # timm's default is soft distillation.
        half = {"distill_loss_weight": 0.5, "task_loss_weight": 0.5}
        task: Any = TokenDistillationTask(
            forward, judge, criterion, distill_type="hard", device=device, **half
        )
        return task
    if distillation not in _IMITATIONS:
        raise ValueError(f"expected distillation 'hard', 'soft' or 'token', got {distillation!r}")
    config = getattr(model, "pretrained_cfg", None) or {}
    mean = torch.tensor(config.get("mean", IMAGENET_DEFAULT_MEAN), device=device).view(1, -1, 1, 1)
    std = torch.tensor(config.get("std", IMAGENET_DEFAULT_STD), device=device).view(1, -1, 1, 1)
    return _LogitDistillation(forward, criterion, judge, (mean, std), *_IMITATIONS[distillation])
