"""Batches of images with their targets, and what is measured of a model's outputs for them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_model.outputs import check_scores, check_targets
from tcnn_model.precision import at_least_float32
from tcnn_probe.hooks.modes import leaves_of
from tcnn_probe.interventions.references import GivenImages, as_batches
from tcnn_probe.models import class_indices

__all__ = [
    "Batch",
    "Measure",
    "as_measure",
    "attributes_of_change",
    "batches_of",
    "changes_of",
    "outputs_of",
    "reread",
]

Measure = Callable[[Any, Any], Tensor]
"""Function (output, target) -> a number for each image, (B,)."""


@dataclass(frozen=True)
class Batch:
    """Images with their targets.

    Args:
        rows: Places of the images among all images.
        images: Shape (B, ...).
        target: Second item of a loader's pair, or classes of the images; None without.
    """

    rows: slice
    images: Tensor
    target: Any


def as_measure(measure: Any) -> tuple[Measure | None, Tensor | None]:
    """Return the function of outputs and targets that is measured,
    and classes of all images if these are given.

    Args:
        measure: None, a function (output, target) -> (B,), or the classes of all images, for their
            cross entropy.
    """
    if measure is None or callable(measure):
        return measure, None
    classes = class_indices(measure, "the classes of the images")
    return _cross_entropy, classes


def attributes_of_change(measure: Measure | None) -> dict[str, str]:
    """Return the name and the unit of the change of a measure, see :func:`as_measure`."""
    if measure is None:
        return {"long_name": "norm of the change of the output", "units": "1"}
    if measure is _cross_entropy:
        return {"long_name": "change of the cross entropy", "units": "nat"}
    return {"long_name": "change of the metric", "units": "1"}


def _cross_entropy(output: Any, target: Any) -> Tensor:
    scores = check_scores(output, len(target))
    check_targets(target, scores)
    logits = scores.to(at_least_float32(scores.dtype))
    return F.cross_entropy(logits, target.to(scores.device), reduction="none")


def batches_of(
    images: GivenImages, model: nn.Module, batch_size: int, classes: Tensor | None
) -> Iterator[Batch]:
    """Yield batches with their targets, at most ``batch_size`` images at a time."""
    start = 0
    several: Any = images if _are_batches(images) else [images]
    for item in several:
        is_pair = isinstance(item, (tuple, list)) and len(item) > 1
        target = item[1] if is_pair else None
        for batch in as_batches([item] if is_pair else item, model):
            for low in range(0, len(batch), batch_size):
                part = slice(low, min(low + batch_size, len(batch)))
                rows = slice(start + part.start, start + part.stop)
                of_part = target
                if classes is not None:
                    # A copy, as classes that were made in inference mode cannot be kept for a
                    # backward pass.
                    of_part = classes[rows].clone()
                elif isinstance(target, Tensor | np.ndarray | list | tuple):
                    of_part = target[part]
                yield Batch(rows, batch[part], of_part)
            start += len(batch)
    if classes is not None and len(classes) != start:
        raise ValueError(
            f"expected a class for each of the {start} images, got {len(classes)} classes"
        )


def _are_batches(images: Any) -> bool:
    """Return whether images are several batches or pairs, not a batch or pictures."""
    return (
        isinstance(images, (list, tuple))
        and bool(images)
        and isinstance(images[0], Tensor | tuple | list)
    )


def reread(images: Any) -> Any:
    """Return images that can be read several times:
    a list of a loader's batches, and anything else as it is.
    """
    is_kept = isinstance(images, Tensor | np.ndarray | Mapping | Sequence)
    return images if is_kept or not isinstance(images, Iterable) else list(images)


def outputs_of(output: Any, images: int) -> Tensor:
    """Return all floating-point numbers of a model's output, (images, n)."""
    tensors = [
        x
        for x in leaves_of([output])
        if isinstance(x, Tensor) and x.is_floating_point() and len(x) == images
    ]
    if not tensors:
        raise TypeError(
            "expected the model to return tensors with an axis of images, got "
            f"{type(output).__name__}; give a function (output, target) that returns a number for "
            "each image"
        )
    return torch.cat([x.flatten(1).to(at_least_float32(x.dtype)) for x in tensors], 1)


def changes_of(values: Any, images: int) -> Tensor:
    """Return the numbers of images that a user's function gives, (images,)."""
    if not isinstance(values, Tensor) or values.shape != (images,):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values)
        raise ValueError(
            f"expected a number for each of {images} images, such as a cross entropy with "
            f"reduction='none'; got {got}"
        )
    return values
