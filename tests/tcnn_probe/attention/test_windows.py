"""Attention in windows, shifted, haloed or dilated: statistics equal brute force in float64."""

from functools import partial

import numpy as np
import pytest
import timm
from timm.layers.halo_attn import HaloAttn
from timm.models.gcvit import GlobalContextVit
from timm.models.nest import Nest
from timm.models.tnt import TNT
from timm.models.twins import Twins
from timm.models.volo import VOLO
from torch import nn

from tests.extras import need
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, grid
from tests.tcnn_probe.attention.checking import (
    Family,
    as_it_is,
    check_family,
    same,
    windows_last,
)
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded

pytestmark = pytest.mark.numerical

# Patches of 4 make 8 x 12 cells, and windows of 2 x 3 divide both sides.
SIZE = (32, 48)
SMALL = {"num_classes": 5, "img_size": SIZE}
SWIN = {
    **SMALL,
    "patch_size": 4,
    "embed_dim": 8,
    # Each stage has two blocks, and the second one's windows are shifted.
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": (2, 3),
}
OF_SIX = {"*": same(grid(2, 3))}


def swin() -> Family:
    model = partial(timm.create_model, "swin_tiny_patch4_window7_224", **SWIN)
    return Family("swin", model, SIZE, OF_SIX)


def twins() -> Family:
    """Return Twins: 2 windows of 7 x 7, as many as heads,
    and 7 x 14 queries with keys pooled by 7 x 7.
    """
    small = {
        "embed_dims": (8,),
        "num_heads": (2,),
        "mlp_ratios": (1,),
        "depths": (2,),
        "sr_ratios": (7,),
        "wss": (7,),
    }
    windows = same(grid(7, 7), arrange=as_it_is)
    # The centre of 7 x 7 tokens is at 3.
    pooled = grid(1, 2, spacing=(7, 7), origin=(3, 3))
    layouts = {"*0.attn": windows, "*1.attn": Layout(grid(7, 14), pooled)}
    return Family("twins", partial(Twins, **small), (28, 56), layouts)


def halo() -> Family:
    """Return HaloNet: blocks of 4 x 4 pixels see 6 x 6,
    with zeros beyond the image; every second pixel is a query.
    """
    layer = partial(HaloAttn, 12, stride=2, num_heads=3, dim_head=4, block_size=4, halo_size=1)
    layout = Layout(  # the layer has (B * heads, blocks, N, N)
        # Every second of 4 x 4 pixels is a query, and the halo of one pixel shifts the origin.
        grid(2, 2, spacing=(2, 2), origin=(1, 1)),
        grid(6, 6),
        arrange=lambda weights, images: weights.unflatten(0, (images, 3)).transpose(1, 2),
    )
    return Family(
        "halo",
        lambda: nn.Sequential(nn.Conv2d(3, 12, 4, 4), layer()),
        SIZE,
        {"*": layout},
    )


def mobilevit() -> Family:
    """Return MobileViT: a pixel sees those at the same place
    of every patch of 2 x 2 pixels, which makes 4 sets.
    """
    # The four sets of pixels are separate grids.
    shapes = {"stages.2*": (4, 6), "stages.3*": (2, 3), "stages.4*": (1, 2)}
    layouts = {glob: same(grid(*shape)) for glob, shape in shapes.items()}
    return Family(
        "mobilevit",
        partial(timm.create_model, "mobilevit_xxs"),
        (64, 96),
        layouts,
        2.5,
        # The attention is nearly uniform even with large weights, so that the limit is higher.
        flattest=0.97,
    )


def mobilevit_of_transformers() -> Family:
    def make() -> nn.Module:
        transformers = need("transformers")
        widths = {"hidden_sizes": [12, 16, 20], "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 12]}
        config = transformers.MobileViTConfig(
            **widths, initializer_range=0.3, attn_implementation="eager"
        )
        return transformers.MobileViTModel(config)

    shapes = {"encoder.layer.2*": (4, 6), "encoder.layer.3*": (2, 3), "encoder.layer.4*": (1, 2)}
    layouts = {glob: same(grid(*shape)) for glob, shape in shapes.items()}
    return Family("mobilevit of transformers", make, (64, 96), layouts, 2.5, 0.97)


def gcvit() -> Family:
    """Return GCViT, with windows in each stage and global queries
    of the whole image in place of a window's own.
    """
    small = {
        "embed_dim": 8,
        "depths": (2, 1, 1, 1),
        "num_heads": (2, 2, 4, 4),
        # The window is the image divided by these numbers, so that all stages but the third have
        # windows of one size.
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
    """Return NesT with windows of 4 x 4: 16 of them,
    then 4, as many as heads, then 1, the whole image.
    """
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
    """Return VOLO: 2 x 1 pixels, as many as heads,
    give the attention of 3 x 3 neighbours; then 2 x 1 patches.
    """
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
    # Class attention sees two patches and the class token itself.
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
    """Return TNT, with patches as a sentence,
    and the 4 x 4 pixels of a patch as words in an unknown order.
    """
    small = {
        "embed_dim": 24,
        "inner_dim": 8,
        "depth": 1,
        "num_heads_inner": 2,
        "num_heads_outer": 3,
    }
    # The order of the words within a patch is not known from any layer.
    layouts = {"*in": Layout(None, None), "*": same(grid(2, 3, prefix=1))}
    return Family("tnt", partial(TNT, **SMALL, **small), SIZE, layouts)


# test_maps.py has the windows of further families.
FAMILIES = [family() for family in (swin, twins, halo, mobilevit, gcvit, nest, volo, tnt)]
FAMILIES.append(mobilevit_of_transformers())


@pytest.mark.study(but=["swin", "twins", "halo", "tnt"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_equals_brute_force(family: Family) -> None:
    check_family(family)


def test_maps_of_shifted_windows() -> None:
    """Maps of images 0 and 3 have the attention that each window's keys receive,
    and that of its central query.
    """
    model = sharpen(FAMILIES[0].make()).double()
    images = FAMILIES[0].images().double()
    # Its windows are shifted, and mask what comes from the other side of the image.
    assert (model.layers[0].blocks[1].attn_mask < -10).any()
    references = {
        reference.layer: reference.weights.unflatten(0, (4, -1)).numpy()
        for reference in attention_of(model, images)
    }
    # Batches have 1 and 3 images, so that the images with maps are in different batches.
    recorder = recorded(model, *images.split([1, 3]), images=[0, 3])
    groups = [group.dataset.isel(epoch=0) for group in recorder.tree["maps"].children.values()]
    maps_of_layers = {
        layer: maps.sel(layer=layer) for maps in groups for layer in maps.layer.values
    }
    assert maps_of_layers.keys() == references.keys()
    for layer, layer_maps in maps_of_layers.items():
        # Shape (images, windows, heads, 6, 6), for windows of 2 x 3 tokens.
        weights = references[layer][[0, 3]]
        expected = {
            "attention_received": weights.mean(-2),
            # The centre of 2 x 3 tokens is in the lower row, in the middle.
            "center_attention": weights[..., 1 * 3 + 1, :],
        }
        for name, value in expected.items():
            assert layer_maps[name].dims == ("image", "window", "head", "y", "x")
            # Maps are stored in float16: 11 significant bits, or multiples of 2^-24.
            value = value.reshape(*value.shape[:-1], 2, 3)
            np.testing.assert_allclose(layer_maps[name], value, rtol=2**-11, atol=2**-25)
