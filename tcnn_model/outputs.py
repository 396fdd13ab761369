"""Class scores in the outputs of models of timm, of transformers or of the user."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["check_scores", "check_targets", "class_scores", "scores_of"]


def scores_of(output: Any) -> Any:
    """Return the class scores in a model's output.

    They are the ``logits`` of transformers' ImageClassifierOutput, the ``logits_per_image`` of CLIP
    and similar models, which describe classes by texts, or the output itself.
    """
    output = getattr(output, "logits_per_image", output)
    return getattr(output, "logits", output)


def class_scores(model: Callable[[Tensor], Any], images: Tensor) -> Tensor:
    """Return the class scores of images, shape (B, K);
    raise TypeError if the model returns anything else.
    """
    return check_scores(model(images), len(images))


def check_scores(output: Any, images: int) -> Tensor:
    """Return the class scores in a model's output for a number of images, shape (B, K);
    raise TypeError if there are none.
    """
    scores = scores_of(output)
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != images:
        got = (
            f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        )
        path = ("" if scores is output else ".logits") + _path_to_scores(scores)
        raise TypeError(
            f"expected the model to give a score for each class, shape ({images}, K), got "
            f"{got}; pass Scores(model) instead, a wrapper that chooses the "
            f"scores:\n{_WRAPPER}{path}"
        )
    return scores


def check_targets(targets: Tensor, scores: Tensor) -> None:
    """Raise ValueError unless targets, (B,) or (B, K), are of the classes of scores (B, K).

    Labels on another device than the CPU are not read, because each step would have to wait for it.
    """
    classes = scores.shape[1]
    if targets.ndim == 2 and targets.shape[1] != classes:
        raise ValueError(
            f"expected targets for the {classes} classes of the model, got {targets.shape[1]}"
        )
    if targets.ndim == 1 and len(targets) and targets.device.type == "cpu":
        lowest, highest = (int(label) for label in targets.aminmax())
        if lowest < 0 or highest >= classes:
            raise ValueError(
                f"expected labels from 0 to {classes - 1}, as the model has {classes} classes, got "
                f"{highest if highest >= classes else lowest}"
            )


_WRAPPER = """
    class Scores(torch.nn.Module):
        def __init__(self, model): super().__init__(); self.model = model
        def forward(self, images): return self.model(images)"""


def _path_to_scores(output: Any) -> str:
    """Return the code that takes scores (B, K) from an output, as far as it can be guessed."""
    if isinstance(output, Tensor):
        # Maps of scores (B, K, H, W), and tokens (B, N, K), are averaged over positions.
        means = {4: ".mean((2, 3))", 3: ".mean(1)", 1: "[:, None]"}
        return means.get(output.ndim, "")
    if isinstance(output, Mapping):
        members = {f"[{key!r}]": value for key, value in output.items()}
    elif isinstance(output, list | tuple):
        members = {f"[{place}]": value for place, value in enumerate(output)}
    else:
        attributes = getattr(output, "__dict__", {})
        members = {f".{name}": value for name, value in attributes.items()}
    ranks = {
        code: abs(value.ndim - 2) for code, value in members.items() if isinstance(value, Tensor)
    }
    containers = (Mapping, list, tuple)
    # Without a tensor, the scores may be in the first collection.
    inner = [code for code, value in members.items() if isinstance(value, containers)]
    if not ranks and not inner:
        return "[...]  # what has the shape (B, K)"
    code = min(ranks, key=ranks.__getitem__) if ranks else inner[0]
    return code + _path_to_scores(members[code])
