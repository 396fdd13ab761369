"""What users give to ``record()`` and ``mark()``, as checked values: forwards, images, classes, marks and scalars."""

import json
import operator
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from tcnn_probe.models import image_numbers, whole_number
from tcnn_probe.schema import COORDINATES

__all__ = [
    "Classes",
    "Sampling",
    "When",
    "as_attributes",
    "as_mark",
    "as_scalars",
    "check_along",
]

When = Literal["eval", "train", "always"]
_MODES = {"eval": "eval mode", "train": "training mode", "always": "any mode"}


@dataclass(frozen=True)
class Classes:
    """Classes of which maps are kept, where there is a token for each: those that the model's output ranks first.

    Args:
        top: how many; 0 for none.
        chosen: their indices, in place of the first so many.
    """

    top: int = 3
    chosen: tuple[int, ...] = ()

    @classmethod
    def asked(cls, classes: int | Collection[int] | None) -> "Classes":
        """As users ask: a number of classes, the indices of some, or None for no maps of classes."""
        if classes is None:
            return cls(0)
        if not isinstance(classes, Collection):
            return cls(whole_number(classes, "classes, a number of them or the indices of some", 1))
        indices = [whole_number(index, "each of classes") for index in classes]
        if not indices:
            raise ValueError(f"expected the indices of classes, or None for no maps of classes; got {classes!r}")
        indices = sorted(indices) if isinstance(classes, Set) else indices  # which have no order of their own
        return cls(0, tuple(dict.fromkeys(indices)))

    @property
    def plain(self) -> int | list[int] | None:
        """As users ask, and as it is kept in a recording."""
        return list(self.chosen) or self.top or None

    def check(self, name: str, count: int) -> None:
        """Refuse classes that are not among the ``count`` of a pool or layer."""
        if self.chosen and max(self.chosen) >= count:
            raise ValueError(f"expected indices of classes below {count}, for {name!r}, got {max(self.chosen)}")

    def of(
        self, maps: Mapping[str, Tensor], output: Any, rows: Sequence[int], images: int
    ) -> tuple[Mapping[str, Tensor], str]:
        """Leave out the maps of other classes, and add the index and the score of each class that stays.

        Args:
            maps: ``attention_by_class`` among them has the maps of all K classes, shape (n, K, height, width).
            output: of the model; None if it was not called as a whole.
            rows: which of the images of the forward these n are.
            images: of the forward.

        Returns:
            the maps: of k classes, with ``class_index`` and ``class_score``, shape (n, k); and why there are none of
            classes, if so.
        """
        name = "attention_by_class"
        others = {each: value for each, value in maps.items() if each != name}
        if name not in maps or not (self.top or self.chosen):
            return others, ""
        every, scores = maps[name], None
        wanted = (images, every.shape[1])
        if isinstance(output, Tensor) and tuple(output.shape) == wanted:
            scores = output.detach()[list(rows)].to(every)
        if self.chosen:
            index = torch.tensor(self.chosen, device=every.device).expand(len(every), -1)
        elif scores is None:
            known = "the model was not called as a whole" if output is None else f"its output is none of shape {wanted}"
            return others, f"{known}, so its best classes are unknown: classes=[...] keeps maps of those you name"
        else:
            index = scores.topk(min(self.top, scores.shape[1])).indices
        score = torch.full(index.shape, torch.nan).to(every) if scores is None else scores.gather(1, index)
        chosen = every[torch.arange(len(every), device=every.device)[:, None], index]
        return {**others, name: chosen, "class_index": index, "class_score": score}, ""


@dataclass(frozen=True)
class Sampling:
    """What is measured.

    Args:
        when: which forwards, by ``model.training``.
        every: one of these in so many.
        max_images: images in each epoch, None for all.
        images: numbers of those of which maps are kept, ascending.
        classes: of which maps are kept.
    """

    when: When
    every: int
    max_images: int | None
    images: tuple[int, ...]
    classes: Classes

    @classmethod
    def asked(cls, when: When, every: int, max_images: int | None, images: Any, classes: Any) -> "Sampling":
        """As users ask; ``images`` is a number of images, the numbers of some, or None."""
        if when not in _MODES:
            raise ValueError(f"expected when='eval', 'train' or 'always', got {when!r}")
        every = whole_number(every, "every", 1)
        most = None if max_images is None else whole_number(max_images, "max_images", 1)
        return cls(when, every, most, image_numbers(images), Classes.asked(classes))

    def takes(self, *, training: bool) -> bool:
        """Whether forwards in this mode are measured."""
        return self.when == "always" or training == (self.when == "train")

    @property
    def mode(self) -> str:
        """Which forwards are measured, in words."""
        return _MODES[self.when]


def check_along(along: str) -> None:
    """Refuse what is no name for the coordinate of marks."""
    if not isinstance(along, str) or not along.isidentifier() or along in (*COORDINATES, "if_marked"):
        raise ValueError(f"expected the name of a coordinate, such as 'epoch' or 'step', for along; got {along!r}")


def as_mark(along: str, value: SupportsFloat | SupportsIndex) -> int | float:
    """An epoch, or a value of the coordinate that ``along`` names: integers stay integers."""
    if along == "epoch" or (isinstance(value, SupportsIndex) and not isinstance(value, Tensor)):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(f"expected an integer for {along}, got {value!r}") from error
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"expected an integer of 64 bits for {along}, got {number}")
        return number
    converted = _as_number(along, value)
    if not np.isfinite(converted):
        raise ValueError(f"expected a finite number for {along}, got {converted}")
    return converted


def as_scalars(scalars: Mapping[str, SupportsFloat], along: str) -> dict[str, float]:
    """What else is given to a mark."""
    for name in scalars:
        if not name.isidentifier():
            raise ValueError(f"expected letters, digits and underscores in a scalar's name, got {name!r}")
        if name in COORDINATES or name == along:
            raise ValueError(f"{name!r} is the name of a coordinate: give the scalar another one")
    return {name: _as_number(name, value) for name, value in scalars.items()}


def as_attributes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What a recording is to say of itself."""
    given = dict(attrs)
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected attrs of plain JSON, got {given!r}: {error}") from error
    return given


def _as_number(name: str, value: SupportsFloat) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError("text")
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"expected a number for {name!r}, got {value!r}") from error
