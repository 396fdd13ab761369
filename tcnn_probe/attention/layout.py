"""Where tokens lie: a grid with class and register tokens before it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Layout", "Tokens"]


@dataclass(frozen=True)
class Tokens:
    """Tokens of an image: ``prefix`` class or register tokens, then a grid in raster order.

    Args:
        prefix: tokens before the grid.
        height, width: rows and columns of the grid.
        spacing: from one row or column to the next, in cells of the finer of the two grids of queries and keys.
        origin: where the first row and column lie, in the same unit.
    """

    prefix: int
    height: int
    width: int
    spacing: tuple[float, float] = (1.0, 1.0)
    origin: tuple[float, float] = (0.0, 0.0)

    @property
    def count(self) -> int:
        """All of them."""
        return self.prefix + self.height * self.width

    def positions(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column of each, in cells of the finer grid: shape (count,) each, 0 for those before the grid."""
        place = torch.arange(-self.prefix, self.height * self.width, device=device).clamp_(min=0)
        y, x = place // self.width, place % self.width
        return (y * self.spacing[0] + self.origin[0]).to(dtype), (x * self.spacing[1] + self.origin[1]).to(dtype)


@dataclass(frozen=True)
class Layout:
    """What is known of the tokens of an attention call.

    Args:
        queries, keys: None where they lie on no known grid.
        reason: why, in words; empty if both are known.
        asking: what the queries are: tokens of the image (with its class and register tokens, or the class token
            alone), latents that are learnt, or class tokens, one for each class.
    """

    queries: Tokens | None
    keys: Tokens | None
    reason: str = ""
    asking: Literal["tokens", "latents", "classes"] = "tokens"

    @property
    def prefix(self) -> int:
        """How many class and register tokens stand before the keys' grid."""
        return self.keys.prefix if self.keys else 0

    def distances(self, queries: slice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """From some queries to the keys on the grid: (queries, keys on the grid); of class tokens it means nothing."""
        assert self.queries is not None
        assert self.keys is not None
        from_y, from_x = (at[queries, None] for at in self.queries.positions(dtype, device))
        to_y, to_x = (at[self.prefix :] for at in self.keys.positions(dtype, device))
        return torch.hypot(to_y - from_y, to_x - from_x)
