"""Values of a forward: what a probe has measured of a layer, checked, before it is added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.probes import Probe
from tcnn_probe.recording.options import Sampling

__all__ = ["MAPS_BY_CLASS", "Key", "Measured", "check_measured", "select_classes"]

_Value = TypeVar("_Value", bound=Tensor | Pattern)
Key = tuple[str, str]  # layer and kind of probe
MAPS_BY_CLASS = "attention_by_class"
"""Variable with maps of all classes when it is measured,
and only of the chosen classes when it is recorded.
"""


@dataclass(frozen=True)
class Measured:
    """Measurements of a layer by a probe in a forward that has not ended yet.

    Args:
        values: Values by variable, of the images within ``max_images``.
        patterns: Sums over these images.
        batch: Number of images in the forward.
        before: Number of images of the epoch before this forward.
        numbers: Numbers in the forward of the images whose maps are kept.
        maps: Maps of these images.
    """

    layer: str
    module: nn.Module
    probe: Probe
    values: Mapping[str, Tensor]
    patterns: Mapping[str, Pattern]
    batch: int
    before: int
    numbers: Sequence[int]
    maps: Mapping[str, Tensor]

    @property
    def key(self) -> Key:
        """Layer and kind of probe."""
        return self.layer, self.probe.kind

    @property
    def images(self) -> int:
        """Number of images within ``max_images``."""
        for value in self.values.values():
            return len(value)
        return max(pattern.batch for pattern in self.patterns.values())


def check_measured(
    probe: Probe, measured: Mapping[str, _Value], *, by_image: bool
) -> Mapping[str, _Value]:
    """Return a probe's measurements after checking them against the probe's variables,
    ``by_image`` with the axis of images first.

    Raises:
        TypeError: The measurements are not a mapping from variables to tensors.
        ValueError: A variable is unknown, or has other dimensions or another number of images.
    """
    expected = f"expected the probe {probe.kind!r} to return"
    if not isinstance(measured, Mapping):
        raise TypeError(f"{expected} {{variable: tensor}}, got {measured!r}")
    images = next((len(x) for x in measured.values() if isinstance(x, Tensor) and x.ndim), None)
    for name, value in measured.items():
        if name not in probe.variables:
            raise ValueError(f"{expected} {[*probe.variables]}, got {name!r}")
        if by_image and isinstance(value, Pattern):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{expected} a tensor for {name!r}, got {value!r}")
        dims = (*["image"] * by_image, *probe.variables[name].dims[1:])
        if value.ndim != len(dims) or (by_image and len(value) != images):
            of_images = f" of {images} images" if by_image else ""
            raise ValueError(
                f"{expected} {name!r} with the dimensions {dims}{of_images}, got the shape "
                f"{tuple(value.shape)}"
            )
    return measured


def select_classes(
    maps: Mapping[str, Tensor], sampling: Sampling, output: Any, rows: Sequence[int], images: int
) -> tuple[Mapping[str, Tensor], str]:
    """Keep only the maps of the chosen classes,
    and add the index and the score of each of these classes.

    Args:
        maps: Maps by variable; ``attention_by_class`` has those of all K classes, shape (n, K,
            height, width).
        output: Output of the model; None if only parts of the model were called.
        rows: Indices of the n images in the forward.
        images: Number of images in the forward.

    Returns:
        The maps of k classes, with ``class_index`` and ``class_score``, shape (n, k); and the
        reason if there are no maps of classes, else "".
    """
    maps = dict(maps)
    all_maps = maps.pop(MAPS_BY_CLASS)
    if not (sampling.top_classes or sampling.classes):
        return maps, ""
    scores, expected = None, (images, all_maps.shape[1])
    if isinstance(output, Tensor) and tuple(output.shape) == expected:
        scores = output.detach()[list(rows)].to(all_maps)
    if sampling.classes:
        index = torch.tensor(sampling.classes, device=all_maps.device)
        index = index.expand(len(all_maps), -1)
    elif scores is not None:
        index = scores.topk(min(sampling.top_classes, scores.shape[1])).indices
    else:
        reason = f"its output does not have the shape {expected}"
        if output is None:
            reason = "the model was not called as a whole"
        advice = "classes=[...] keeps maps of the classes that it names"
        return maps, f"{reason}, so its best classes are unknown: {advice}"
    # Indices of shape (n, 1) and (n, k) select k classes for each image: (n, k, height, width).
    image = torch.arange(len(all_maps), device=all_maps.device)[:, None]
    maps |= {MAPS_BY_CLASS: all_maps[image, index], "class_index": index}
    if scores is None:
        maps["class_score"] = torch.full(index.shape, torch.nan).to(all_maps)
    else:
        maps["class_score"] = scores.gather(1, index)
    return maps, ""
