"""What users give to ``mark()``, as numbers."""

import operator
from collections.abc import Mapping
from typing import SupportsFloat, SupportsIndex

import numpy as np
from torch import Tensor

from tcnn_probe.schema import COORDINATES

__all__ = ["a_or_an", "as_mark", "as_numbers"]


def as_mark(along: str, value: SupportsFloat | SupportsIndex) -> int | float:
    """An epoch, or a value of the coordinate that ``along`` names: integers stay integers."""
    if along == "epoch" or (isinstance(value, SupportsIndex) and not isinstance(value, Tensor)):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(f"expected an integer for {along}, got {value!r}") from error
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"expected {a_or_an(along)} that fits in 64 bits, got {number}")
        return number
    converted = _as_number(along, value)
    if not np.isfinite(converted):
        raise ValueError(f"expected a finite number for {along}, got {converted}")
    return converted


def as_numbers(scalars: Mapping[str, SupportsFloat], along: str) -> dict[str, float]:
    """The scalars of a mark."""
    for name in scalars:
        if not name.isidentifier():
            raise ValueError(f"expected letters, digits and underscores in a scalar's name, got {name!r}")
        if name in COORDINATES or name == along:
            raise ValueError(f"{name!r} is the name of a coordinate: give the scalar another one")
    return {name: _as_number(name, value) for name, value in scalars.items()}


def _as_number(name: str, value: SupportsFloat) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError("text")
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"expected a number for {name!r}, got {value!r}") from error


def a_or_an(noun: str) -> str:
    """The noun with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
