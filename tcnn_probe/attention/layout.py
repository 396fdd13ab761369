"""Where the tokens of an attention lie: class and register tokens first, then a grid in raster order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["Layout", "Prefix", "Tokens", "prefix_of"]


@dataclass(frozen=True)
class Tokens:
    """Tokens of an image: class and register tokens, then a grid in raster order.

    Positions are in cells of the finer of the two grids, that of the queries and that of the keys.

    Args:
        prefix: number of class and register tokens before the grid.
        height, width: number of rows and columns of the grid.
        spacing: from one row to the next, and from one column to the next.
        origin: position of the first row and of the first column.
    """

    prefix: int
    height: int
    width: int
    spacing: tuple[float, float] = (1.0, 1.0)
    origin: tuple[float, float] = (0.0, 0.0)

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.prefix + self.height * self.width

    def positions(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column of each token, shape (count,) each; those before the grid are put on its first cell."""
        place = torch.arange(-self.prefix, self.height * self.width, device=device).clamp_(min=0)
        y, x = place // self.width, place % self.width
        return (y * self.spacing[0] + self.origin[0]).to(dtype), (x * self.spacing[1] + self.origin[1]).to(dtype)


@dataclass(frozen=True)
class Layout:
    """Where the queries and the keys of an attention lie.

    Args:
        queries, keys: their grids; None where no grid is known.
        reason: why one of them is None, in words; empty if both are known.
        asking: what the queries are: tokens of the image (or its class token alone), learnt latents, or class tokens,
            one for each class.
    """

    queries: Tokens | None
    keys: Tokens | None
    reason: str = ""
    asking: Literal["tokens", "latents", "classes"] = "tokens"

    @property
    def prefix(self) -> int:
        """Number of class and register tokens before the grid of keys."""
        return self.keys.prefix if self.keys else 0

    def distances(self, queries: slice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Distances ``||delta_ij||`` from some queries to all keys on the grid, shape (queries, keys on the grid).

        Rows of class and register tokens hold meaningless numbers.
        """
        assert self.queries is not None
        assert self.keys is not None
        from_y, from_x = (at[queries, None] for at in self.queries.positions(dtype, device))
        to_y, to_x = (at[self.prefix :] for at in self.keys.positions(dtype, device))
        return torch.hypot(to_y - from_y, to_x - from_x)


@dataclass(frozen=True)
class Prefix:
    """Tokens before the grid.

    Args:
        count: how many there are; None if nobody says.
        class_token: whether the first of them is a class token.
        distillation_token: whether the second of them is a distillation token, as in DeiT.
    """

    count: int | None = None
    class_token: bool = True
    distillation_token: bool = False


def prefix_of(modules: Iterable[nn.Module], count: int | None) -> Prefix:
    """Read off a model which tokens stand before its grid.

    Args:
        modules: all modules of the model.
        count: what the user says, which goes before what the model says.
    """
    modules = list(modules)
    model = next((m for m in modules if hasattr(m, "num_prefix_tokens")), None)
    count = getattr(model, "num_prefix_tokens", None) if count is None else count
    has_class_token = getattr(model, "has_class_token", getattr(model, "cls_token", True) is not None)
    distilled = any(isinstance(getattr(m, "dist_token", None), Tensor) for m in modules)
    return Prefix(count if isinstance(count, int) else None, bool(has_class_token), distilled)
