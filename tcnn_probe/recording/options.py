"""Parsing of the arguments of ``record()`` and ``mark()``: forwards, images, classes, marks, scalars, attributes."""

import json
import operator
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import (
    Any,
    Literal,
    SupportsFloat,
    SupportsIndex,
    cast,
    get_args,
)

import numpy as np
from torch import Tensor

from tcnn_probe.models import image_numbers, whole_number
from tcnn_probe.schema import COORDINATES
from tcnn_probe.storage import Mode

__all__ = [
    "Classes",
    "IfMarked",
    "Mark",
    "Sampling",
    "When",
    "check_along",
    "check_mode",
    "parse_attributes",
    "parse_mark",
]

When = Literal["eval", "train", "always"]
IfMarked = Literal["error", "skip"]
_WORDS = {"eval": "eval mode", "train": "training mode", "always": "any mode"}
_TRAINING = {"eval": (False,), "train": (True,), "always": (False, True)}


@dataclass(frozen=True)
class Classes:
    """Classes whose maps are kept, for pools with a token for each class.

    Args:
        top: Number of classes that the model's output ranks first; 0 for none.
        indices: Indices of classes, in place of those that are ranked first.
    """

    top: int = 3
    indices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, classes: int | Collection[int] | None) -> "Classes":
        """Parse a number of classes, a list of indices, or None for no maps of classes."""
        if classes is None:
            return cls(0)
        if not isinstance(classes, Collection):
            return cls(
                whole_number(
                    classes, "classes, a number of them or the indices of some", 1
                )
            )
        indices = [whole_number(index, "each of classes") for index in classes]
        if not indices:
            raise ValueError(
                f"expected the indices of classes, or None for no maps of classes; got {classes!r}"
            )
        if isinstance(classes, Set):  # a set has no order
            indices.sort()
        # dict.fromkeys removes repetitions and keeps the order.
        return cls(0, tuple(dict.fromkeys(indices)))

    @property
    def plain(self) -> int | list[int] | None:
        """The classes in the form in which users give them and recordings store them."""
        return list(self.indices) or self.top or None

    def check(self, layer: str, count: int) -> None:
        """Raise ValueError if an index is not below the number of classes of a layer."""
        if self.indices and max(self.indices) >= count:
            raise ValueError(
                f"expected indices of classes below {count}, for {layer!r}, got {max(self.indices)}"
            )


@dataclass(frozen=True)
class Sampling:
    """Forwards and images to measure.

    Args:
        training: Values of ``model.training`` in which forwards are measured.
        mode: Name of this mode for messages.
        every: Step between measured forwards: every n-th one is measured.
        max_images: Largest number of images in an epoch; None for all.
        images: Numbers of the images whose maps are kept, ascending.
        classes: Classes whose maps are kept.
    """

    training: tuple[bool, ...]
    mode: str
    every: int
    max_images: int | None
    images: tuple[int, ...]
    classes: Classes

    @classmethod
    def parse(
        cls, when: When, every: int, max_images: int | None, images: Any, classes: Any
    ) -> "Sampling":
        """Parse the arguments of ``record()``; ``images`` is a number of images, a list of indices, or None."""
        if when not in _WORDS:
            raise ValueError(f"expected when='eval', 'train' or 'always', got {when!r}")
        step = whole_number(every, "every", 1)
        if max_images is not None:
            max_images = whole_number(max_images, "max_images", 1)
        return cls(
            _TRAINING[when],
            _WORDS[when],
            step,
            max_images,
            image_numbers(images),
            Classes.parse(classes),
        )


@dataclass(frozen=True)
class Mark:
    """An epoch that is to be marked.

    Args:
        number: Epoch, or value of another coordinate of marks.
        scalars: Further numbers to store with the mark.
        skips: Whether the mark is skipped if the epoch is marked already.
    """

    number: int | float
    scalars: Mapping[str, float]
    skips: bool


