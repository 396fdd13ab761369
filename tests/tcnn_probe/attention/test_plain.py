"""Vision transformers of one resolution: what is recorded of each equals brute force in float64."""

import copy

import pytest
import timm
import torch
from timm.models.convit import GPSA
from torch import Tensor, nn

from tests.tcnn_probe.attention.bruteforce import Layout, Whole, attention_of, grid
from tests.tcnn_probe.attention.checking import Family, check_family, check_sharp, expect, recorded
from tests.tcnn_probe.attention.sharpen import sharpen

SIZE = (24, 40)  # 3 x 5 patches of 8 x 8
SMALL = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def family(model: str, prefix: int = 1, *, class_token: bool = True, gain: float = 1.7, **options: object) -> Family:
    """Patches with class and register tokens before them, or with registers alone."""

    def layout(layer: str, module: nn.Module) -> Layout:
        if "pool" in layer:
            return Layout(None, grid(3, 5), class_query=True)
        if "token_only" in layer:  # the class token asks
            return Layout(None, grid(3, 5, prefix=1), class_query=True)
        return Layout(tokens, tokens, class_query=prefix > 0 and class_token)

    tokens = grid(3, 5, prefix=prefix)
    return Family(model, lambda: sharpen(timm.create_model(model, **SMALL | options), gain), SIZE, layout)


FAMILIES = [
    family("vit_tiny_patch16_224"),
    family("vit_small_patch16_36x1_224", qk_norm=True),
    family("vit_small_patch16_18x2_224"),
    family("vit_base_patch16_xp_224"),
    family("vit_small_patch14_reg4_dinov2", 5),
    family("vit_medium_patch16_reg4_gap_256", 4, class_token=False),
    family("vit_so150m_patch16_reg4_map_256", 4, class_token=False),
    family("vit_relpos_small_patch16_224", 0),
    family("vit_base_patch16_siglip_224", 0),
    family("vit_base_patch16_rope_224"),
    family("vit_small_patch16_dinov3", 5),
    family("deit_tiny_distilled_patch16_224", 2),
    family("deit3_small_patch16_224"),
    family("cait_xxs24_224", 0, gain=2.2),
    family("beit_base_patch16_224"),
    family("beitv2_base_patch16_224"),
    family("eva02_tiny_patch14_224"),
]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_equals_brute_force(case: Family) -> None:
    check_family(case)


def test_convit() -> None:
    """Gated layers, whose attention mixes two softmaxes, then plain ones with a class token; its grids are squares."""
    options = {"img_size": 32, "embed_dim": 8, "depth": 3, "local_up_to_layer": 2}
    patches, all_tokens = grid(4, 4), grid(4, 4, prefix=1)
    case = Family(
        "convit",
        lambda: sharpen(timm.create_model("convit_tiny", patch_size=8, num_heads=3, num_classes=5, **options)),
        (32, 32),
        lambda layer, module: Layout(patches, patches),
    )
    model, pictures = case.build(), case.pictures()
    wholes = [whole for whole in attention_of(model, pictures) if not isinstance(whole.module, GPSA)]
    layouts = {whole.layer: Layout(all_tokens, all_tokens, class_query=True) for whole in wholes}
    assert [*layouts] == ["blocks.2.attn"]

    def gated(layer: GPSA, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weights = layer.get_attention(inputs[0]).detach()  # timm's own
        wholes.append(Whole(names[layer], layer, weights))
        layouts[names[layer]] = Layout(patches, patches)

    twin = copy.deepcopy(model).double()
    names = {module: name for name, module in twin.named_modules()}
    for module in names:
        if isinstance(module, GPSA):
            module.register_forward_hook(gated)
    twin(pictures.double())
    assert len(wholes) == 3
    for whole in wholes:
        check_sharp(case, layouts[whole.layer].weights(whole, case.images), whole.layer)
    for split in ([5], [1, 4], [2, 3]):
        ds, layers, _ = recorded(model, pictures.split(split))
        assert layers == ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
        expect(ds, wholes, layouts, case.images)


def test_what_is_captured_is_what_meets_the_values() -> None:
    """The oracle's attention is what timm gives to the dropout before the values, hooked as anyone would."""
    model, pictures = FAMILIES[0].build(), FAMILIES[0].pictures()
    twin, inputs = copy.deepcopy(model).double(), []
    for block in twin.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    twin(pictures.double())
    for whole, weights in zip(attention_of(model, pictures), inputs, strict=True):
        assert torch.equal(whole.weights, weights)
