"""Records of layers of transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from timm.layers import to_2tuple

from tcnn_probe.architectures.grids import MaskUnits, Windows
from tcnn_probe.architectures.record import LayerRecord

__all__ = ["TRANSFORMERS_LAYERS"]


def _swin(layer: Any, inputs: Sequence[Any]) -> Windows:
    """Return the windows of tokens (B, N, C), which are padded before they are rolled; the grid is an input."""
    size = next(
        pair for pair in inputs if isinstance(pair, (tuple, list)) and len(pair) == 2
    )
    return Windows(
        to_2tuple(size),
        to_2tuple(layer.window_size),
        to_2tuple(layer.shift_size),
        padded_first=True,
    )


def _sam2(block: Any, inputs: Sequence[Any]) -> Windows:
    """Return the windows of tokens (B, H, W, C); blocks with global attention have a window size of 0."""
    grid = inputs[0].shape[1], inputs[0].shape[2]
    return Windows(grid, to_2tuple(block.window_size) if block.window_size else grid)


def _hiera(encoder: Any) -> Sequence[MaskUnits]:
    schedules = encoder.schedule.values()
    return [MaskUnits(tuple(size), strides) for strides, size in schedules]


TRANSFORMERS_LAYERS: Mapping[str, LayerRecord] = {
    "transformers.models.hiera.modeling_hiera.HieraEncoder": LayerRecord(
        mask_units=_hiera
    ),
    # (B, heads, windows, N, N), where the number of windows may equal that of the heads.
    "transformers.models.hiera.modeling_hiera.HieraMaskUnitAttention": LayerRecord(
        heads_axis=1,
        not_in_raster_order="Hiera's tokens are ordered by mask unit, and where these lie is unknown",
    ),
    # These blocks cut the windows, so their attention sees single windows only.
    "transformers.models.sam2.modeling_sam2.Sam2MultiScaleBlock": LayerRecord(
        windows=_sam2
    ),
    "transformers.models.swin.modeling_swin.SwinLayer": LayerRecord(windows=_swin),
    "transformers.models.swinv2.modeling_swinv2.Swinv2Layer": LayerRecord(
        windows=_swin
    ),
}
