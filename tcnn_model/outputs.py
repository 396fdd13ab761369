"""Scores of classes in the outputs of models, of timm, of transformers or a user's own."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["class_scores", "scores_of"]


def scores_of(output: Any) -> Any:
    """Return the scores in a model's output: the ``logits`` of transformers' ImageClassifierOutput, or itself.

    Of CLIP and its like, whose classes are texts, ``logits_per_image``.
    """
    output = getattr(output, "logits_per_image", output)
    return getattr(output, "logits", output)


def class_scores(model: Callable[[Tensor], Any], images: Tensor) -> Tensor:
    """Return the model's scores, shape (B, K), or its output's ``logits``; raise TypeError for anything else."""
    scores = scores_of(model(images))
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(images):
        got = (
            f"shape {tuple(scores.shape)}"
            if isinstance(scores, Tensor)
            else type(scores).__name__
        )
        raise TypeError(
            f"expected the model to give a score for each class, shape ({len(images)}, K), got {got}"
        )
    return scores
