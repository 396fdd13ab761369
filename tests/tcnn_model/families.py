"""Convnets of different timm families, with their true structure,
but narrow and with short early stages.
"""

from dataclasses import replace
from typing import Any

import timm
import torch
from timm.models import byobnet, cspnet
from torch import nn

from tests.tcnn_model.numerics import randomise_norms


def _csp(name: str) -> dict[str, Any]:
    config = cspnet.model_cfgs[name]
    depth = (*(1 for _ in config.stages.depth[1:]), 2)
    widths = tuple(width // 8 for width in config.stages.out_chs)
    return {
        "stem": replace(config.stem, out_chs=16),
        "stages": replace(config.stages, depth=depth, out_chs=widths),
    }


_BASIC = {"channels": (8, 16, 24, 32)}
_BOTTLENECK = {"layers": (1, 1, 2, 2), "channels": (8, 16, 24, 32)}
_GROUPED = {**_BOTTLENECK, "channels": (16, 32, 48, 64)}
NARROW: dict[str, dict[str, Any]] = {
    "resnet18": _BASIC,
    "resnetv2_50": {"layers": (1, 1, 2, 2), "channels": (32, 64, 96, 128)},
    "resnetv2_50d_gn": {"layers": (1, 1, 2, 2), "channels": (128, 128, 256, 256)},
    "vgg11_bn": {"mlp_ratio": 0.01},
    "densenet121": {"growth_rate": 8, "block_config": (1, 1, 2, 2)},
    "darknet53": _csp("darknet53"),
    "darknetaa53": _csp("darknetaa53"),
    "cspresnet50": _csp("cspresnet50"),
    "dla34": {"channels": (8, 8, 16, 16, 24, 32)},
    "resnext50_32x4d": _GROUPED,
    "resnetrs50": _BOTTLENECK,
    "res2net50_26w_4s": _BOTTLENECK,
    "resnest50d": _BOTTLENECK,
    "skresnet50": {**_BOTTLENECK, "channels": (16, 16, 32, 48)},
    "resnetv2_50x1_bit": {"channels": (128, 128, 128, 256)},
    "nf_resnet50": {"depths": (1, 1, 2, 2), "channels": (32, 64, 96, 128)},
    "tf_efficientnetv2_s": {"channel_multiplier": 0.125, "depth_multiplier": 0.2},
    "convnext_tiny": {"depths": (1, 1, 2, 2), "dims": (8, 16, 24, 32)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "repvgg_b0": {
        "stem_chs": 16,
        "blocks": tuple(
            replace(stage, d=1, c=stage.c // 16) for stage in byobnet.model_cfgs["repvgg_b0"].blocks
        ),
    },
}
# timm has no arguments that make these narrower; they are the smallest of their kind.
_FULL_SIZE = (
    "efficientnet_b0",
    "mobilenetv3_small_050",
)


def build(name: str, **options: Any) -> nn.Module:
    """Build a small relative of a timm model in eval mode, with 3 classes and random norms."""
    torch.manual_seed(0)
    narrow = {} if name in _FULL_SIZE else NARROW.get(name, _BOTTLENECK)
    return randomise_norms(
        timm.create_model(name, **{"num_classes": 3, **narrow, **options})
    ).eval()
