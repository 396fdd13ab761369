"""Records of layers of timm."""

from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import Any

from tcnn_probe.architectures.grids import MaskUnits, Tokens, Windows, pair
from tcnn_probe.architectures.record import HeadParameters, LayerRecord, ResidualBranch

__all__ = ["TIMM_LAYERS"]

# Grids that a layer knows by itself.


def _square(
    side: Callable[[Any, int], int],
) -> Callable[[Any, int], tuple[Tokens, Tokens]]:
    """Return a function that gives queries and keys the same square grid,
    from a function that returns its side.
    """

    def grids(layer: Any, keys: int) -> tuple[Tokens, Tokens]:
        rows = side(layer, keys)
        return Tokens(0, rows, rows), Tokens(0, rows, rows)

    return grids


def _halo(layer: Any, keys: int) -> tuple[Tokens, Tokens]:
    """Place a block of queries, which may be strided, in the middle of its window of keys."""
    side, stride, halo = (
        layer.block_size_ds,
        float(layer.block_stride),
        float(layer.halo_size),
    )
    return Tokens(0, side, side, (stride, stride), (halo, halo)), Tokens(
        0, layer.win_size, layer.win_size
    )


def _every_second(layer: Any, keys: int) -> tuple[Tokens, Tokens]:
    """Place the queries on every ``stride``-th row and column of the keys."""
    (height, width), stride = layer.resolution, layer.stride
    spacing = float(stride), float(stride)
    return Tokens(0, -(-height // stride), -(-width // stride), spacing), Tokens(0, height, width)


def _padded_evenly(layer: Any) -> bool:
    """Return whether keys come from a convolution padded by 1 on each side,
    and queries are not pooled.
    """
    # With padding "same", strided windows begin at different pixels for even and odd sizes.
    pooling = getattr(layer.key, "down_conv", None)
    return pooling is not None and tuple(pooling.padding) == (1, 1) and not layer.has_query_strides


def _always(layer: Any) -> bool:
    return True


# Windows that a layer cuts.


def _grid_of_channels_last(inputs: Sequence[Any]) -> tuple[int, int]:
    return inputs[0].shape[1], inputs[0].shape[2]


def _grid_of_channels_first(inputs: Sequence[Any]) -> tuple[int, int]:
    return inputs[0].shape[2], inputs[0].shape[3]


def _swin(block: Any, inputs: Sequence[Any]) -> Windows:
    return Windows(
        _grid_of_channels_last(inputs),
        pair(block.window_size),
        pair(block.shift_size),
    )


def _maxvit(
    grid: Callable[[Sequence[Any]], tuple[int, int]],
) -> Callable[[Any, Sequence[Any]], Windows]:
    """Return a function that describes the windows of a block:
    compact, or of every n-th row and column.
    """

    def windows(block: Any, inputs: Sequence[Any]) -> Windows:
        return Windows(
            grid(inputs),
            pair(block.partition_size),
            spread=not block.partition_block,
        )

    return windows


def _davit(block: Any, inputs: Sequence[Any]) -> Windows:
    # DaViT never shifts its windows.
    return Windows(_grid_of_channels_first(inputs), pair(block.window_size))


def _sam2(block: Any, inputs: Sequence[Any]) -> Windows:
    grid = _grid_of_channels_last(inputs)
    # Blocks with global attention have a window size of 0.
    return Windows(grid, block.window_size if block.is_windowed else grid)


def _sam(block: Any, inputs: Sequence[Any]) -> Windows:
    grid = _grid_of_channels_last(inputs)
    return Windows(grid, pair(block.window_size) if block.window_size else grid)


def _hiera(model: Any) -> Sequence[MaskUnits]:
    schedules = model.reroll.schedule.values()
    return [MaskUnits(tuple(size), strides) for strides, size in schedules]


def _twins(layer: Any, inputs: Sequence[Any]) -> Windows:
    # The second input is the grid, which the shape of the tokens, (B, N, C), does not show.
    return Windows(pair(inputs[1]), pair(layer.ws))


# Residual branches of a block.


def _layer_scales(mixer: str = "norm1", mlp: str = "norm2") -> Sequence[ResidualBranch]:
    """Describe a block whose LayerScale modules return whole branches."""
    return ResidualBranch("ls1", "", mixer), ResidualBranch("ls2", "", mlp)


def _scale_parameters(
    mixer: str, mlp: str, *scales: str, main: str | int = "norm1", axis: int = -1
) -> Sequence[ResidualBranch]:
    """Describe a block that multiplies its branches by parameters."""
    return ResidualBranch(scales[0], mixer, main, axis), ResidualBranch(scales[1], mlp, "norm2")


def _of_cait(main: str | int = "norm1") -> Sequence[ResidualBranch]:
    return _scale_parameters("attn", "mlp", "gamma_1", "gamma_2", main=main)


_CONVNEXT = ResidualBranch(
    "gamma",
    "mlp",
    ":shortcut",  # the shortcut may downsample
    axis=lambda block: 1 if block.use_conv_mlp else -1,
    main_axis=1,
)

# Parameters of single heads.

_QKV = HeadParameters(
    {
        **dict.fromkeys(("q", "k", "v", "q_proj", "k_proj", "v_proj"), 1),
        "qk": 2,
        "kv": 2,
        "qkv": 3,
        **dict.fromkeys(("q_bias", "k_bias", "v_bias"), 1),
    },
    output="proj",
)
"""Rows of qkv are (3, heads, d), those of kv (2, heads, d),
and so on; columns of proj are (heads, d).

Similar layers may have another order: LeViT interleaves queries, keys and values head by head, and
Nest interleaves the heads in each channel. A class is therefore listed here only if its source was
read.
"""
_QKV_OF_CONVIT = HeadParameters({**_QKV.rows, "pos_proj": 1, "gating_param": 1}, output="proj")

_CHANNELS = "attention between channels, not between tokens"
_CROSS_COVARIANCE = "attention between channels (cross-covariance), not between tokens"
_BRANCHES = "attention between branches, not between tokens"
_DIFFERENCE = (
    "differential attention: its weights, A1 - lambda A2 of two softmaxes, are not a distribution"
)
_POOLING = "average pooling in place of attention"
_LATENTS = "the queries are latents, which lie on no grid"

_ATTENTION: Mapping[str, LayerRecord] = {
    "timm.layers.attention.Attention": LayerRecord(head_parameters=_QKV),
    "timm.layers.attention.AttentionRope": LayerRecord(head_parameters=_QKV),
    # The query is a parameter of the layer and does not belong to a patch.
    "timm.layers.attention_pool.AttentionPoolLatent": LayerRecord(
        latent_queries=_LATENTS, head_parameters=_QKV
    ),
    "timm.layers.attention_pool.AttentionPoolPrr": LayerRecord(latent_queries=_LATENTS),
    "timm.layers.attention2d.MultiQueryAttention2d": LayerRecord(strided=_padded_evenly),
    # Heads are folded into the batch before the blocks are unfolded: (batch * heads, blocks,
    # N_query, N_key).
    "timm.layers.halo_attn.HaloAttn": LayerRecord(heads_axis="merged", own_grids=_halo),
    "timm.models.beit.Attention": LayerRecord(head_parameters=_QKV),
    "timm.models.cait.ClassAttn": LayerRecord(head_parameters=_QKV),
    "timm.models.cait.TalkingHeadAttn": LayerRecord(head_parameters=_QKV, mixing="proj_w"),
    "timm.models.convit.GPSA": LayerRecord(head_parameters=_QKV_OF_CONVIT),
    "timm.models.convit.MHSA": LayerRecord(head_parameters=_QKV),
    "timm.models.davit.WindowAttention": LayerRecord(head_parameters=_QKV),
    # Queries come from a strided convolution plus the pixel at its centre.
    "timm.models.efficientformer_v2.Attention2dDownsample": LayerRecord(strided=_always),
    # The layer loops over its heads, so the softmax has no axis of heads, although the layer has
    # num_heads.
    "timm.models.efficientvit_msra.CascadedGroupAttention": LayerRecord(heads_axis="one"),
    "timm.models.eva.EvaAttention": LayerRecord(head_parameters=_QKV),
    "timm.models.fastvit.Attention": LayerRecord(head_parameters=_QKV),
    # (B, heads, windows, N, N), where the number of windows may equal that of the heads.
    "timm.models.hiera.MaskUnitAttention": LayerRecord(
        heads_axis=1,
        not_in_raster_order="Hiera's tokens are ordered by mask unit, and the positions of the "
        "units are unknown",
    ),
    # The downsampling takes every second row and column of the queries by slicing.
    "timm.models.levit.AttentionDownsample": LayerRecord(own_grids=_every_second),
    "timm.models.metaformer.Attention": LayerRecord(head_parameters=_QKV),
    "timm.models.mvitv2.MultiScaleAttention": LayerRecord(strided=_always, head_parameters=_QKV),
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": LayerRecord(strided=_always),
    # (B, heads, blocks, N, N); the blocks of an image are square.
    "timm.models.nest.Attention": LayerRecord(
        heads_axis=1, own_grids=_square(lambda layer, keys: isqrt(keys))
    ),
    "timm.models.pvt_v2.Attention": LayerRecord(head_parameters=_QKV),
    "timm.models.swin_transformer.WindowAttention": LayerRecord(head_parameters=_QKV),
    "timm.models.swin_transformer_v2.WindowAttention": LayerRecord(head_parameters=_QKV),
    "timm.models.tnt.Attention": LayerRecord(head_parameters=_QKV),
    "timm.models.twins.GlobalSubSampleAttn": LayerRecord(head_parameters=_QKV),
    "timm.models.twins.LocallyGroupedAttn": LayerRecord(
        own_grids=_square(lambda layer, keys: layer.ws),
        windows=_twins,
        head_parameters=_QKV,
    ),
    # In older versions of timm, timm.layers.attention.Attention is defined here.
    "timm.models.vision_transformer.Attention": LayerRecord(head_parameters=_QKV),
    "timm.models.vision_transformer_relpos.RelPosAttention": LayerRecord(head_parameters=_QKV),
    "timm.models.vision_transformer_sam.Attention": LayerRecord(head_parameters=_QKV),
    "timm.models.volo.Attention": LayerRecord(head_parameters=_QKV),
    "timm.models.volo.ClassAttention": LayerRecord(head_parameters=_QKV),
    # (B, heads, places, k * k, k * k): each place weights the values in its own neighbourhood.
    "timm.models.volo.OutlookAttention": LayerRecord(
        heads_axis=1,
        own_grids=_square(lambda layer, keys: layer.kernel_size),
    ),
}

_WITHOUT_ATTENTION_MATRIX: Mapping[str, str] = {
    "timm.layers.cbam.ChannelAttn": "a gate on channels, not attention between tokens",
    "timm.layers.cbam.SpatialAttn": "a gate on pixels, not attention between tokens",
    # Each of the two softmaxes uses half of the channels of a head, and neither alone weights the
    # values.
    "timm.layers.diff_attention.DiffAttention": _DIFFERENCE,
    "timm.layers.global_context.GlobalContext": "one global context vector, no N x N matrix",
    "timm.layers.lambda_layer.LambdaLayer": "lambda layer: keys are summarised without the "
    "queries, no N x N matrix",
    "timm.layers.selective_kernel.SelectiveKernelAttn": _BRANCHES,
    "timm.layers.split_attn.SplitAttn": _BRANCHES,
    "timm.models.coat.FactorAttnConvRelPosEnc": "factorised attention: a softmax of the keys "
    "alone, no N x N matrix",
    "timm.models.csatv2.SpatialAttention": "a softmax between the images of a batch, not between "
    "tokens",
    "timm.models.davit.ChannelAttention": _CHANNELS,
    "timm.models.davit.ChannelAttentionV2": _CHANNELS,
    "timm.models.edgenext.CrossCovarianceAttn": _CROSS_COVARIANCE,
    "timm.models.efficientformer.Pooling": _POOLING,
    "timm.models.efficientvim.HSMSSD": "a state-space layer: the softmax spreads pixels over its "
    "states",
    "timm.models.efficientvit_mit.LiteMLA": "linear attention with a ReLU kernel, no softmax",
    "timm.models.metaformer.Pooling": _POOLING,
    "timm.models.mobilevit.LinearSelfAttention": "separable attention: one context vector, no N x "
    "N matrix",
    "timm.models.swiftformer.EfficientAdditiveAttention": "additive attention: one global query, "
    "no N x N matrix",
    "timm.models.vision_transformer.DiffParallelScalingBlock": _DIFFERENCE,
    "timm.models.xcit.XCA": _CROSS_COVARIANCE,
}

_BLOCKS: Mapping[str, LayerRecord] = {
    "timm.models.beit.Block": LayerRecord(branches=_of_cait()),
    "timm.models.cait.LayerScaleBlock": LayerRecord(branches=_of_cait()),
    # The first norm takes class token and patches together, but the main branch is the token alone,
    # the second input.
    "timm.models.cait.LayerScaleBlockClassAttn": LayerRecord(branches=_of_cait(main=1)),
    "timm.models.convnext.ConvNeXtBlock": LayerRecord(branches=(_CONVNEXT,)),
    # The block cuts the windows, so its attention sees single windows only; the same holds for Swin
    # and MaxViT.
    "timm.models.davit.SpatialBlock": LayerRecord(windows=_davit),
    "timm.models.efficientformer.MetaBlock1d": LayerRecord(branches=_layer_scales()),
    # The block has no norms: the mixer and the MLP take the main branch directly.
    "timm.models.efficientformer.MetaBlock2d": LayerRecord(
        branches=_layer_scales("token_mixer", "mlp")
    ),
    "timm.models.eva.EvaBlock": LayerRecord(branches=_of_cait()),
    "timm.models.focalnet.FocalNetBlock": LayerRecord(branches=_layer_scales()),
    "timm.models.gcvit.GlobalContextVitBlock": LayerRecord(branches=_layer_scales()),
    "timm.models.maxxvit.PartitionAttentionCl": LayerRecord(
        windows=_maxvit(_grid_of_channels_last), branches=_layer_scales()
    ),
    "timm.models.maxxvit.PartitionAttention2d": LayerRecord(
        windows=_maxvit(_grid_of_channels_first), branches=_layer_scales()
    ),
    # The layers between tokens work on (B, C, N), so channels are on axis 1 there.
    "timm.models.mlp_mixer.MixerBlock": LayerRecord(
        branches=_scale_parameters("mlp_tokens", "mlp_channels", "", "", axis=1)
    ),
    "timm.models.mlp_mixer.ResBlock": LayerRecord(
        branches=_scale_parameters("linear_tokens", "mlp_channels", "ls1", "ls2", axis=1)
    ),
    "timm.models.hiera.Hiera": LayerRecord(mask_units=_hiera),
    "timm.models.hieradet_sam2.MultiScaleBlock": LayerRecord(windows=_sam2),
    # The block itself cuts its map into windows of every n-th pixel.
    "timm.models.mobilevit.MobileVitBlock": LayerRecord(spread_evenly=True),
    "timm.models.swin_transformer.SwinTransformerBlock": LayerRecord(windows=_swin),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": LayerRecord(windows=_swin),
    "timm.models.swin_transformer_v2_cr.SwinTransformerV2CrBlock": LayerRecord(windows=_swin),
    "timm.models.tiny_vit.TinyVitBlock": LayerRecord(windows=_sam),
    # Patches come from unfolded pixels, so no feature map shows their grid, nor that of the pixels
    # inside a patch.
    "timm.models.tnt.Block": LayerRecord(spread_evenly=False),
    "timm.models.vision_transformer.Block": LayerRecord(branches=_layer_scales()),
    "timm.models.vision_transformer_relpos.RelPosBlock": LayerRecord(branches=_layer_scales()),
    "timm.models.vision_transformer_sam.Block": LayerRecord(windows=_sam),
    "timm.models.xcit.XCABlock": LayerRecord(
        branches=(
            ResidualBranch("gamma1", "attn", "norm1"),
            ResidualBranch("gamma2", "mlp", "norm2"),
            ResidualBranch("gamma3", "local_mp", "norm3"),
        )
    ),
}

TIMM_LAYERS: Mapping[str, LayerRecord] = {
    **_ATTENTION,
    **{
        name: LayerRecord(no_attention_matrix=reason)
        for name, reason in _WITHOUT_ATTENTION_MATRIX.items()
    },
    **_BLOCKS,
}
