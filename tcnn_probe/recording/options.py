"""Parsing of the arguments of ``record()`` and ``mark()``."""

import json
import operator
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, get_args

from torch import Tensor

from tcnn_probe.models import image_numbers, whole_number
from tcnn_probe.probes import Probe
from tcnn_probe.schema import COORDINATES
from tcnn_probe.storage.root import OWN_ATTRIBUTES

__all__ = [
    "IfMarked",
    "Sampling",
    "When",
    "check_along",
    "check_choice",
    "parse_attributes",
    "parse_mark",
]

When = Literal["eval", "train", "always"]
IfMarked = Literal["error", "skip"]


@dataclass(frozen=True)
class Sampling:
    """Forwards, images and classes to measure.

    Args:
        when: Mode of the model in which forwards are measured.
        every: Step between measured forwards: every n-th one is measured.
        max_images: Largest number of images in an epoch; None for all.
        images: Numbers of the images whose maps are kept, ascending.
        classes: Classes whose maps are kept: a number of those that the model's output ranks first,
            or indices; None for no maps of classes.
    """

    when: When
    every: int
    max_images: int | None
    images: tuple[int, ...]
    classes: int | list[int] | None

    @classmethod
    def parse(
        cls, when: When, every: int, max_images: int | None, images: Any, classes: Any
    ) -> "Sampling":
        """Parse the arguments of ``record()``; ``images`` are a number, indices, or None."""
        check_choice("when", when, get_args(When))
        return cls(
            when,
            whole_number(every, "every", 1),
            None if max_images is None else whole_number(max_images, "max_images", 1),
            image_numbers(images),
            _parse_classes(classes),
        )

    @property
    def mode(self) -> str:
        """Name of the mode for messages."""
        return {"eval": "eval mode", "train": "training mode", "always": "any mode"}[self.when]

    def measures(self, training: bool) -> bool:
        """Return whether forwards are measured if ``model.training`` has this value."""
        return self.when == "always" or training == (self.when == "train")

    @property
    def class_indices(self) -> list[int]:
        """Indices of the classes that the user names."""
        return self.classes if isinstance(self.classes, list) else []

    def images_of(self, probe: Probe) -> tuple[int, ...]:
        """Return the numbers of the images whose maps by this probe are kept."""
        return self.images if probe.images is None else probe.images

    def check_classes(self, count: int) -> None:
        """Raise ValueError if an index is not below the number of classes of a layer."""
        largest = max(self.class_indices, default=-1)
        if largest >= count:
            raise ValueError(f"expected indices of classes below {count}, got {largest}")


def _parse_classes(classes: int | Collection[int] | None) -> int | list[int] | None:
    """Return the number of classes, or their indices without repetitions; None for no classes."""
    if classes is None:
        return None
    if not isinstance(classes, Collection):
        return whole_number(classes, "classes, a number of them or the indices of some", 1)
    indices = [whole_number(index, "each of classes") for index in classes]
    # A set has no order.
    return [*dict.fromkeys(sorted(indices) if isinstance(classes, Set) else indices)] or None


def parse_mark(
    values: Mapping[str, SupportsFloat], along: str, if_marked: IfMarked
) -> tuple[int | float, dict[str, float]]:
    """Return the epoch, or another coordinate, and the scalars that ``mark()`` was given."""
    check_choice("if_marked", if_marked, get_args(IfMarked))
    scalars = dict(values)
    if along not in scalars:
        other = next((name for name in ("epoch", "step") if name in scalars), "")
        hint = f"; to mark {other}s, record(model, along={other!r})" if other else ""
        raise TypeError(f"mark() needs the {along}: mark({along}=..., top1=...){hint}")
    number = _parse_number(along, scalars.pop(along))
    return number, {name: _parse_float(name, scalars[name]) for name in scalars}


def check_along(along: str) -> None:
    """Raise ValueError if this cannot be the name of the coordinate of marks."""
    is_name = isinstance(along, str) and along.isidentifier()
    if not is_name or along in (*COORDINATES, "if_marked"):
        raise ValueError(
            "expected the name of a coordinate, such as 'epoch' or 'step', for along; got "
            f"{along!r}"
        )


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if the value of an argument is not among its choices."""
    first = [repr(choice) for choice in choices]
    last = first.pop()
    if value not in choices:
        raise ValueError(f"expected {name}={', '.join(first)} or {last}, got {value!r}")


def parse_attributes(attrs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the user's attributes; raise an error unless they are plain JSON with free names."""
    plain = dict(attrs or {})
    if reserved := sorted(OWN_ATTRIBUTES & plain.keys()):
        raise ValueError(
            f"attrs: the recording has attributes {reserved} of its own: give yours other names"
        )
    try:
        # JSON has no NaN. Python would write one, but other readers of zarr would refuse it.
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected attrs of plain JSON, got {plain!r}: {error}") from error
    return {name: _netcdf(value) for name, value in plain.items() if value is not None}


def _netcdf(value: Any) -> Any:
    """Return an attribute in the types of netCDF: True and False as 1 and 0, tables as JSON."""
    if isinstance(value, bool):
        return int(value)
    # netCDF has lists of numbers, and in its version 3, which xarray writes with SciPy, none of
    # text.
    if isinstance(value, list | tuple) and value and all(isinstance(x, int | float) for x in value):
        return [_netcdf(member) for member in value]
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value


def _parse_number(along: str, value: Any) -> int | float:
    """Parse an epoch or a value of another coordinate; integers stay integers."""
    try:
        return operator.index(value)
    except TypeError as error:
        if along == "epoch":
            raise TypeError(f"expected an integer for {along}, got {value!r}") from error
    return _parse_float(along, value)


def _parse_float(name: str, value: SupportsFloat) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # float() would parse them
            raise TypeError("text")
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"expected a number for {name!r}, got {value!r}") from error
