"""Receptive fields of the cells of feature maps: the pixels of the image that they look at."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tcnn_probe.hooks.modes import Uncompiled

__all__ = ["Places", "ReceptiveFields"]

Grid = tuple[int, int]  # rows and columns
aten = torch.ops.aten


class Places(NamedTuple):
    """Places of cells along one side of the image: cell n is at pixel ``first + n * spacing``, counted from 0."""

    first: float
    spacing: float


class _Fields(NamedTuple):
    """Pixels that cells see along one side: cell n those from ``low + n * spacing`` to ``high + n * spacing``."""

    low: float
    high: float
    spacing: float


class ReceptiveFields(Uncompiled):
    """Receptive fields of feature maps, by their sizes, from the convolutions and pools that a forward computes.

    ::

        with ReceptiveFields((224, 224)) as fields:
            model(images)
        rows, columns = fields.places((7, 7))

    Where several paths lead to maps of one size, the field is all that these see (a strided shortcut and the
    convolutions beside it). Padding counts as pixels of the image.

    Args:
        size: Height and width of the images.
    """

    def __init__(self, size: Grid) -> None:
        super().__init__()
        self._size = size
        self._fields: dict[Grid, list[_Fields]] = {size: [_Fields(0, 0, 1)] * 2}

    def places(self, grid: Grid) -> tuple[Places, Places]:
        """Return the centres of the fields of a map's rows and columns; an unknown map divides the image evenly."""
        fields = self._fields.get(grid)
        if fields is None:
            steps = [
                pixels / cells for pixels, cells in zip(self._size, grid, strict=True)
            ]
            return Places((steps[0] - 1) / 2, steps[0]), Places(
                (steps[1] - 1) / 2, steps[1]
            )
        rows, columns = (
            Places((field.low + field.high) / 2, field.spacing) for field in fields
        )
        return rows, columns

    def cell(self, grid: Grid, pixel: tuple[int, int]) -> Grid:
        """Return the cell of a map whose centre is nearest to a pixel (y, x) of the image."""
        cells = []
        for at, (first, spacing), count in zip(
            pixel, self.places(grid), grid, strict=True
        ):
            cells.append(
                min(max(math.floor((at - first) / spacing + 0.5), 0), count - 1)
            )
        return cells[0], cells[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let torch compute, and follow operations that change where cells look."""
        # Higher-order operators, such as flex_attention, have neither a packet nor a decomposition.
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        # In inference mode a convolution comes as a whole, and not as its parts.
        with self:
            output = func.decompose(*args, **(kwargs or {}))
        if output is not NotImplemented:
            return output
        output = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        # args[6] says that it is transposed: its cells are finer than those of its input, which no kernel slides over.
        if operation is aten.convolution and args[0].ndim == 4 and not args[6]:
            self._slides(args[0], output, args[1].shape[2:], *args[3:6])
        elif operation is aten.max_pool2d_with_indices:
            self._slides(args[0], output[0], *args[1:5])
        elif operation is aten.avg_pool2d:
            self._slides(args[0], output, *args[1:4])
        elif operation in _PADS and args[0].ndim == 4:
            # Pads are (left, right, top, bottom), of the last axis alone if there are two.
            pads = [*args[1], 0, 0]
            left, top = pads[0], pads[2]
            self._slides(args[0], output, 1, 1, (top, left))
        return output

    def _slides(
        self,
        x: Any,
        output: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
    ) -> None:
        """Note the fields of a map over which a kernel has slid."""
        input_fields = self._fields.get((x.shape[2], x.shape[3]))
        if input_fields is None:
            return
        grid = output.shape[2], output.shape[3]
        fields: list[_Fields] = []
        by_side = zip(
            input_fields,
            # torch's pools without a stride step by their kernel.
            *map(_pair, (kernel, stride or kernel, padding, dilation)),
            strict=True,
        )
        for (low, high, spacing), size, step, pad, spread in by_side:
            # Cell n of the output sees cells n s - p to n s - p + d (k - 1) of the input.
            reach = spread * (size - 1) - pad
            fields.append(
                _Fields(low - pad * spacing, high + reach * spacing, spacing * step)
            )
        earlier_fields = self._fields.get(grid, fields)
        # A map of the same size with another spacing belongs to another path or forward: the latest one counts.
        if [field.spacing for field in earlier_fields] == [
            field.spacing for field in fields
        ]:
            pairs = zip(earlier_fields, fields, strict=True)
            fields = [
                _Fields(min(a.low, b.low), max(a.high, b.high), a.spacing)
                for a, b in pairs
            ]
        self._fields[grid] = fields


_PADS = {aten.constant_pad_nd, aten.reflection_pad2d, aten.replication_pad2d}


def _pair(values: int | Sequence[int]) -> Sequence[int]:
    """Return values for rows and columns, of a number that torch takes for both."""
    return (
        (values, values)
        if isinstance(values, int)
        else tuple(values) * (2 // len(values))
    )
