"""The two axes of a layer as plain integers, which a custom operator can take as arguments."""

from typing import NamedTuple

import torch
from torch import Tensor

from tcnn_model.gpsa.positional import Axis

__all__ = ["Grid", "Line"]


class Line(NamedTuple):
    """An :class:`~tcnn_model.gpsa.positional.Axis` as integers; positions are in input pixels."""

    length: int  # real pixels
    stride: int
    before: int  # padding pixels before the first real one
    keys: int  # padding included
    queries: int
    first_query: int

    @classmethod
    def of(cls, axis: Axis) -> "Line":
        """Return the numbers of ``axis``."""
        return cls(
            axis.length,
            axis.stride,
            axis.before,
            axis.keys,
            axis.queries,
            axis.first_query,
        )

    def query_positions(self, device: torch.device) -> Tensor:
        """Return the pixels of the queries, shape (queries,), float64."""
        return (
            torch.arange(self.queries, dtype=torch.float64, device=device) * self.stride
            + self.first_query
        )

    def key_positions(self, device: torch.device) -> Tensor:
        """Return the pixels of the keys, padding included, shape (keys,), float64."""
        return torch.arange(self.keys, dtype=torch.float64, device=device) - self.before


class Grid(NamedTuple):
    """Vertical and horizontal axis of a layer. Queries and keys are row-major."""

    y: Line
    x: Line

    @classmethod
    def unpack(cls, y: list[int], x: list[int]) -> "Grid":
        """Create the grid from the two lists of integers that an operator receives."""
        return cls(Line(*y), Line(*x))

    @property
    def queries(self) -> int:
        """Number of queries, N_q."""
        return self.y.queries * self.x.queries

    @property
    def pixels(self) -> int:
        """Number of real keys, N_k."""
        return self.y.length * self.x.length

    @property
    def extended(self) -> int:
        """Number of keys, padding included."""
        return self.y.keys * self.x.keys
