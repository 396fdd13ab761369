"""Where the cells of feature maps look in the image, by their receptive fields."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tcnn_probe.hooks.modes import Uncompiled

__all__ = ["Places", "ReceptiveFields"]

Grid = tuple[int, int]  # rows and columns
aten = torch.ops.aten


class Places(NamedTuple):
    """Where cells lie along one side of the image: cell n at pixel ``first + n * spacing``, the first pixel being 0."""

    first: float
    spacing: float


class _Fields(NamedTuple):
    """What cells see along one side: cell n the pixels from ``low + n * spacing`` to ``high + n * spacing``."""

    low: float
    high: float
    spacing: float


class ReceptiveFields(Uncompiled):
    """The receptive fields of feature maps, by their sizes, from what convolutions and pools a forward computes.

    ::

        with ReceptiveFields((224, 224)) as fields:
            model(images)
        rows, columns = fields.places((7, 7))

    Where several paths lead to maps of one size, the field is all that these see (a strided shortcut and the
    convolutions beside it). Padding counts as pixels of the image.

    Args:
        size: height and width of the images.
    """

    def __init__(self, size: Grid) -> None:
        super().__init__()
        self._size = size
        self._fields: dict[Grid, list[_Fields]] = {size: [_Fields(0, 0, 1)] * 2}

    def places(self, grid: Grid) -> tuple[Places, Places]:
        """The centres of the fields of a map's rows and columns; of an unknown map, which divides the image evenly."""
        if (fields := self._fields.get(grid)) is None:
            steps = [whole / cells for whole, cells in zip(self._size, grid, strict=True)]
            return Places((steps[0] - 1) / 2, steps[0]), Places((steps[1] - 1) / 2, steps[1])
        rows, columns = (Places((one.low + one.high) / 2, one.spacing) for one in fields)
        return rows, columns

    def cell(self, grid: Grid, pixel: tuple[int, int]) -> Grid:
        """The cell of a map whose centre is nearest to a pixel (y, x) of the image."""
        cells = []
        for at, (first, spacing), count in zip(pixel, self.places(grid), grid, strict=True):
            cells.append(min(max(math.floor((at - first) / spacing + 0.5), 0), count - 1))
        return cells[0], cells[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch compute, and follow what changes where cells look."""
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator, such as flex_attention
            return func(*args, **(kwargs or {}))
        with self:  # in inference mode a convolution comes as a whole, and not as its parts
            output = func.decompose(*args, **(kwargs or {}))
        if output is not NotImplemented:
            return output
        output = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation is aten.convolution and args[0].ndim == 4 and not args[6]:
            self._slides(args[0], output, args[1].shape[2:], *args[3:6])
        elif operation is aten.max_pool2d_with_indices:
            self._slides(args[0], output[0], *args[1:5])
        elif operation is aten.avg_pool2d:
            self._slides(args[0], output, *args[1:4])
        elif operation in _PADS and args[0].ndim == 4:
            before = [*args[1], 0, 0]
            self._slides(args[0], output, 1, 1, (before[2], before[0]))
        return output

    def _slides(self, x: Any, output: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1) -> None:
        """A kernel slides over a map."""
        before = self._fields.get((x.shape[2], x.shape[3]))
        if before is None:
            return
        grid, after = (output.shape[2], output.shape[3]), []
        each = zip(before, *map(_pair, (kernel, stride or kernel, padding, dilation)), strict=True)
        for (low, high, spacing), size, step, pad, apart in each:
            reach = apart * (size - 1) - pad
            after.append(_Fields(low - pad * spacing, high + reach * spacing, spacing * step))
        there = self._fields.get(grid, after)
        if [one.spacing for one in there] == [one.spacing for one in after]:
            both = zip(there, after, strict=True)
            after = [_Fields(min(a.low, b.low), max(a.high, b.high), a.spacing) for a, b in both]
        self._fields[grid] = after


_PADS = {aten.constant_pad_nd, aten.reflection_pad2d, aten.replication_pad2d}


def _pair(values: int | Sequence[int]) -> Sequence[int]:
    """For rows and columns, as torch takes one number for both."""
    return (values, values) if isinstance(values, int) else tuple(values) * (2 // len(values))
