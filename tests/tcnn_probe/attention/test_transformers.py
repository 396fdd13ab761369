"""Vision transformers of one resolution: statistics equal brute force in float64."""

import copy
from functools import partial

import pytest
import timm
import torch
from timm.models.hiera import Unroll

from tests.tcnn_probe.attention.bruteforce import Layout, Place, attention_of, grid
from tests.tcnn_probe.attention.checking import Family, check_family, same, windows_last
from tests.tcnn_probe.attention.sharpen import sharpen

pytestmark = pytest.mark.numerical

SIZE = (24, 40)  # 3 x 5 patches of 8 x 8
SMALL = {
    "img_size": SIZE,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 5,
}
NAFLEX = {"embed_dim": 24, "depth": 1, "num_heads": 3}
HIERA = {"embed_dim": 16, "stages": (1, 1, 1, 1)}


def vit(model: str, prefix: int = 1, *, class_token: bool = True, gain: float = 1.7) -> Family:
    """Return a ViT, with class and register tokens before its patches, or with registers only."""
    # Pools and class attention have a single query, the class token, which lies on no grid.
    layouts = {
        "*pool": Layout(None, grid(3, 5), class_query=True),
        "*token_only*": Layout(None, grid(3, 5, prefix=1), class_query=True),
        "*": Layout(*[grid(3, 5, prefix=prefix)] * 2, class_query=prefix > 0 and class_token),
    }
    return Family(model, partial(timm.create_model, model, **SMALL), SIZE, layouts, gain)


def of_units(rows: int, columns: int, pools: int, windows: int, pooled: int = 1) -> list[Place]:
    """Return positions of a unit's tokens by timm's reordering,
    on a grid with ``pooled`` times as many rows.
    """
    unroll = Unroll((rows, columns), (1, 1), [(2, 2)] * pools)
    in_order = unroll(torch.arange(rows * columns).view(1, -1, 1))
    cells = in_order.view(-1, windows)[:, 0]
    middle = (pooled - 1) / 2
    return [
        (pooled * (cell // columns) + middle, pooled * (cell % columns) + middle)
        for cell in cells.tolist()
    ]


def hiera(units: tuple[int, int], heads: int) -> Family:
    """Return Hiera, with units of 32 x 32 pixels and global attention at the end;
    queries are pooled three times.
    """
    high, wide = units
    count = units[0] * units[1]
    options = {"embed_dim": 24, "num_heads": heads, "stages": (1, 1, 2, 1)}
    size = 32 * high, 32 * wide
    model = partial(timm.create_model, "hiera_tiny_224", img_size=size, **options)

    def tokens(stage: int, windows: int, pooled: int = 1) -> list[Place]:
        side = 8 >> stage
        return of_units(side * high, side * wide, 3 - stage, windows, pooled)

    last = tokens(2, 1)
    first = tokens(0, count)
    layouts = {
        "blocks.0.*": Layout(first, first, arrange=windows_last),
        "blocks.1.*": Layout(tokens(1, count, 2), first, arrange=windows_last),
        "blocks.2.*": Layout(tokens(2, count, 2), tokens(1, count), arrange=windows_last),
        "blocks.3.*": Layout(last, last, arrange=windows_last),
        "blocks.4.*": Layout(tokens(3, 1, 2), last, arrange=windows_last),
    }
    return Family(f"hiera_{heads}_heads", model, size, layouts, flattest=0.97)


FAMILIES = [
    vit("vit_tiny_patch16_224"),
    vit("vit_base_patch16_xp_224"),  # the block itself is the attention
    vit("vit_medium_patch16_reg4_gap_256", 4, class_token=False),
    vit("vit_so150m_patch16_reg4_map_256", 4, class_token=False),  # a latent pools
    vit("vit_small_patch16_dinov3", 5),  # rotary position embedding
    vit("cait_xxs24_224", 0, gain=2.2),  # talking heads and class attention
    Family(  # patches are cut by a reshape
        "naflexvit",
        partial(timm.create_model, "naflexvit_base_patch16_gap", **NAFLEX),
        (48, 80),
        {"*": Layout(*[grid(3, 5, prefix=4)] * 2)},
    ),
    hiera((2, 3), heads=6),  # as many units as heads
    hiera((1, 1), heads=3),  # a single unit
    Family(
        "sam2",
        partial(timm.create_model, "sam2_hiera_tiny", **HIERA),
        (128, 192),
        {"blocks.0.*": same(grid(8, 8)), "*": Layout(None, None)},
        flattest=0.97,
    ),
]


@pytest.mark.study(but=["vit_tiny_patch16_224", "cait_xxs24_224", "hiera_3_heads"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_equals_brute_force(family: Family) -> None:
    check_family(family)


def test_captured_attention_is_what_multiplies_the_values() -> None:
    """The oracle's attention equals the input of the dropout before the values,
    which an ordinary hook reads.
    """
    model = sharpen(FAMILIES[0].make())
    images = FAMILIES[0].images()
    twin = copy.deepcopy(model).double()
    inputs = []
    for block in twin.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(
            lambda module, args: inputs.append(args[0].detach())
        )
    twin(images.double())
    for reference, weights in zip(attention_of(model, images), inputs, strict=True):
        assert torch.equal(reference.weights, weights)
