"""Class scores in the outputs of models of timm, of transformers or of the user."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["class_scores", "scores_of"]


def scores_of(output: Any) -> Any:
    """Return the class scores in a model's output.

    They are the ``logits`` of transformers' ImageClassifierOutput, the ``logits_per_image`` of CLIP and similar models,
    which describe classes by texts, or the output itself.
    """
    output = getattr(output, "logits_per_image", output)
    return getattr(output, "logits", output)


def class_scores(model: Callable[[Tensor], Any], images: Tensor) -> Tensor:
    """Return the class scores of images, shape (B, K); raise TypeError if the model returns anything else."""
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
