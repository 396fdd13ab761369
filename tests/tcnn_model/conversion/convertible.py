"""Tiny models of each family whose heads :func:`tcnn_model.convolve` converts, in float64."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

HEADS, GRID = 3, (5, 7)


def transformer(name: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    torch.manual_seed(1)
    defaults = {"embed_dim": 36, "num_heads": HEADS, "depth": 2, "num_classes": 2}
    options = defaults | {"patch_size": 4, "img_size": (20, 28)} | options
    model = timm.create_model(name, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    for name, parameter in model.named_parameters():
        if name.endswith("blocks.0.attn.logit_scale"):
            # Beyond the limit of Swin V2's temperatures, log 100. In windows with a mask, of -100,
            # such a head would see keys that are masked.
            parameter.data[1] = 5
    return model.eval()


def windowed(name: str, **options: Any) -> Any:
    """A Swin on 10 x 14 patches, cut into windows of 5 x 7: first as they are, and then shifted."""
    defaults = {"embed_dim": 12, "num_heads": (HEADS,), "depths": (2,), "window_size": GRID}
    return transformer(name, **defaults | {"img_size": (40, 56), "depth": None} | options)


def convit() -> Any:
    """A gated layer, and one after the class token has come."""
    size = {"img_size": 20, "embed_dim": 5, "local_up_to_layer": 1}
    return transformer("convit_tiny", **size)


FAMILIES: dict[str, tuple[Callable[[], Any], int]] = {
    "vit": (transformer, 1),
    "registers and norms": (
        lambda: transformer(reg_tokens=2, qk_norm=True, scale_attn_norm=True),
        3,
    ),
    "patches only": (
        lambda: transformer(class_token=False, global_pool="avg", qkv_bias=False),
        0,
    ),
    "beit": (lambda: transformer("beit_base_patch16_224"), 1),
    "beit with a shared bias": (
        lambda: transformer(
            "beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True
        ),
        1,
    ),
    "eva02": (lambda: transformer("eva02_tiny_patch14_224"), 1),
    "positions by head": (lambda: transformer("vit_small_patch16_rope_mixed_224"), 1),
    "grouped queries": (
        lambda: transformer(
            "vit_small_patch16_dinov3",
            attn_type="rope",
            embed_dim=48,
            num_heads=4,
            num_kv_heads=2,
            qkv_fused=False,
            qk_norm=True,
        ),
        5,
    ),
    "convit": (convit, 1),
    "swin": (lambda: windowed("swin_tiny_patch4_window7_224"), 0),
    "swin with padding": (
        lambda: windowed("swin_tiny_patch4_window7_224", img_size=(36, 44)),
        0,
    ),
    "swin v2": (lambda: windowed("swinv2_tiny_window8_256"), 0),
}
"""Functions that make the models, and their numbers of class and register tokens."""
