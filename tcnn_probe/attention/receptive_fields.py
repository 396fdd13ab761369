"""Receptive fields of the cells of feature maps in the image."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from tcnn_probe.architectures.grids import pair
from tcnn_probe.attention.place_rules import Call, function_name

__all__ = ["Centres", "ReceptiveFields"]

Grid = tuple[int, int]  # rows and columns


class Centres(NamedTuple):
    """Positions of cells along one side of the image:
    cell n is at pixel ``first + n * spacing``, counted from 0.
    """

    first: float
    spacing: float


class _Fields(NamedTuple):
    """Receptive fields along one side: that of cell n is
    from ``low + n * spacing`` to ``high + n * spacing``.
    """

    low: float
    high: float
    spacing: float


class ReceptiveFields:
    """Receptive fields of feature maps, by map size,
    derived from the convolutions and pools of a forward.

    ::

        fields = ReceptiveFields((224, 224))
        with AttentionStream(model, AttentionListener(), fields=fields).following():
            model(images)
        rows, columns = fields.places((7, 7))

    If several paths lead to maps of one size (a strided shortcut and the convolutions beside it),
    the receptive field is the union over the paths. Padding counts as pixels of the image.

    Args:
        size: Height and width of the images.
    """

    def __init__(self, size: Grid) -> None:
        self._size = size
        self._fields: dict[Grid, list[_Fields]] = {size: [_Fields(0, 0, 1)] * 2}

    def places(self, grid: Grid) -> tuple[Centres, Centres]:
        """Return the centres of the receptive fields of rows and columns;
        an unknown map divides the image evenly.
        """
        fields = self._fields.get(grid)
        if fields is None:
            steps = [pixels / cells for pixels, cells in zip(self._size, grid, strict=True)]
            return Centres((steps[0] - 1) / 2, steps[0]), Centres((steps[1] - 1) / 2, steps[1])
        rows, columns = (Centres((field.low + field.high) / 2, field.spacing) for field in fields)
        return rows, columns

    def cell(self, grid: Grid, pixel: tuple[int, int]) -> Grid:
        """Return the cell of a map whose centre is nearest to a pixel (y, x) of the image."""
        cells = []
        for at, (first, spacing), count in zip(pixel, self.places(grid), grid, strict=True):
            cells.append(min(max(math.floor((at - first) / spacing + 0.5), 0), count - 1))
        return cells[0], cells[1]

    def follow(self, call: Call) -> None:
        """Follow a convolution, a pool or padding of maps (B, C, H, W)."""
        name = function_name(call.func)
        maps = call.argument(0, "input")
        if not isinstance(maps, Tensor) or maps.ndim != 4:
            return
        # A transposed convolution is not followed, because its cells are finer than those of its
        # input.
        if name == "conv2d":
            kernel = call.argument(1, "weight").shape[2:]
            padding, dilation = (
                call.argument(4, "padding", 0),
                call.argument(5, "dilation", 1),
            )
            if isinstance(padding, str):
                # "same" pads one side more than the other if the kernel's reach is odd, and "valid"
                # does not pad.
                reaches = [
                    spread * (size - 1) for spread, size in zip(pair(dilation), kernel, strict=True)
                ]
                padding = [reach // 2 for reach in reaches] if padding == "same" else 0
            self._slides(call, kernel, call.argument(3, "stride", 1), padding, dilation)
        elif name.startswith("max_pool2d") or name == "avg_pool2d":
            kernel, stride = call.argument(1, "kernel_size"), call.argument(2, "stride")
            dilation = call.argument(4, "dilation", 1) if name != "avg_pool2d" else 1
            # In torch, the default stride of a pool is its kernel size.
            self._slides(call, kernel, stride or kernel, call.argument(3, "padding", 0), dilation)
        elif name == "pad" and call.argument(2, "mode", "constant") != "circular":
            # Pads are (left, right, top, bottom), or (left, right) of the last axis.
            pads = [*call.argument(1, "pad"), 0, 0]
            self._slides(call, 1, 1, (pads[2], pads[0]))

    def _slides(
        self, call: Call, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
    ) -> None:
        """Note the receptive fields of the output of a sliding kernel."""
        _, _, height, width = call.argument(0, "input").shape
        input_fields = self._fields.get((height, width))
        if input_fields is None:
            return
        grid = call.shape[2], call.shape[3]
        fields: list[_Fields] = []
        by_side = zip(
            input_fields,
            *map(pair, (kernel, stride, padding, dilation)),
            strict=True,
        )
        for (low, high, spacing), size, step, pad, spread in by_side:
            # Cell n of the output depends on cells n s - p to n s - p + d (k - 1) of the input.
            reach = spread * (size - 1) - pad
            fields.append(_Fields(low - pad * spacing, high + reach * spacing, spacing * step))
        earlier_fields = self._fields.get(grid, fields)
        # An earlier map of this size with another spacing belongs to another path or forward, and
        # is replaced.
        if [field.spacing for field in earlier_fields] == [field.spacing for field in fields]:
            pairs = zip(earlier_fields, fields, strict=True)
            fields = [_Fields(min(a.low, b.low), max(a.high, b.high), a.spacing) for a, b in pairs]
        self._fields[grid] = fields