def parse_mark(
    values: Mapping[str, SupportsFloat], along: str, if_marked: IfMarked
) -> Mark:
    """Parse the arguments of ``mark()``."""
    if if_marked not in get_args(IfMarked):
        raise ValueError(f"expected if_marked='error' or 'skip', got {if_marked!r}")
    scalars = dict(values)
    if along not in scalars:
        hint = ""
        for name in ("epoch", "step"):
            if name in scalars:
                hint += f"; to mark {name}s, record(model, along={name!r})"
        raise TypeError(f"mark() needs the {along}: mark({along}=..., top1=...){hint}")
    number = _parse_number(along, scalars.pop(along))
    for name in scalars:
        # Names become folders of the store and attributes of the dataset, hence identifiers.
        if not name.isidentifier():
            raise ValueError(
                f"expected letters, digits and underscores in a scalar's name, got {name!r}"
            )
        if name in COORDINATES or name == along:
            raise ValueError(
                f"{name!r} is the name of a coordinate: give the scalar another one"
            )
    floats = {name: _parse_float(name, value) for name, value in scalars.items()}
    return Mark(number, floats, if_marked == "skip")


def check_along(along: str) -> None:
    """Raise ValueError if this cannot be the name of the coordinate of marks."""
    if (
        not isinstance(along, str)
        or not along.isidentifier()
        or along in (*COORDINATES, "if_marked")
    ):
        raise ValueError(
            f"expected the name of a coordinate, such as 'epoch' or 'step', for along; got {along!r}"
        )


# The recording itself writes these attributes, so a user's attributes of these names would be lost or misread.
_RESERVED_ATTRIBUTES = {
    "along",
    "coords",
    "image_hashes",
    "images",
    "layers",
    "missing",
    "recording_id",
    "tcnn_probe_schema",
    "unsupported",
    "weights",
}


def check_mode(mode: str) -> None:
    """Raise ValueError if this is not a mode of opening a store."""
    if mode not in get_args(Mode):
        raise ValueError(
            f"expected mode='a' (continue), 'w' (replace) or 'x' (only if nothing is there), got {mode!r}"
        )


def parse_attributes(attrs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the user's attributes of a recording after checking that they are plain JSON and have free names."""
    plain = dict(attrs or {})
    if reserved := sorted(_RESERVED_ATTRIBUTES & plain.keys()):
        raise ValueError(
            f"attrs: the recording has attributes {reserved} of its own: give yours other names"
        )
    try:
        # JSON has no NaN. Python would write one, but other readers of zarr would refuse it.
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"expected attrs of plain JSON, got {plain!r}: {error}"
        ) from error
    return {name: _netcdf(value) for name, value in plain.items() if value is not None}


def _netcdf(value: Any) -> Any:
    """Return an attribute in the types of netCDF: True and False as 1 and 0, tables as JSON."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list | tuple) and value:
        members = [_netcdf(member) for member in value]
        kinds = {isinstance(member, str) for member in members}
        if len(kinds) == 1 and not any(
            isinstance(x, list) or x is None for x in members
        ):
            return members
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value


def _parse_number(along: str, value: SupportsFloat | SupportsIndex) -> int | float:
    """Parse an epoch or a value of another coordinate; integers stay integers."""
    # Tensors of floats are instances of SupportsIndex, too, although index() fails on them.
    is_float = isinstance(value, Tensor) and value.dtype.is_floating_point
    if along == "epoch" or (isinstance(value, SupportsIndex) and not is_float):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"expected an integer for {along}, got {value!r}"
            ) from error
        if not -(2**63) <= number < 2**63:  # stored as int64
            raise ValueError(
                f"expected an integer of 64 bits for {along}, got {number}"
            )
        return number
    converted = _parse_float(along, cast(SupportsFloat, value))
    if not np.isfinite(converted):
        raise ValueError(f"expected a finite number for {along}, got {converted}")
    return converted


def _parse_float(name: str, value: SupportsFloat) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # float() would parse them
            raise TypeError("text")
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"expected a number for {name!r}, got {value!r}") from error
