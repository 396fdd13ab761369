"""Attention in windows, shifted, haloed or dilated: what is recorded of each equals brute force in float64."""

from functools import partial

import numpy as np
import pytest
import timm
import torch
from timm.layers.halo_attn import HaloAttn
from timm.models.gcvit import GlobalContextVit
from timm.models.nest import Nest
from timm.models.tnt import TNT
from timm.models.twins import Twins
from timm.models.vision_transformer_sam import VisionTransformerSAM
from timm.models.volo import VOLO
from torch import nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, grid
from tests.tcnn_probe.attention.checking import (
    Family,
    as_it_is,
    check_family,
    merged,
    same,
    windows_last,
)
from tests.tcnn_probe.attention.sharpen import sharpen

pytestmark = pytest.mark.numerical

# Patches of 4 make 8 x 12 cells, which windows of 2 x 3 divide along both sides.
SIZE = (32, 48)
SMALL = {"num_classes": 5, "img_size": SIZE}
SWIN = {
    **SMALL,
    "patch_size": 4,
    "embed_dim": 8,
    # Two blocks a stage: the second one's windows are shifted.
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": (2, 3),
}
MAXVIT = {"img_size": (64, 96), "embed_dim": (32, 32), "depths": (1, 1)}
OF_SIX = {"*": same(grid(2, 3))}


def swin(name: str, model: str) -> Family:
    return Family(name, partial(timm.create_model, model, **SWIN), SIZE, OF_SIX)


def samvit() -> Family:
    """5 x 7 patches in windows of 3 x 3, padded, and all of them in the last block."""
    options = {
        "img_size": (40, 56),
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "window_size": 3,
    }
    layouts = {
        "blocks.0*": same(grid(3, 3), arrange=merged(3)),
        "blocks.1*": same(grid(5, 7), arrange=merged(3)),
    }
    model = partial(
        VisionTransformerSAM, **options, global_attn_indexes=(1,), use_rel_pos=True
    )
    return Family("samvit", model, (40, 56), layouts)


def twins() -> Family:
    """2 windows of 7 x 7, as many as heads, and 7 x 14 queries whose keys are pooled, 7 x 7 in one."""
    small = {
        "embed_dims": (8,),
        "num_heads": (2,),
        "mlp_ratios": (1,),
        "depths": (2,),
        "sr_ratios": (7,),
        "wss": (7,),
    }
    windows = same(grid(7, 7), arrange=as_it_is)
    # The middle of 7 x 7 tokens is the one at 3.
    pooled = grid(1, 2, spacing=(7, 7), origin=(3, 3))
    layouts = {"*0.attn": windows, "*1.attn": Layout(grid(7, 14), pooled)}
    return Family("twins", partial(Twins, **small), (28, 56), layouts)


def halo() -> Family:
    """Blocks of 4 x 4 pixels that look at 6 x 6, zeros beyond the image; every second pixel asks."""
    layer = partial(
        HaloAttn, 12, stride=2, num_heads=3, dim_head=4, block_size=4, halo_size=1
    )
    layout = Layout(  # (B * heads, blocks, N, N) in the layer
        # Every second of 4 x 4 pixels asks: the origin is behind the halo of one.
        grid(2, 2, spacing=(2, 2), origin=(1, 1)),
        grid(6, 6),
        arrange=lambda weights, images: weights.unflatten(0, (images, 3)).transpose(
            1, 2
        ),
    )
    return Family(
        "halo",
        lambda: nn.Sequential(nn.Conv2d(3, 12, 4, 4), layer()),
        SIZE,
        {"*": layout},
    )


def mobilevit() -> Family:
    """A pixel sees those at the same place of every patch of 2 x 2: 64 x 96 / 16 pixels, 2 x 3 patches, 4 such sets."""
    # Four sets of pixels, each of which is a grid by itself.
    shapes = {"stages.2*": (4, 6), "stages.3*": (2, 3), "stages.4*": (1, 2)}
    layouts = {glob: same(grid(*shape)) for glob, shape in shapes.items()}
    return Family(
        "mobilevit",
        partial(timm.create_model, "mobilevit_xxs"),
        (64, 96),
        layouts,
        2.5,
        # Its attention stays nearly even when sharpened, so that more is let pass as even.
        flattest=0.97,
    )


