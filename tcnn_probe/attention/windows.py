"""Where the windows of an attention lie in the image: how layers of timm, torchvision and transformers cut theirs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from tcnn_probe.attention.known_layers import lookup
from tcnn_probe.hooks.forwards import Running

__all__ = ["Windows", "find_windows"]


@dataclass(frozen=True)
class Windows:
    """Windows of an image's grid, in the order in which a layer cuts them.

    Args:
        grid: rows and columns of the image's grid.
        window: rows and columns of each window.
        shift: how far the grid is rolled up and to the left before it is cut.
        padded_first: whether the grid is filled up to whole windows before it is rolled, not afterwards.
        spread: whether each window holds every n-th row and column of the grid, rather than neighbours.
    """

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    padded_first: bool = False
    spread: bool = False

    def cells(self) -> Tensor:
        """Which cell of the grid, row-major, each token of each window is: (windows, tokens); -1 for padding."""
        (rows, columns), (high, wide) = self.grid, self.window
        cells = torch.arange(rows * columns).view(rows, columns)
        padding = (0, -columns % wide, 0, -rows % high)
        if self.padded_first:
            cells = F.pad(cells, padding, value=-1)
        cells = cells.roll((-self.shift[0], -self.shift[1]), (0, 1))
        if not self.padded_first:
            cells = F.pad(cells, padding, value=-1)
        if self.spread:
            cut = cells.unflatten(0, (high, -1)).unflatten(2, (wide, -1)).permute(1, 3, 0, 2)
        else:
            cut = cells.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).permute(0, 2, 1, 3)
        return cut.flatten(2).flatten(0, 1)


def find_windows(running: Running) -> Windows | None:
    """How the innermost module that is known to cut windows cuts them; None if there is none."""
    cuts = ((lookup(_CUTS, module), module, inputs) for module, inputs in reversed(running))
    return next((cut(module, inputs) for cut, module, inputs in cuts if cut is not None), None)


def _channels_last(inputs: Sequence[Any]) -> tuple[int, int]:
    return inputs[0].shape[1], inputs[0].shape[2]


def _swin(block: Any, inputs: Sequence[Any]) -> Windows:
    return Windows(_channels_last(inputs), to_2tuple(block.window_size), to_2tuple(block.shift_size))


def _torchvision_swin(layer: Any, inputs: Sequence[Any]) -> Windows:
    grid, window = _channels_last(inputs), to_2tuple(layer.window_size)
    shifts = [0 if cut >= length else shift for cut, length, shift in zip(window, grid, layer.shift_size, strict=True)]
    return Windows(grid, window, (shifts[0], shifts[1]), padded_first=True)


def _transformers_swin(layer: Any, inputs: Sequence[Any]) -> Windows:
    size = next(pair for pair in inputs if isinstance(pair, (tuple, list)) and len(pair) == 2)
    return Windows(to_2tuple(size), to_2tuple(layer.window_size), to_2tuple(layer.shift_size), padded_first=True)


def _maxvit(block: Any, inputs: Sequence[Any]) -> Windows:
    channels_last = type(block).__name__.endswith("Cl")
    grid = _channels_last(inputs) if channels_last else (inputs[0].shape[2], inputs[0].shape[3])
    return Windows(grid, to_2tuple(block.partition_size), spread=not block.partition_block)


def _torchvision_maxvit(layer: Any, inputs: Sequence[Any]) -> Windows:
    spread = not isinstance(layer.partition_swap, nn.Identity)
    side = layer.g if spread else layer.p
    return Windows((inputs[0].shape[2], inputs[0].shape[3]), (side, side), spread=spread)


def _davit(block: Any, inputs: Sequence[Any]) -> Windows:
    return Windows((inputs[0].shape[2], inputs[0].shape[3]), to_2tuple(block.window_size))


def _twins(layer: Any, inputs: Sequence[Any]) -> Windows:
    return Windows(to_2tuple(inputs[1]), to_2tuple(layer.ws))


_CUTS: Mapping[str, Callable[[Any, Sequence[Any]], Windows]] = {
    "timm.models.swin_transformer.SwinTransformerBlock": _swin,
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": _swin,
    "timm.models.swin_transformer_v2_cr.SwinTransformerV2CrBlock": _swin,
    "timm.models.maxxvit.PartitionAttentionCl": _maxvit,
    "timm.models.maxxvit.PartitionAttention2d": _maxvit,
    "timm.models.davit.SpatialBlock": _davit,
    "timm.models.twins.LocallyGroupedAttn": _twins,
    "torchvision.models.swin_transformer.ShiftedWindowAttention": _torchvision_swin,
    "torchvision.models.maxvit.PartitionAttentionLayer": _torchvision_maxvit,
    "transformers.models.swin.modeling_swin.SwinLayer": _transformers_swin,
    "transformers.models.swinv2.modeling_swinv2.Swinv2Layer": _transformers_swin,
}
"""By the name of the class of the module that cuts its input into windows."""
