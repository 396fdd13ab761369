"""Receptive fields of the cells of feature maps in the image."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tcnn_probe.architectures.grids import pair
from tcnn_probe.hooks.private_torch import (
    OpOverload,
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    higher_order_operators,
)

__all__ = ["Places", "ReceptiveFields"]

Grid = tuple[int, int]  # rows and columns
aten = torch.ops.aten


class Places(NamedTuple):
    """Positions of cells along one side of the image: cell n is at pixel ``first + n * spacing``, counted from 0."""

    first: float
    spacing: float


class _Fields(NamedTuple):
    """Receptive fields along one side: that of cell n is from ``low + n * spacing`` to ``high + n * spacing``."""

    low: float
    high: float
    spacing: float


class ReceptiveFields(TorchDispatchMode):
    """Receptive fields of feature maps, by map size, derived from the convolutions and pools of a forward.

    ::

        with ReceptiveFields((224, 224)) as fields:
            model(images)
        rows, columns = fields.places((7, 7))

    If several paths lead to maps of one size (a strided shortcut and the convolutions beside it), the receptive field
    is the union over the paths. Padding counts as pixels of the image.

    Args:
        size: Height and width of the images.
    """

    # Otherwise flex_attention, cond, while_loop and scan would raise NotImplementedError in this mode.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let these operators compile their functions, which need a whole graph (torch 2.15)."""
        return True

    def __enter__(self) -> Any:
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            # In older torch (2.8), each of these operators needs a rule for the mode.
            for operator in higher_order_operators():
                if type(self) not in operator.python_key_table:
                    operator.py_impl(type(self))(_without_mode(operator))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        # After Ctrl-C another mode may be on top of this one, or interrupted code may have hidden this one.
        if _get_current_dispatch_mode_stack()[-1:] == [self]:
            super().__exit__(*error)

    def __init__(self, size: Grid) -> None:
        super().__init__()
        self._size = size
        self._fields: dict[Grid, list[_Fields]] = {size: [_Fields(0, 0, 1)] * 2}

    def places(self, grid: Grid) -> tuple[Places, Places]:
        """Return the centres of the receptive fields of rows and columns; an unknown map divides the image evenly."""
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
        """Run an operation, and follow convolutions, pools and padding."""
        # Higher-order operators, such as flex_attention, have neither an overload packet nor a decomposition.
        if not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        # In inference mode operations arrive without being decomposed.
        with self:
            output = func.decompose(*args, **(kwargs or {}))
        if output is not NotImplemented:
            return output
        output = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        # args[6] is True for a transposed convolution, which is not followed: its cells are finer than its input's.
        if operation is aten.convolution and args[0].ndim == 4 and not args[6]:
            self._slides(args[0], output, args[1].shape[2:], *args[3:6])
        elif operation is aten.max_pool2d_with_indices:
            self._slides(args[0], output[0], *args[1:5])
        elif operation is aten.avg_pool2d:
            self._slides(args[0], output, *args[1:4])
        elif operation in _PADS and args[0].ndim == 4:
            # Pads are (left, right, top, bottom), or (left, right) of the last axis.
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
        """Note the receptive fields of the output of a sliding kernel."""
        input_fields = self._fields.get((x.shape[2], x.shape[3]))
        if input_fields is None:
            return
        grid = output.shape[2], output.shape[3]
        fields: list[_Fields] = []
        by_side = zip(
            input_fields,
            # In torch, the default stride of a pool is its kernel size.
            *map(pair, (kernel, stride or kernel, padding, dilation)),
            strict=True,
        )
        for (low, high, spacing), size, step, pad, spread in by_side:
            # Cell n of the output depends on cells n s - p to n s - p + d (k - 1) of the input.
            reach = spread * (size - 1) - pad
            fields.append(
                _Fields(low - pad * spacing, high + reach * spacing, spacing * step)
            )
        earlier_fields = self._fields.get(grid, fields)
        # An earlier map of this size with another spacing belongs to another path or forward, and is replaced.
        if [field.spacing for field in earlier_fields] == [
            field.spacing for field in fields
        ]:
            pairs = zip(earlier_fields, fields, strict=True)
            fields = [
                _Fields(min(a.low, b.low), max(a.high, b.high), a.spacing)
                for a, b in pairs
            ]
        self._fields[grid] = fields


def _without_mode(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's rule for a dispatch mode: run the operator, as torch has disabled the mode by then."""
    return lambda mode, *args, **kwargs: operator(*args, **kwargs)


_PADS = {aten.constant_pad_nd, aten.reflection_pad2d, aten.replication_pad2d}
