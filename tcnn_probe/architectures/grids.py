"""Tokens on a grid, windows that a layer cuts from the grid of an image,
and units by which it orders tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MaskUnits", "Tokens", "Windows", "pair"]


def pair(values: int | Sequence[int]) -> tuple[int, int]:
    """Return values for rows and columns; layers may have one number for both."""
    if isinstance(values, int):
        return values, values
    rows, columns = tuple(values) * (2 // len(values))
    return rows, columns


@dataclass(frozen=True)
class Tokens:
    """Tokens of an image: class and register tokens, then a grid in raster order.

    Positions are in cells of the finer one of the grids of queries and keys. Frames of a video are
    stacked vertically in one grid, and have the same positions.

    Args:
        prefix: Number of class and register tokens before the grid.
        height, width: Numbers of rows (of all frames) and columns of the grid.
        spacing: Distance from one row to the next, and from one column to the next.
        origin: Position of the first row and of the first column.
        frames: Number of frames; 1 for an image.
    """

    prefix: int
    height: int
    width: int
    spacing: tuple[float, float] = (1.0, 1.0)
    origin: tuple[float, float] = (0.0, 0.0)
    frames: int = 1

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.prefix + self.height * self.width

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.height, self.width

    @property
    def rows(self) -> int:
        """Rows of a frame."""
        return self.height // self.frames

    def index(self, row: float, column: float) -> int:
        """Return the index of the token at fractions of height and width,
        in the middle frame of a video.
        """
        above = self.frames // 2 * self.rows + int(row * self.rows)
        return self.prefix + above * self.width + int(column * self.width)

    def frame_numbers(self, device: torch.device) -> Tensor:
        """Return the frame of each token, shape (count,);
        tokens before the grid count as its first cell.
        """
        return self._places(device) // (self.rows * self.width)

    def positions(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return row and column of each token, shape (count,);
        tokens before the grid count as its first cell.
        """
        place = self._places(device)
        y, x = place // self.width % self.rows, place % self.width
        return (y * self.spacing[0] + self.origin[0]).to(dtype), (
            x * self.spacing[1] + self.origin[1]
        ).to(dtype)

    def _places(self, device: torch.device) -> Tensor:
        cells = self.height * self.width
        return torch.arange(-self.prefix, cells, device=device).clamp_(min=0)

    def axes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the rows of a frame,
        shape (rows,), and of the columns, shape (width,).
        """
        rows = np.arange(self.rows) * self.spacing[0] + self.origin[0]
        columns = np.arange(self.width) * self.spacing[1] + self.origin[1]
        return rows, columns


@dataclass(frozen=True)
class Windows:
    """Windows of an image's grid, in the order in which a layer cuts them.

    Args:
        grid: Rows and columns of the image's grid.
        window: Rows and columns of each window.
        shift: Rows and columns by which the grid is rolled up and to the left before it is cut.
        padded_first: Whether the grid is padded to whole windows before it is rolled rather than
            afterwards.
        spread: Whether each window holds every n-th row and column of the grid rather than
            neighbours.
    """

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    padded_first: bool = False
    spread: bool = False

    def cells(self) -> Tensor:
        """Return the row-major cell of each token of each window,
        shape (windows, tokens); -1 for padding.
        """
        (rows, columns), (high, wide) = self.grid, self.window
        cells = torch.arange(rows * columns).view(rows, columns)
        padding = (0, -columns % wide, 0, -rows % high)
        if self.padded_first:
            cells = F.pad(cells, padding, value=-1)
        cells = cells.roll((-self.shift[0], -self.shift[1]), (0, 1))
        if not self.padded_first:
            cells = F.pad(cells, padding, value=-1)
        return self._cut(cells)

    def regions(self) -> Tensor:
        """Return the region of each token of each window, shape (windows, tokens).

        The shift brings rows and columns from the other side of the image into a window. Swin and
        its relatives hide these regions from each other.
        """
        sides = zip(self.grid, self.window, self.shift, strict=True)
        down, right = (
            # The last places of the grid, with its padding.
            torch.arange(-length % side + length).flip(0) < shift
            for length, side, shift in sides
        )
        return self._cut(2 * down[:, None] + right)

    def _cut(self, cells: Tensor) -> Tensor:
        high, wide = self.window
        # A row index splits into (place in the window, window) if windows are spread, and into
        # (window, place) if they are compact.
        if self.spread:
            cut = cells.unflatten(0, (high, -1)).unflatten(2, (wide, -1)).permute(1, 3, 0, 2)
        else:
            cut = cells.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).permute(0, 2, 1, 3)
        return cut.flatten(2).flatten(0, 1)


@dataclass(frozen=True)
class MaskUnits:
    """Order of an image's tokens in Hiera: by their place within each pooling,
    and then by mask unit.

    Args:
        grid: Rows and columns of the image's grid.
        strides: Rows and columns that each of the remaining poolings combines.
    """

    grid: tuple[int, int]
    strides: Sequence[Sequence[int]]

    def cells(self, windows: int) -> Tensor:
        """Return the row-major cell of each token of each unit, shape (windows, tokens)."""
        rows, columns = self.grid
        cells = torch.arange(rows * columns).view(1, rows, columns)
        for high, wide in self.strides:
            pooled = cells.unflatten(1, (-1, high)).unflatten(3, (-1, wide))
            # (parts, Y, high, X, wide): the places of a pool come first.
            cells = pooled.permute(0, 2, 4, 1, 3).flatten(0, 2)
        # Places in the unit come first, and units last.
        return cells.reshape(-1, windows).T
