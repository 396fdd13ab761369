"""Class attention as saliency equals brute force in float64, for any model."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.attribution.models import (
    CONVOLVED,
    SIZE,
    bilinear,
    nearest,
    patchconvnet,
    transformer,
)


def expected(
    model: nn.Module, images: Tensor, layer: str, prefix: int, query: list[int]
) -> np.ndarray:
    """Compute rows of the queries by brute force,
    as means over heads, for patches only: (B, 3, 5).
    """
    weights = next(
        reference.weights for reference in attention_of(model, images) if reference.layer == layer
    ).numpy()
    rows = np.stack([weights[image, :, at, prefix:] for image, at in enumerate(query)])
    return rows.mean(1).reshape(len(images), 3, 5)


pytestmark = pytest.mark.numerical
CAIT, DEIT = "cait_xxs24_224", "deit_tiny_patch16_224"
DISTILLED, SIGLIP = "deit_tiny_distilled_patch16_224", "vit_base_patch16_siglip_224"
CASES = {
    "cait": (lambda: transformer(CAIT), SIZE, "blocks_token_only.0.attn", 1, None),
    "cait, second block": (
        lambda: transformer(CAIT),
        SIZE,
        "blocks_token_only.1.attn",
        1,
        "blocks_token_only.1.attn",
    ),
    "deit, distilled": (lambda: transformer(DISTILLED), SIZE, "blocks.1.attn", 2, None),
    "latent pool": (lambda: transformer(SIGLIP), SIZE, "attn_pool", 0, None),
    "patchconvnet": (patchconvnet, CONVOLVED, "pool.block.attn", 1, None),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_brute_force(case: str) -> None:
    make, size, name, prefix, layer = CASES[case]
    model = make()
    images = torch.randn(2, 3, *size)
    attention = model.get_submodule(name)
    assert getattr(attention, "fused_attn", True)  # timm's default
    maps = tcnn_probe.saliency(model, images, layer=layer)
    by_hand = expected(model, images, name, prefix, [0, 0])
    # This is a hundred times the tolerance: any map would agree with a uniform one.
    assert by_hand.std() > 0.01
    # The stem has 3 x 3 convolutions, or patches of 8 x 8.
    first = 0 if case == "patchconvnet" else 3.5
    # Weights are at most 1; maps are in float32, the reference in float64.
    np.testing.assert_allclose(maps.values, bilinear(by_hand, *size, first), atol=1e-5)
    assert maps.attrs["layer"] == name
    by_patch = tcnn_probe.saliency(model, images, layer=attention, interpolation="nearest")
    np.testing.assert_allclose(by_patch.values, nearest(by_hand, *size, first), atol=1e-5)


def test_map_of_the_targets_own_token() -> None:
    """There are fifteen classes, so that there are as many tokens as patches."""
    model = patchconvnet("_multi", 15, gain=3)
    images = torch.randn(3, 3, *CONVOLVED)
    maps = tcnn_probe.saliency(model, images, [6, 1, 4])
    by_hand = expected(model, images, "pool.block.attn", 0, [6, 1, 4])
    np.testing.assert_allclose(maps.values, bilinear(by_hand, *CONVOLVED, first=0), atol=1e-5)
    # These tokens belong to the classes before.
    of_wrong_targets = expected(model, images, "pool.block.attn", 0, [5, 0, 3])
    assert abs(by_hand - of_wrong_targets).max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = transformer(DEIT)
    images = torch.randn(2, 3, *SIZE)
    by_hand = bilinear(expected(model, images, "blocks.1.attn", 1, [0, 0]), *SIZE)
    maps = tcnn_probe.saliency(model.to(dtype), images)
    assert maps.dtype == ("float64" if dtype == torch.float64 else "float32")
    # bfloat16 has 8 significant bits in logits and in weights, which are at most 1.
    np.testing.assert_allclose(maps.values, by_hand, atol=1e-10 if dtype == torch.float64 else 0.05)


@pytest.mark.parametrize(
    ("model", "layer", "message"),
    [
        (
            lambda: transformer(DEIT, class_token=False, global_pool="avg"),
            None,
            r"class attention \(it has no class token\); 'gradcam'",
        ),
        (
            lambda: transformer(CAIT),
            "blocks.0.attn",
            r"one of \['blocks_token_only.0.attn', .*got 'blocks.0.attn'",
        ),
        (lambda: transformer(DEIT), nn.ReLU(), "no layer this ReLU"),
    ],
)
def test_models_and_layers_without_class_attention_are_refused(
    model: Any, layer: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.saliency(model(), torch.randn(2, 3, *SIZE), layer=layer)


class Crops(nn.Module):
    """Model that runs on images and mirrored copies of them in one batch, and scores the images."""

    def __init__(self) -> None:
        super().__init__()
        self.model = patchconvnet()

    def forward(self, x: Tensor) -> Tensor:
        # Test-time augmentation works like this.
        return self.model(torch.cat([x, x.flip(-1)]))[: len(x)]


def test_layers_that_run_on_other_images_are_refused() -> None:
    with pytest.raises(ValueError, match="turns each image into several"):
        tcnn_probe.saliency(Crops().eval(), torch.randn(2, 3, *CONVOLVED))


class Ring(nn.Module):
    """Model with a class token and tokens that lie on no grid."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.flatten(1)[:, :102].unflatten(1, (17, 6))
        token = self.token.expand(len(x), -1, -1)
        return self.attention(token, patches, patches, need_weights=False)[0][:, 0]


def test_patches_without_a_grid_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no layer has a map of class attention \(.*grid"):
        tcnn_probe.saliency(Ring(), torch.randn(2, 3, 6, 14))
