"""Networks with stages and pooled queries or keys: statistics equal brute force in float64."""

from dataclasses import replace
from functools import partial

import pytest
import timm
from timm.layers import AttentionPool2d
from timm.models.byoanet import model_cfgs
from timm.models.byobnet import ByobNet
from timm.models.crossvit import CrossVit
from timm.models.efficientformer_v2 import EfficientFormerV2
from timm.models.efficientvit_msra import EfficientVitMsra
from timm.models.levit import Levit
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from torch import nn

from tests.tcnn_probe.attention.bruteforce import Layout, grid
from tests.tcnn_probe.attention.checking import (
    Family,
    check_family,
    merged,
    same,
    without_heads,
)

pytestmark = pytest.mark.numerical

SIZE = (64, 96)
LAST_TWO = {"stages.2*": same(grid(4, 6)), "stages.3*": same(grid(2, 3))}


def mvit() -> Family:
    """Return MViTv2, pooled by strided convolutions of 3 x 3:
    token i is at cell ``stride * i`` of the finest grid.
    """
    options = {
        "depths": (1, 1),
        "embed_dim": (16, 32),
        "num_heads": (2, 4),
        "use_cls_token": True,
    }
    strides = {
        "stride_q": ((1, 1), (2, 2)),
        "stride_kv": ((4, 4), (1, 1)),
        "expand_attn": False,
    }
    every_cell, every_2nd, every_4th = (
        # The finest grid has 16 cells a side, and positions on coarser grids are given in its
        # units.
        grid(n, n, prefix=1, spacing=(16 // n, 16 // n))
        for n in (16, 8, 4)
    )
    layouts = {
        "stages.0*": Layout(every_cell, every_4th, class_query=True),
        "*": Layout(every_2nd, every_cell, class_query=True),
    }
    model = partial(
        MultiScaleVit,
        MultiScaleVitCfg(**options, **strides),
        img_size=(64, 64),
        num_classes=5,
    )
    # Images are square, as timm makes MViT's decomposed relative positions for one size.
    return Family("mvitv2", model, (64, 64), layouts, 2.2)


def levit() -> Family:
    """Return LeViT: a downsampling has 7 x 7 queries for 14 x 14 tokens,
    or 4 x 4 for 7 x 7, two cells apart.
    """
    options = {
        "embed_dim": (32, 48, 64),
        "depth": (1, 1, 1),
        "key_dim": 8,
        "num_heads": (2, 3, 4),
    }
    layouts = {
        "stages.1.downsample*": Layout(grid(7, 7, spacing=(2, 2)), grid(14, 14)),
        "stages.2.downsample*": Layout(grid(4, 4, spacing=(2, 2)), grid(7, 7)),
        **{f"stages.{stage}*": same(grid(side, side)) for stage, side in enumerate((14, 7, 4))},
    }
    return Family(
        "levit",
        partial(Levit, num_classes=5, **options),
        # LeViT's biases are made for 224 pixels.
        (224, 224),
        layouts,
        2.2,
        flattest=0.97,
    )


def efficientformer_v2() -> Family:
    """Return EfficientFormerV2: blocks pool 4 x 6 tokens to 2 x 3;
    a downsampling has queries two cells apart.
    """
    options = {
        "depths": (1, 1, 1, 1),
        "embed_dims": (8, 8, 16, 32),
        "mlp_ratios": ((1,),) * 4,
        "num_vit": 1,
    }
    layouts = {
        "*downsample*": Layout(grid(2, 3, spacing=(2, 2)), grid(4, 6)),
        "*": same(grid(2, 3)),
    }
    return Family(
        "efficientformerv2",
        partial(EfficientFormerV2, img_size=SIZE, **options),
        SIZE,
        layouts,
        2.2,
    )


def pvt(*, linear: bool) -> Family:
    """Return PVTv2 with 16 x 24 and 8 x 12 queries;
    keys are pooled by 8 x 8 and 4 x 4, or to 7 x 7 if ``linear``.
    """
    options = {
        "depths": (1, 1),
        "embed_dims": (16, 16),
        "num_heads": (2, 4),
        "sr_ratios": (8, 4),
        "mlp_ratios": (1, 1),
    }
    layouts = {
        "stages.0*": Layout(
            # Keys are means of 8 x 8 cells, with their centre at 3.5.
            grid(16, 24),
            grid(2, 3, spacing=(8, 8), origin=(3.5, 3.5)),
        ),
        "stages.1*": Layout(grid(8, 12), grid(2, 3, spacing=(4, 4), origin=(1.5, 1.5))),
    }
    model = partial(PyramidVisionTransformerV2, num_classes=5, linear=linear, **options)
    return Family(
        f"pvt_v2{'_linear' * linear}",
        model,
        SIZE,
        # Keys pooled to 7 x 7 for any size overlap, and lie on no grid of the image.
        {"*": Layout(None, None)} if linear else layouts,
        2.5,
    )


def crossvit() -> Family:
    """Return CrossViT: two grids of one image,
    with class tokens that attend to the other grid's patches.
    """
    options = {
        "img_size": 48,
        "patch_size": (8, 12),
        "embed_dim": (16, 24),
        "depth": ((1, 1, 0),),
        "num_heads": (2, 4),
    }
    grids = grid(6, 6, prefix=1), grid(4, 4, prefix=1)
    layouts = {f"blocks.0.blocks.{i}*": same(places) for i, places in enumerate(grids)}
    layouts |= {
        # Each class token attends to the patches of the other branch.
        f"*fusion.{i}*": Layout(None, places, class_query=True)
        for i, places in enumerate(reversed(grids))
    }
    return Family("crossvit", partial(CrossVit, num_classes=5, **options), (48, 48), layouts)


def efficientvit() -> Family:
    """Return EfficientViT, with a layer per head:
    14 x 14 tokens in windows of 7 x 7, then 7 x 7.
    """
    options = {
        "embed_dim": (16, 16),
        "key_dim": (8, 8),
        "depth": (1, 1),
        "num_heads": (2, 2),
        "window_size": (7, 7),
    }
    model = partial(
        EfficientVitMsra,
        kernels=(3, 3),
        down_ops=(("", 1), ("subsample", 2)),
        **options,
    )
    return Family(
        "efficientvit_msra",
        model,
        (224, 224),
        # Each head is a separate module, so that weights have no axis of heads.
        {"*": same(grid(7, 7), arrange=without_heads)},
        2.5,
    )


def clip() -> Family:
    """Return a convnet with CLIP's pooling: a token,
    the mean of all features, attends to the features.
    """
    pool = partial(AttentionPool2d, 24, out_features=5, feat_size=(3, 5), head_dim=8)
    layouts = {"*": same(grid(3, 5, prefix=1))}
    return Family(
        "attention_pool2d",
        lambda: nn.Sequential(nn.Conv2d(3, 24, 8, 8), pool()),
        (24, 40),
        layouts,
        2.2,
    )


def timms(
    model: str, layouts: dict[str, Layout], gain: float, size=SIZE, **options: object
) -> Family:
    return Family(
        model,
        partial(timm.create_model, model, **options),
        size,
        layouts,
        gain,
        flattest=0.97,
    )


COATNET = {
    "img_size": SIZE,
    "depths": (1, 1, 1, 1),
    "embed_dim": (32, 32, 32, 64),
    "stem_width": 16,
}
ONE_HEAD = {
    f"stages.{n}*": same(grid(2 * k, 3 * k), arrange=without_heads) for n, k in ((1, 2), (2, 1))
}
BOTNET = {
    "stages.3.1*": same(grid(2, 3), arrange=merged(4)),
    "*": same(grid(4, 6), arrange=merged(4)),
}
SHVIT = {"embed_dim": (16, 24, 32), "partial_dim": (8, 12, 16), "depth": (1, 1, 1)}
# In multi-query attention, strided 3 x 3 convolutions reduce 4 x 6 pixels to 2 x 3 keys.
MOBILENET = {
    "blocks.2*": Layout(grid(4, 6), grid(2, 3, spacing=(2, 2))),
    "*": same(grid(2, 3)),
}


def botnet() -> nn.Module:
    narrow = replace(model_cfgs["botnet26t"], width_factor=0.25)
    return ByobNet(narrow, img_size=SIZE)


FAMILIES = [
    mvit(),
    levit(),
    efficientformer_v2(),
    pvt(linear=False),
    pvt(linear=True),
    crossvit(),
    efficientvit(),
    clip(),
    timms("shvit_s1", ONE_HEAD, 1.7, (128, 192), **SHVIT),  # without an axis of heads
    timms("mobilenetv4_hybrid_medium_075", MOBILENET, 1.5),
    timms("coatnet_pico_rw_224", LAST_TWO, 2.2, **COATNET),  # (B, C, H, W)
    timms("coatnet_0_224", LAST_TWO, 2.2, **COATNET),  # (B, H, W, C)
    Family("botnet26t", botnet, SIZE, BOTNET, 2.0, flattest=0.97),
]


@pytest.mark.study(but=["pvt_v2_linear", "crossvit", "attention_pool2d", "coatnet_0_224"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_equals_brute_force(family: Family) -> None:
    check_family(family)
