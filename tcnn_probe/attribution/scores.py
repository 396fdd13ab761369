"""Scores that a map explains: logits or probabilities, and models whose output is neither."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tcnn_model.outputs import scores_of
from tcnn_probe.attribution.layer_choice import UnsupportedMethodError
from tcnn_probe.models import missing_head

__all__ = ["NoScoreError", "Score", "as_scores", "check_head", "check_score", "scored"]

Score = Literal["softmax", "sigmoid", "logit"]
"""Probability among the classes, probability of the class
by itself (one logit, several labels), or the output.
"""


class NoScoreError(UnsupportedMethodError):
    """The model gives no score of a class, or it is unknown what its single output means."""


def check_score(score: Score | None, outputs: Tensor, default: Score) -> Score:
    """Return the score to use for a model with such outputs, shape (B, K);
    None is the default, if there are classes.
    """
    classes = outputs.shape[1]
    if score not in (None, *get_args(Score)):
        raise ValueError(f"expected score= to be one of {get_args(Score)}, got {score!r}")
    if classes == 1 and score in (None, "softmax"):
        raise NoScoreError(
            "the model gives one number for each image, so that it predicts no class, and its "
            "softmax is always 1: say what the number is, with score='sigmoid' (of two classes) or "
            f"score='logit' (the number itself, as in regression); got score={score!r}"
        )
    used = score or default
    # Each probability is rounded once; those of a softmax have a few more rounding errors.
    tolerance = 8 * torch.finfo(outputs.dtype).eps
    from_one = outputs.double().sum(1).sub(1).abs()
    is_distribution = bool((outputs.ge(0).all(1) & from_one.le(tolerance)).all())
    if used == "softmax" and is_distribution:
        raise ValueError(
            "the model gives probabilities, whose softmax is nearly the same for all classes: "
            "score='logit' takes its outputs as they are"
        )
    return used


def check_head(model: nn.Module) -> None:
    """Raise NoScoreError if the model has no classifier, so that its outputs are features."""
    if reason := missing_head(model):
        raise NoScoreError(
            f"the model gives features, and no scores of classes ({reason}): 'class_attention' and "
            "'rollout' need no score; target=, with score='logit', explains a feature"
        )


def as_scores(logits: Tensor, score: Score) -> Tensor:
    """Return logits (B, K), or their softmax over classes, or their sigmoid."""
    if score == "logit":
        return logits
    return logits.softmax(1) if score == "softmax" else logits.sigmoid()


@contextmanager
def scored(model: nn.Module, score: Score) -> Iterator[None]:
    """Let a model return probabilities inside the ``with``,
    or its own output if the score is the logit.
    """
    if score == "logit":
        yield
        return

    def transform(module: nn.Module, inputs: Any, output: Any) -> Tensor:
        return as_scores(scores_of(output), score)

    handle = model.register_forward_hook(transform)
    try:
        yield
    finally:
        handle.remove()
