"""Deletion and insertion: the probability
of a class while pixels are replaced in the order of their saliency.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_model.outputs import class_scores
from tcnn_probe.attribution.pixels import background
from tcnn_probe.attribution.scores import Score, as_scores, check_score
from tcnn_probe.models import batches, whole_number

__all__ = ["area_under", "deletion_curve", "insertion_curve", "pixel_order"]


def deletion_curve(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    target: Tensor,
    *,
    steps: int = 32,
    baseline: float | Tensor = 0.0,
    score: Score | None = None,
    batch_size: int = 32,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Measure the probability of the target while the most salient pixels are replaced,
    from the image to the baseline.

    (Petsiuk et al. 2018, RISE, §3.4 and Alg. 1.)

    Args:
        model: Model that returns class scores, before the softmax.
        images: Images, shape (B, C, H, W).
        maps: Saliency, shape (B, H, W).
        target: Classes, shape (B,).
        steps: Number of steps S; at step i, round(i H W / S) pixels are replaced; no more steps
            than pixels.
        baseline: Number that replaces pixels, 0 being the grey of images normalised by their mean;
            or an image.
        score: Score that is measured: "softmax", the probability among the classes; "sigmoid", that
            of the class by itself; or "logit", the output of the model. None for the softmax; a
            model with one output needs another.
        batch_size: Images in the model at a time.
        seed: Seed of the order of pixels of equal saliency.

    Returns:
        Share of pixels replaced, (S + 1,), and scores, (B, S + 1), NaN for a map with a NaN;
        float64.
    """
    end = background(baseline, images)
    return _curve(model, images, end, maps, target, steps, score, batch_size, seed)


def insertion_curve(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    target: Tensor,
    *,
    steps: int = 32,
    start: float | Tensor | Literal["blur"] = "blur",
    score: Score | None = None,
    batch_size: int = 32,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Measure the probability of the target while the most salient pixels are inserted,
    starting from a blurred image.

    RISE blurs by a Gaussian of 11 x 11 pixels with σ = 5, with zeros outside the image; here the
    image is mirrored at its border, and the kernel is no wider than the image allows. (Petsiuk et
    al. 2018, RISE, §3.4.)

    Args:
        model, images, maps, target, steps, score, batch_size, seed: The arguments of
            :func:`deletion_curve`.
        start: Image to start from: "blur", a number or an image.

    Returns:
        Share of pixels inserted, (S + 1,), and scores, (B, S + 1), as in :func:`deletion_curve`.
    """
    beginning = background(start, images)
    return _curve(model, beginning, images, maps, target, steps, score, batch_size, seed)


def area_under(shares: Tensor, curve: Tensor) -> Tensor:
    """Compute the area under curves (B, S + 1) over shares (S + 1,)
    from 0 to 1 by the trapezoidal rule: (B,).
    """
    return torch.trapezoid(curve, shares, dim=-1)


def pixel_order(maps: Tensor, seed: int = 0) -> Tensor:
    """Return the rank of each pixel in the order of saliency,
    the most salient first: (B, H, W) to (B, H * W).

    Pixels of equal saliency are in a random order, the same for all images, so that a constant map
    gives this order.
    """
    values = -maps.flatten(1).double().cpu().numpy()
    chance = np.broadcast_to(np.random.default_rng(seed).random(values.shape[1]), values.shape)
    # Equal values are ordered at random, because a stable order would begin at the top of each
    # image.
    order = np.lexsort((chance, values), axis=-1)
    # The inverse permutation has the rank of each pixel.
    return torch.from_numpy(np.argsort(order, axis=-1))


@torch.no_grad()
def _curve(
    model: nn.Module,
    before: Tensor,
    after: Tensor,
    maps: Tensor,
    target: Tensor,
    steps: int,
    score: Score | None,
    batch_size: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Measure scores while pixels change from those of ``before`` to those of ``after``."""
    order, pixels = pixel_order(maps, seed), maps[0].numel()
    steps = min(whole_number(steps, "steps", 1), pixels)
    # Counts are rounded one by one, so that the last step has all pixels even if steps do not
    # divide their number.
    counts = [round(step * pixels / steps) for step in range(steps + 1)]
    curve = torch.empty(len(before), steps + 1, dtype=torch.float64)
    for rows, old in batches(model, before, batch_size):
        new = after[rows].to(old)
        place = order[rows].to(old.device).view(len(old), 1, *old.shape[2:])
        # With few images, a batch has several steps.
        at_once = max(1, batch_size // len(old))
        for first in range(0, steps + 1, at_once):
            counts_of_batch = counts[first : first + at_once]
            mixed = torch.cat([torch.where(place < count, new, old) for count in counts_of_batch])
            classes = target[rows].cpu().repeat(len(counts_of_batch))[:, None]
            outputs = class_scores(model, mixed).cpu()
            used = check_score(score, outputs, "softmax")
            scores = as_scores(outputs.double(), used).gather(1, classes)
            curve[rows, first : first + len(counts_of_batch)] = scores.view(
                len(counts_of_batch), len(old)
            ).T
    # Sorting accepts a NaN, so that its curve would look valid.
    curve[maps.flatten(1).isnan().any(1).cpu()] = torch.nan
    return torch.tensor(counts, dtype=torch.float64) / pixels, curve
