"""Which forwards and images are measured: what a recorder is told, checked before anything is attached."""

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from tcnn_probe.schema import COORDINATES

__all__ = ["Sampling", "When", "check_along", "check_integer", "image_numbers"]

When = Literal["eval", "train", "always"]
_MODES = {"eval": "eval mode", "train": "training mode", "always": "any mode"}


@dataclass(frozen=True)
class Sampling:
    """Forwards and images that are measured.

    Args:
        when: by ``model.training``.
        every: one forward in so many.
        max_images: in each epoch, None for all.
        images: numbers of those of which maps are kept, ascending.

    Raises:
        ValueError: what cannot be.
    """

    when: When
    every: int
    max_images: int | None
    images: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.when not in _MODES:
            raise ValueError(f"expected when='eval', 'train' or 'always', got {self.when!r}")
        check_integer("every", self.every, 1)
        if self.max_images is not None:
            check_integer("max_images", self.max_images, 1)

    def takes(self, *, training: bool) -> bool:
        """Whether forwards in this mode are measured."""
        return self.when == "always" or training == (self.when == "train")

    @property
    def mode(self) -> str:
        """Which forwards are measured, in words."""
        return _MODES[self.when]


def check_integer(name: str, number: int, least: int) -> None:
    """Refuse what is no integer, or less than it may be."""
    if not isinstance(number, int) or number < least:
        what = "a positive integer" if least else "an integer from 0"
        raise ValueError(f"expected {what} for {name}, got {number!r}")


def check_along(along: str) -> None:
    """Refuse what is no name for the coordinate of marks."""
    if not isinstance(along, str) or not along.isidentifier() or along in (*COORDINATES, "if_marked"):
        raise ValueError(f"expected the name of a coordinate, such as 'epoch' or 'step', for along; got {along!r}")


def image_numbers(images: int | Collection[int] | None) -> tuple[int, ...]:
    """The numbers of the images of which maps are kept, ascending: the first so many, or those given."""
    numbers = range(images) if isinstance(images, int) else () if images is None else images
    try:
        chosen = tuple(sorted({operator.index(number) for number in numbers}))
    except TypeError as error:
        raise TypeError(f"expected a number of images, or the numbers of some, got {images!r}") from error
    if any(number < 0 for number in chosen) or (isinstance(images, int) and images < 0):
        raise ValueError(f"expected numbers of images from 0, got {images!r}")
    return chosen
