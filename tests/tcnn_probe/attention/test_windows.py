"""Attention in windows, shifted, haloed or dilated: what is recorded of each equals brute force in float64."""

import numpy as np
import pytest
import timm
import torch
from timm.layers.halo_attn import HaloAttn
from timm.models.gcvit import GlobalContextVit
from timm.models.nest import Nest
from timm.models.twins import Twins
from timm.models.vision_transformer_sam import VisionTransformerSAM
from timm.models.volo import VOLO
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, grid, pooled
from tests.tcnn_probe.attention.checking import Family, check_family
from tests.tcnn_probe.attention.sharpen import sharpen


def windows(
    model: str, size: tuple[int, int], height: int, width: int, *, gain: float = 1.7, **options: object
) -> Family:
    """One window shape in all layers."""
    tokens = grid(height, width)
    many = {"num_classes": 5, **options}
    return Family(
        model,
        lambda: sharpen(timm.create_model(model, **many), gain),
        size,
        lambda layer, module: Layout(tokens, tokens),
    )


SWIN = {
    "img_size": (32, 48),
    "patch_size": 4,
    "embed_dim": 8,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": (2, 3),
}
MAXVIT = {"img_size": (64, 96), "embed_dim": (32, 32), "depths": (1, 1)}


def samvit() -> Family:
    """5 x 7 patches in windows of 3 x 3, padded, and all of them in the last block."""
    options = {"img_size": (40, 56), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}

    def arrange(weights: Tensor, images: int) -> Tensor:
        return weights.unflatten(0, (images, -1, 3))  # (B * windows * heads, N, N) in the copy

    return Family(
        "samvit",
        lambda: sharpen(VisionTransformerSAM(**options, global_attn_indexes=(1,), window_size=3, use_rel_pos=True)),
        (40, 56),
        lambda layer, module: Layout(*[grid(3, 3) if layer == "blocks.0.attn" else grid(5, 7)] * 2, arrange=arrange),
    )


def twins() -> Family:
    """Windows of 7 x 7, and 28 x 42 or 14 x 21 queries whose keys are pooled, 7 x 7 in one."""

    def layout(layer: str, module: nn.Module) -> Layout:
        if layer.endswith("0.attn"):
            return Layout(grid(7, 7), grid(7, 7), arrange=lambda weights, images: weights)  # (B, windows, heads, N, N)
        return Layout(grid(28, 42), pooled(4, 6, 7)) if "blocks.0" in layer else Layout(grid(14, 21), pooled(2, 3, 7))

    small = {"embed_dims": (8, 8), "num_heads": (2, 4), "mlp_ratios": (1, 1), "depths": (2, 2), "sr_ratios": (7, 7)}
    return Family("twins", lambda: sharpen(Twins(wss=(7, 7), num_classes=5, **small)), (112, 168), layout)


class Halo(nn.Module):
    """Blocks of 4 x 4 pixels that look at 6 x 6, zeros beyond the image; strided, every second pixel asks."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.attend = HaloAttn(12, stride=stride, num_heads=3, dim_head=4, block_size=4, halo_size=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.stem(x))


def halo(stride: int) -> Family:
    def arrange(weights: Tensor, images: int) -> Tensor:
        return weights.unflatten(0, (images, 3)).transpose(1, 2)  # (B * heads, blocks, N, N) in the layer

    places = grid(4 // stride, 4 // stride, spacing=(stride, stride), origin=(1, 1))
    return Family(
        f"halo_stride{stride}",
        lambda: sharpen(Halo(stride)),
        (32, 48),
        lambda layer, module: Layout(places, grid(6, 6), arrange=arrange),
    )


def mobilevit() -> Family:
    """A pixel sees those at the same place of every patch of 2 x 2: 64 x 96 / 16 pixels, 2 x 3 patches, 4 such sets."""
    shapes = {"stages.2": (4, 6), "stages.3": (2, 3), "stages.4": (1, 2)}

    def layout(layer: str, module: nn.Module) -> Layout:
        return Layout(*[grid(*shapes[layer[:8]])] * 2)

    return Family(
        "mobilevit",
        lambda: sharpen(timm.create_model("mobilevit_xxs", num_classes=5), 2.5),
        (64, 96),
        layout,
        flattest=0.97,
    )


def gcvit() -> Family:
    """Windows of each stage; queries that are global, of the whole image, stand for the window's own."""
    small = {"embed_dim": 8, "depths": (2, 1, 1, 1), "num_heads": (2, 2, 4, 4), "window_ratio": (32, 32, 16, 32)}
    shapes = {"stages.2": (4, 6)}
    return Family(
        "gcvit",
        lambda: sharpen(GlobalContextVit(num_classes=5, img_size=(64, 96), **small), 2.2),
        (64, 96),
        lambda layer, module: Layout(*[grid(*shapes.get(layer[:8], (2, 3)))] * 2),
    )


