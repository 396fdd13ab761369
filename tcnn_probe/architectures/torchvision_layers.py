"""Records of layers of torchvision."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tcnn_probe.architectures.grids import Windows, pair
from tcnn_probe.architectures.record import LayerRecord

__all__ = ["TORCHVISION_LAYERS"]


def _swin(layer: Any, inputs: Sequence[Any]) -> Windows:
    """Return the windows of an input (B, H, W, C), which is padded before it is rolled."""
    grid, window = (
        (inputs[0].shape[1], inputs[0].shape[2]),
        pair(layer.window_size),
    )
    # Windows are not shifted along an axis that a single window covers.
    shifts = [
        0 if side >= length else shift
        for side, length, shift in zip(window, grid, layer.shift_size, strict=True)
    ]
    return Windows(grid, window, (shifts[0], shifts[1]), padded_first=True)


def _maxvit(layer: Any, inputs: Sequence[Any]) -> Windows:
    """Return the windows of an input (B, C, H, W): blocks,
    or grids if the axes of each partition are swapped.
    """
    spread = not isinstance(layer.partition_swap, nn.Identity)
    side = layer.g if spread else layer.p
    return Windows((inputs[0].shape[2], inputs[0].shape[3]), (side, side), spread=spread)


TORCHVISION_LAYERS: Mapping[str, LayerRecord] = {
    # The attention itself cuts the windows; version 2 is a subclass.
    "torchvision.models.swin_transformer.ShiftedWindowAttention": LayerRecord(windows=_swin),
    # The softmax is in a submodule, which sees single windows only.
    "torchvision.models.maxvit.PartitionAttentionLayer": LayerRecord(windows=_maxvit),
}
