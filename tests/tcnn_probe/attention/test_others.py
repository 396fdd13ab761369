"""The other families of timm that attend: what is recorded of each equals brute force in float64."""

import pytest
import timm
from torch import Tensor, nn

from tests.tcnn_probe.attention.bruteforce import Layout, Place, grid
from tests.tcnn_probe.attention.checking import Family, check_family
from tests.tcnn_probe.attention.sharpen import sharpen

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3}


def one_head(weights: Tensor, images: int) -> Tensor:
    return weights.unsqueeze(1)[:, None]


def heads_first(weights: Tensor, images: int) -> Tensor:
    """(B, heads, windows, N, N), or without windows."""
    return weights.transpose(1, 2) if weights.ndim == 5 else weights[:, None]


def _class(tokens: list[Place]) -> Layout:
    return Layout(tokens, tokens, class_query=tokens[0] is None)


REGISTERS = grid(3, 5, prefix=4)

# model, options, size, then by the beginning of the layer's name where its tokens lie; those that are listed
CASES = {
    "deepseek": ("deepseek_vit_412m", SMALL, (56, 84), {"": _class(grid(4, 6))}, {}),
    "gemma4": (
        "gemma4_vit_167m_enc",
        {"embed_dim": 48, "num_heads": 3, "depth": 1},
        (96, 144),
        {"": _class(grid(6, 9))},
        {},
    ),
    "qwen3": ("qwen3_vit_88m", {"depth": 1}, (64, 96), {"": _class(grid(4, 6))}, {}),
    "naflexvit": ("naflexvit_base_patch16_gap", SMALL, (48, 80), {"": Layout(*[grid(3, 5, prefix=4)] * 2)}, {}),
    "fastvit": ("fastvit_sa12", {}, (64, 96), {"": _class(grid(2, 3))}, {}),
    "lowformer": ("lowformer_b0", {}, (128, 192), {"": _class(grid(4, 6))}, {}),
    "cpubone": ("cpubone_nano", {}, (128, 192), {"": _class(grid(4, 6))}, {}),
    "csatv2": (
        "csatv2",
        {},
        (128, 192),
        {"stages.2": _class(grid(4, 6)), "stages.3": _class(grid(2, 3))},
        {
            f"stages.{stage}.{block}.attn": "between the images"
            for stage, blocks in enumerate((range(2), range(1, 3), range(1, 7), range(1, 5)))
            for block in blocks
        },
    ),
    "iformer": (
        "iformer_t",
        {},
        (128, 192),
        {
            "stages.2": Layout(grid(8, 12), grid(8, 12), arrange=one_head),
            "stages.3": Layout(grid(4, 6), grid(4, 6), arrange=one_head),
        },
        {},
    ),
    "hiera": (  # its tokens are in the order of its units
        "hiera_tiny_224",
        {"stages": (1, 1, 1, 1), "embed_dim": 16},
        (224, 224),
        {"": Layout(None, None, arrange=heads_first)},
        {},
    ),
    "sam2": (
        "sam2_hiera_tiny",
        {"embed_dim": 16, "stages": (1, 1, 1, 1)},
        (128, 192),
        {"blocks.0": _class(grid(8, 8)), "": Layout(None, None)},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_brute_force(case: str) -> None:
    name, options, size, layouts, listed = CASES[case]

    def layout(layer: str, module: nn.Module) -> Layout:
        return next(one for begins, one in layouts.items() if layer.startswith(begins))

    def build() -> nn.Module:
        model = timm.create_model(name, num_classes=5, **options)
        # FastViT has no norm before its attention: with random weights everywhere its features are huge.
        return sharpen(model, 30, only=True) if case == "fastvit" else sharpen(model, 2)

    check_family(Family(case, build, size, layout, listed, flattest=0.97, images=4))