def gcvit() -> Family:
    """Windows of each stage; queries that are global, of the whole image, stand for the window's own."""
    small = {
        "embed_dim": 8,
        "depths": (2, 1, 1, 1),
        "num_heads": (2, 2, 4, 4),
        # The window is the image divided by these, so that all stages have windows of one size but the third.
        "window_ratio": (32, 32, 16, 32),
    }
    layouts = {"stages.2*": same(grid(4, 6)), **OF_SIX}
    return Family(
        "gcvit",
        partial(GlobalContextVit, img_size=(64, 96), **small),
        (64, 96),
        layouts,
        2.2,
    )


def nest() -> Family:
    """Windows of 4 x 4: 16 of them, 4, as many as heads, and 1, all of the image."""
    small = {
        "embed_dims": (8, 8, 8),
        "num_heads": (2, 4, 4),
        "depths": (1, 1, 1),
        "img_size": 64,
    }
    return Family(
        "nest",
        partial(Nest, **small),
        (64, 64),
        {"*": same(grid(4, 4), arrange=windows_last)},
    )


def volo() -> Family:
    """Outlook attention among the 3 x 3 neighbours of each of 2 x 1 pixels, with 2 heads, then 2 x 1 patches."""
    small = {
        "layers": (1, 1),
        "embed_dims": (16, 16),
        "num_heads": (2, 4),
        "downsamples": (True, False),
    }
    options = {
        "outlook_attention": (True, False),
        "mlp_ratio": 1.0,
        "stem_hidden_dim": 8,
        "use_mix_token": False,
    }
    outlook = same(grid(3, 3), arrange=windows_last)
    # Class attention looks at two patches and the token itself.
    class_attention = Layout(None, grid(2, 1, prefix=1), class_query=True)
    layouts = {"network.0*": outlook, "post*": class_attention, "*": same(grid(2, 1))}
    return Family(
        "volo",
        partial(VOLO, img_size=(32, 16), **small, **options),
        (32, 16),
        layouts,
        2.2,
        flattest=0.97,
    )


def tnt() -> Family:
    """Patches as one sentence; the 4 x 4 pixels of each as words, of which nobody says how they lie."""
    small = {
        "embed_dim": 24,
        "inner_dim": 8,
        "depth": 1,
        "num_heads_inner": 2,
        "num_heads_outer": 3,
    }
    # Words lie within a patch in an order that no layer tells.
    layouts = {"*in": Layout(None, None), "*": same(grid(2, 3, prefix=1))}
    return Family("tnt", partial(TNT, **SMALL, **small), SIZE, layouts)


FAMILIES = [
    swin("swin", "swin_tiny_patch4_window7_224"),
    swin("swinv2", "swinv2_tiny_window8_256"),
    Family(
        "maxvit",
        partial(timm.create_model, "maxvit_tiny_tf_224", **MAXVIT),
        (64, 96),
        OF_SIX,
        2.2,
    ),
    *(family() for family in (samvit, twins, halo, mobilevit, gcvit, nest, volo, tnt)),
]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_equals_brute_force(family: Family) -> None:
    check_family(family)


def test_maps_of_shifted_windows() -> None:
    """Each window of images 0 and 3: what its keys receive, and what its central query sees."""
    model = sharpen(FAMILIES[0].make()).double()
    images = FAMILIES[0].images().double()
    # Its windows are shifted, and hide what came in from the other side of the image.
    assert (model.layers[0].blocks[1].attn_mask < -10).any()
    references = {
        reference.layer: reference.weights.unflatten(0, (4, -1)).numpy()
        for reference in attention_of(model, images)
    }
    with tcnn_probe.record(model, images=[0, 3]) as recorder, torch.no_grad():
        # Batches of 1 and 3: the images whose maps are kept are in different ones.
        for batch in images.split([1, 3]):
            model(batch)
        recorder.mark(epoch=0)
        groups = [
            child.to_dataset().isel(epoch=0).load()
            for child in recorder.tree["maps"].children.values()
        ]
    maps_of_layers = {
        layer: maps.sel(layer=layer) for maps in groups for layer in maps.layer.values
    }
    assert maps_of_layers.keys() == references.keys()
    for layer, layer_maps in maps_of_layers.items():
        # (images, windows, heads, 6, 6) of 2 x 3 tokens.
        weights = references[layer][[0, 3]]
        expected = {
            "attention_received": weights.mean(-2),
            # The centre of 2 x 3 tokens is the lower middle one.
            "center_attention": weights[..., 1 * 3 + 1, :],
        }
        for name, value in expected.items():
            assert layer_maps[name].dims == ("image", "window", "head", "y", "x")
            # Maps are kept in float16: 11 bits, or multiples of 2^-24.
            value = value.reshape(*value.shape[:-1], 2, 3)
            np.testing.assert_allclose(
                layer_maps[name], value, rtol=2**-11, atol=2**-25
            )
