"""Records of layers of transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from tcnn_probe.architectures.grids import MaskUnits, Windows, pair
from tcnn_probe.architectures.record import LayerRecord

__all__ = ["TRANSFORMERS_LAYERS"]


def _swin(layer: Any, inputs: Sequence[Any]) -> Windows:
    """Return the windows of tokens (B, N, C),
    which are padded before they are rolled; the grid is an input.
    """
    size = next(pair for pair in inputs if isinstance(pair, (tuple, list)) and len(pair) == 2)
    return Windows(
        pair(size),
        pair(layer.window_size),
        pair(layer.shift_size),
        padded_first=True,
    )


def _sam(block: Any, inputs: Sequence[Any]) -> Windows:
    """Return the windows of tokens (B, H, W, C);
    blocks with global attention have a window size of 0.
    """
    return _unshifted(block, inputs[0].shape[1:3])


def _vitdet(block: Any, inputs: Sequence[Any]) -> Windows:
    """Return the windows of tokens (B, C, H, W)."""
    return _unshifted(block, inputs[0].shape[2:])


def _unshifted(block: Any, size: Sequence[int]) -> Windows:
    grid = size[0], size[1]
    return Windows(grid, pair(block.window_size) if block.window_size else grid)


def _cvt(layer: Any) -> bool:
    """Return whether the convolution of the keys is centred at the first pixel of each cell."""
    convolution = layer.convolution_projection_key.convolution_projection.convolution
    sides = zip(convolution.kernel_size, convolution.padding, strict=True)
    return all(side == 1 + 2 * padding for side, padding in sides)


def _hiera(encoder: Any) -> Sequence[MaskUnits]:
    schedules = encoder.schedule.values()
    return [MaskUnits(tuple(size), strides) for strides, size in schedules]


TRANSFORMERS_LAYERS: Mapping[str, LayerRecord] = {
    "transformers.models.hiera.modeling_hiera.HieraEncoder": LayerRecord(mask_units=_hiera),
    # (B, heads, windows, N, N), where the number of windows may equal that of the heads.
    "transformers.models.hiera.modeling_hiera.HieraMaskUnitAttention": LayerRecord(
        heads_axis=1,
        not_in_raster_order="Hiera's tokens are ordered by mask unit, and the positions of the "
        "units are unknown",
    ),
    "transformers.models.cvt.modeling_cvt.CvtSelfAttention": LayerRecord(strided=_cvt),
    # These blocks cut the windows, so their attention sees single windows only.
    "transformers.models.donut.modeling_donut_swin.DonutSwinLayer": LayerRecord(windows=_swin),
    "transformers.models.got_ocr2.modeling_got_ocr2.GotOcr2VisionLayer": LayerRecord(windows=_sam),
    "transformers.models.maskformer.modeling_maskformer_swin.MaskFormerSwinLayer": LayerRecord(
        windows=_swin
    ),
    # The block itself cuts its map into windows of every n-th pixel.
    "transformers.models.mobilevit.modeling_mobilevit.MobileViTLayer": LayerRecord(
        spread_evenly=True
    ),
    "transformers.models.sam.modeling_sam.SamVisionLayer": LayerRecord(windows=_sam),
    "transformers.models.sam2.modeling_sam2.Sam2MultiScaleBlock": LayerRecord(windows=_sam),
    "transformers.models.sam3.modeling_sam3.Sam3ViTLayer": LayerRecord(windows=_sam),
    "transformers.models.sam_hq.modeling_sam_hq.SamHQVisionLayer": LayerRecord(windows=_sam),
    "transformers.models.swin.modeling_swin.SwinLayer": LayerRecord(windows=_swin),
    "transformers.models.swin2sr.modeling_swin2sr.Swin2SRLayer": LayerRecord(windows=_swin),
    "transformers.models.swinv2.modeling_swinv2.Swinv2Layer": LayerRecord(windows=_swin),
    "transformers.models.vitdet.modeling_vitdet.VitDetLayer": LayerRecord(windows=_vitdet),
}