def nest() -> Family:
    """Windows of 4 x 4, at last one of them: all of the image."""
    small = {"embed_dims": (8, 8, 8), "num_heads": (2, 2, 4), "depths": (1, 1, 1)}
    return Family(
        "nest",
        lambda: sharpen(Nest(img_size=64, num_classes=5, **small)),
        (64, 64),
        # (B, heads, windows, N, N) in the layer
        lambda layer, module: Layout(*[grid(4, 4)] * 2, arrange=lambda weights, images: weights.transpose(1, 2)),
    )


def volo() -> Family:
    """Each pixel of 4 x 6 says how its 3 x 3 neighbours attend to each other; then 2 x 3 patches, and a class token."""

    def layout(layer: str, module: nn.Module) -> Layout:
        if layer.startswith("network.0"):
            # (B, heads, windows, N, N) in the layer
            return Layout(*[grid(3, 3)] * 2, arrange=lambda weights, images: weights.transpose(1, 2))
        if layer.startswith("post"):
            return Layout(None, grid(2, 3, prefix=1), class_query=True)
        return Layout(*[grid(2, 3)] * 2)

    small = {"layers": (1, 1), "embed_dims": (16, 16), "num_heads": (2, 4), "downsamples": (True, False)}
    more = {
        "outlook_attention": (True, False),
        "mlp_ratio": 1.0,
        "stem_hidden_dim": 8,
        "img_size": (32, 48),
        "use_mix_token": False,
    }
    return Family("volo", lambda: sharpen(VOLO(num_classes=5, **small, **more), 2.2), (32, 48), layout, flattest=0.97)


def tnt() -> Family:
    """Patches as one sentence; the 4 x 4 pixels of each as words, of which nobody says how they lie."""
    small = {
        "img_size": (32, 48),
        "embed_dim": 24,
        "inner_dim": 8,
        "depth": 2,
        "num_heads_inner": 2,
        "num_heads_outer": 3,
    }

    def layout(layer: str, module: nn.Module) -> Layout:
        outer = grid(2, 3, prefix=1)
        return Layout(None, None) if layer.endswith("in") else Layout(outer, outer, class_query=True)

    return Family(
        "tnt", lambda: sharpen(timm.create_model("tnt_s_patch16_224", num_classes=5, **small)), (32, 48), layout
    )


FAMILIES = [
    windows("swin_tiny_patch4_window7_224", (32, 48), 2, 3, **SWIN),
    windows("swinv2_tiny_window8_256", (32, 48), 2, 3, **SWIN),
    windows("swinv2_cr_tiny_224", (32, 48), 2, 3, **SWIN),
    windows("maxvit_rmlp_pico_rw_256", (64, 96), 2, 3, **MAXVIT),
    windows("maxvit_tiny_tf_224", (64, 96), 2, 3, gain=2.2, **MAXVIT),
    samvit(),
    twins(),
    halo(1),
    halo(2),
    mobilevit(),
    gcvit(),
    nest(),
    volo(),
    tnt(),
]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_equals_brute_force(case: Family) -> None:
    check_family(case)


def test_shifted_windows_are_masked() -> None:
    """So the cases above did cover masks."""
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **SWIN)
    masks = [block.attn_mask for block in model.layers[0].blocks]
    assert masks[0] is None
    assert isinstance(masks[1], torch.Tensor)
    assert (masks[1] < -10).any()


def test_maps_of_windows() -> None:
    """Of each window of images 0 and 3: what its keys receive, and what its central query sees."""
    model, pictures = FAMILIES[0].build(), FAMILIES[0].pictures()
    wholes = {whole.layer: whole.weights.unflatten(0, (5, -1)).numpy() for whole in attention_of(model, pictures)}
    with tcnn_probe.record(model, images=[0, 3]) as recorder, torch.no_grad():
        for batch in pictures.split([2, 3]):
            model(batch)
        recorder.mark(epoch=0)
        groups = [child.to_dataset().isel(epoch=0).load() for child in recorder.tree["maps"].children.values()]
    seen = [layer for maps in groups for layer in maps.layer.values]
    assert sorted(seen) == sorted(wholes)
    for maps in groups:
        for layer in maps.layer.values:
            weights = wholes[layer][[0, 3]]  # (images, windows, heads, 6, 6) of 2 x 3 tokens
            got = maps.sel(layer=layer)
            expected = {"attention_received": weights.mean(-2), "center_attention": weights[..., 1 * 3 + 1, :]}
            for name, value in expected.items():
                assert got[name].dims == ("image", "window", "head", "y", "x")
                np.testing.assert_allclose(got[name], value.reshape(*value.shape[:-1], 2, 3), rtol=2e-3, atol=1e-5)
