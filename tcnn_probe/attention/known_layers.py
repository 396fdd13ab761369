"""Facts about layers of timm that no attention call shows, in tables by the name of the layer's class."""

import re
from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any, TypeVar

from torch import nn

from tcnn_probe.attention.layout import Tokens

__all__ = [
    "FIRST_OF_EACH_CELL",
    "HEADS",
    "LATENT_QUERIES",
    "NOT_IN_RASTER_ORDER",
    "NO_ATTENTION_MATRIX",
    "OWN_GRIDS",
    "SPREAD",
    "looks_like_attention",
    "lookup",
    "lookup_unchanged",
]

T = TypeVar("T")

NO_ATTENTION_MATRIX: Mapping[str, str] = {
    "timm.models.xcit.XCA": "attention between channels (cross-covariance), not between tokens",
    "timm.models.edgenext.CrossCovarianceAttn": "attention between channels (cross-covariance), not between tokens",
    "timm.models.davit.ChannelAttention": "attention between channels, not between tokens",
    "timm.models.davit.ChannelAttentionV2": "attention between channels, not between tokens",
    "timm.layers.cbam.ChannelAttn": "a gate on channels, not attention between tokens",
    "timm.layers.cbam.SpatialAttn": "a gate on pixels, not attention between tokens",
    "timm.layers.selective_kernel.SelectiveKernelAttn": "attention between branches, not between tokens",
    "timm.layers.split_attn.SplitAttn": "attention between branches, not between tokens",
    "timm.models.mobilevit.LinearSelfAttention": "separable attention: one context vector, no N x N matrix",
    "timm.models.swiftformer.EfficientAdditiveAttention": "additive attention: one global query, no N x N matrix",
    "timm.models.efficientvit_mit.LiteMLA": "linear attention with a ReLU kernel, no softmax",
    "timm.models.csatv2.SpatialAttention": "a softmax between the images of a batch, not between tokens",
    "timm.models.efficientvim.HSMSSD": "a state-space layer: the softmax spreads pixels over its states",
    "timm.models.coat.FactorAttnConvRelPosEnc": "factorised attention: a softmax of the keys alone, no N x N matrix",
    "timm.layers.lambda_layer.LambdaLayer": "lambda layer: keys are summarised before queries meet them",
    "timm.layers.global_context.GlobalContext": "one global context vector, no N x N matrix",
    "timm.models.metaformer.Pooling": "average pooling in place of attention",
    "timm.models.efficientformer.Pooling": "average pooling in place of attention",
}

HEADS: Mapping[str, int | str] = {
    "timm.models.efficientvit_msra.CascadedGroupAttention": "one",
    "timm.models.hiera.MaskUnitAttention": 1,
    "timm.models.nest.Attention": 1,
    "timm.models.volo.OutlookAttention": 1,
    "timm.layers.halo_attn.HaloAttn": "merged",
}
"""The axis of heads in (..., N_query, N_key); "merged" if heads are part of the first axis, "one" if there is none."""

NOT_IN_RASTER_ORDER: Mapping[str, str] = {
    "timm.models.hiera.MaskUnitAttention": "Hiera's tokens are ordered by mask unit, not by rows"
}

LATENT_QUERIES: Mapping[str, str] = {
    "timm.layers.attention_pool.AttentionPoolLatent": "the queries are latents, which lie on no grid",
    "timm.layers.attention_pool.AttentionPoolPrr": "the queries are latents, which lie on no grid",
}


def _padded_evenly(module: Any) -> bool:
    """Whether strided 3 x 3 convolutions with padding 1 on each side make the keys, and the queries are not pooled."""
    pooling = getattr(module.key, "down_conv", None)
    return pooling is not None and tuple(pooling.padding) == (1, 1) and not module.has_query_strides


FIRST_OF_EACH_CELL: Mapping[str, Callable[[Any], bool]] = {
    "timm.models.efficientformer_v2.Attention2dDownsample": lambda module: True,
    "timm.models.mvitv2.MultiScaleAttention": lambda module: True,
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": lambda module: True,
    "timm.layers.attention2d.MultiQueryAttention2d": _padded_evenly,
}
"""Whether pooled queries or keys stand for the first pixel of their cell, as those of strided 3 x 3 convolutions do."""


def _halo(module: Any, keys: int) -> tuple[Tokens, Tokens]:
    """A block of queries, which can be strided, in the middle of its window of keys."""
    side, stride, halo = module.block_size_ds, float(module.block_stride), float(module.halo_size)
    return Tokens(0, side, side, (stride, stride), (halo, halo)), _square(module.win_size)


def _square(side: int) -> Tokens:
    return Tokens(0, side, side)


def _strided(module: Any, keys: int) -> tuple[Tokens, Tokens]:
    """Queries are every ``stride``-th row and column."""
    (height, width), stride = module.resolution, module.stride
    spacing = float(stride), float(stride)
    return Tokens(0, -(-height // stride), -(-width // stride), spacing), Tokens(0, height, width)


OWN_GRIDS: Mapping[str, Callable[[Any, int], tuple[Tokens, Tokens]]] = {
    "timm.models.levit.AttentionDownsample": _strided,
    "timm.layers.halo_attn.HaloAttn": _halo,
    "timm.models.nest.Attention": lambda module, keys: (_square(isqrt(keys)),) * 2,
    "timm.models.twins.LocallyGroupedAttn": lambda module, keys: (_square(module.ws),) * 2,
    "timm.models.volo.OutlookAttention": lambda module, keys: (_square(module.kernel_size),) * 2,
}
"""Grids of queries and keys that the layer itself knows, from the layer and the number of keys."""

SPREAD: Mapping[str, bool] = {"timm.models.mobilevit.MobileVitBlock": True, "timm.models.tnt.Block": False}
"""Modules in which tokens are spread evenly over the image, though no feature map shows their grid.

True if those of each window are: MobileViT's windows hold every n-th pixel. False if only those of whole images are.
"""


def lookup(table: Mapping[str, T], module: nn.Module) -> T | None:
    """The entry of a table for the module's class or for the nearest class it derives from."""
    _, entry = _listed(table, module)
    return entry


def lookup_unchanged(table: Mapping[str, T], module: nn.Module) -> T | None:
    """The same as :func:`lookup`, but None if the module has another ``forward`` than the class in the table."""
    cls, entry = _listed(table, module)
    return entry if type(module).forward is getattr(cls, "forward", None) and "forward" not in vars(module) else None


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module's class is named as those of attention are."""
    return re.search("(Attn|Attention|MHSA|XCA)(?!.*Projection)", type(module).__name__) is not None


def _listed(table: Mapping[str, T], module: nn.Module) -> tuple[type | None, T | None]:
    named = ((cls, f"{cls.__module__}.{cls.__qualname__}") for cls in type(module).__mro__)
    return next(((cls, table[name]) for cls, name in named if name in table), (None, None))
