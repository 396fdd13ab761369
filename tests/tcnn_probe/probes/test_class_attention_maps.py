"""Parts of the class token's row: its map,
itself and other tokens, equal to brute force in float64 up to 1e-5.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from tcnn_model import AttentionPool2d
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded

SIZE = (24, 40)  # 3 x 5 patches of 8 x 8
SMALL = {
    "img_size": SIZE,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 7,
}
# The images are in the first, second and third of the batches of 1, 3 and 1.
IMAGES = [0, 3, 4]

pytestmark = pytest.mark.numerical


@dataclass(frozen=True)
class Row:
    """Position of a class token among the queries and the keys,
    and the number of keys that lie on no grid.
    """

    prefix: int
    key: int | None
    query: int = 0
    distillation: int | None = None


@dataclass
class Case:
    name: str
    build: Callable[[], nn.Module]
    rows: dict[str, Row]
    grid: tuple[int, int] = (3, 5)
    size: tuple[int, int] = SIZE


def transformer(name: str, **options: object) -> nn.Module:
    return timm.create_model(name, **SMALL | options)


def with_latents(count: int, pool_type: str = "token") -> nn.Module:
    model = transformer("vit_base_patch16_siglip_224", depth=1)
    model.attn_pool = AttentionPoolLatent(24, num_heads=3, latent_len=count, pool_type=pool_type)
    return model


def unpadded() -> nn.Module:
    """Return a model with 5 x 14 patches for 23 x 41 pixels,
    whose grid only the input of its pool shows.
    """
    return nn.Sequential(nn.Conv2d(3, 12, 15, stride=2), AttentionPool2d(12, init_values=1.0))


BLOCKS = ("blocks.0.attn", "blocks.1.attn")
CASES = [
    Case(
        "vit",
        lambda: transformer("vit_tiny_patch16_224"),
        dict.fromkeys(BLOCKS, Row(1, 0)),
    ),
    Case(
        "registers",
        lambda: transformer("vit_small_patch14_reg4_dinov2"),
        dict.fromkeys(BLOCKS, Row(5, 0)),
    ),
    Case(
        "distilled",
        lambda: transformer("deit_tiny_distilled_patch16_224"),
        dict.fromkeys(BLOCKS, Row(2, 0, distillation=1)),
    ),
    Case(
        "cait",
        lambda: transformer("cait_xxs24_224"),
        {f"blocks_token_only.{i}.attn": Row(1, 0) for i in range(2)},
    ),
    Case("two latents", lambda: with_latents(2), {"attn_pool": Row(0, None)}),
    Case("latents, averaged", lambda: with_latents(2, "avg"), {}),
    Case(
        "latent and class token",
        lambda: transformer(
            "vit_base_patch16_siglip_224", class_token=True, pool_include_prefix=True
        ),
        {**dict.fromkeys(BLOCKS, Row(1, 0)), "attn_pool": Row(1, None)},
    ),
    Case("pool", unpadded, {"1.block.attn": Row(1, 0)}, (5, 14), (23, 41)),
]


def peaked(model: nn.Module) -> nn.Module:
    """Return the model with attention that float16 cannot represent to 1e-5."""
    return sharpen(model, gain=3.0)


def maps_of(model: nn.Module, pictures: Tensor) -> dict[str, xr.Dataset]:
    """Return the maps of each layer that has some."""
    tree = recorded(model, *pictures.split([1, 3, 1]), images=IMAGES).tree
    groups = [group.to_dataset().load() for group in tree["maps"].leaves]
    return {
        layer: group.isel(epoch=0).sel(layer=layer)
        for group in groups
        for layer in group.layer.values
    }


@pytest.mark.study(but=["cait", "distilled", "pool"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_brute_force(case: Case) -> None:
    torch.manual_seed(0)
    model = peaked(case.build())
    pictures = torch.randn(5, 3, *case.size)
    references = {
        reference.layer: reference.weights.numpy()[IMAGES]
        for reference in attention_of(model, pictures)
    }
    maps = maps_of(model, pictures)
    assert case.rows.keys() <= references.keys()
    largest = 0.0
    for layer, row in case.rows.items():
        check(
            maps[layer],
            "class",
            "",
            references[layer][:, :, row.query],
            row.prefix,
            row.key,
            case.grid,
        )
        largest = max(largest, references[layer][:, :, row.query].max())
        if row.distillation is not None:
            distillation = references[layer][:, :, row.distillation]
            check(
                maps[layer],
                "distillation",
                "distillation_",
                distillation,
                row.prefix,
                row.distillation,
                case.grid,
            )
    # A nearly uniform row would agree with a mean, or with another row.
    assert largest > 0.5 or not case.rows
    for layer in maps.keys() - case.rows.keys():
        assert all(
            maps[layer][name].isnull().all()
            for name in maps[layer]
            if "class_" in name or "token" in name
        )
    if not any(row.distillation for row in case.rows.values()):
        assert not any("distillation" in name for group in maps.values() for name in group)


def check(
    maps: xr.Dataset,
    token: str,
    prefix: str,
    row: np.ndarray,
    count: int,
    key: int | None,
    grid: tuple[int, int],
) -> None:
    """Check the three parts of a row (images, heads, N_key)."""
    parts = {
        "attention": maps[f"{token}_attention"],
        "token_attention": maps[f"{prefix}token_attention"],
    }
    assert parts["attention"].dims == ("image", "head", "y", "x")
    assert parts["attention"].dtype == parts["token_attention"].dtype == np.float32
    # Weights are at most 1; maps are in float32, the reference in float64.
    np.testing.assert_allclose(
        parts["attention"], row[..., count:].reshape(*row.shape[:2], *grid), atol=2e-5
    )
    prefix_tokens = [place for place in range(count) if place != key]
    np.testing.assert_allclose(parts["token_attention"], row[..., prefix_tokens].sum(-1), atol=1e-5)
    itself = maps.get(f"{prefix}self_attention", xr.full_like(parts["token_attention"], np.nan))
    expected = row[..., key] if key is not None else np.full(row.shape[:2], np.nan)
    np.testing.assert_allclose(itself, expected, atol=1e-5)
    total = parts["attention"].sum(("y", "x")) + itself.fillna(0) + parts["token_attention"]
    np.testing.assert_allclose(total, 1, atol=1e-6)


def test_statistics_of_the_distillation_token() -> None:
    torch.manual_seed(0)
    model = peaked(transformer("deit_tiny_distilled_patch16_224"))
    pictures = torch.randn(5, 3, *SIZE)
    rows = np.stack(
        [reference.weights.numpy()[:, :, 1] for reference in attention_of(model, pictures)]
    )
    ds = recorded(model, pictures).dataset.isel(epoch=0)
    np.testing.assert_allclose(
        ds.distillation_entropy, -(rows * np.log(rows)).sum(-1).mean(1), atol=1e-4
    )
    np.testing.assert_allclose(
        ds.distillation_prefix_attention, rows[..., :2].sum(-1).mean(1), atol=1e-5
    )


def test_a_users_distillation_token_is_recognised_and_a_latent_has_no_position() -> None:
    """There are two tokens before the grid;
    the model has ``dist_token``, so the second one is for distillation.
    """
    model = peaked(transformer("vit_tiny_patch16_224", reg_tokens=1))
    pictures = torch.randn(5, 3, *SIZE)
    assert "distillation_attention" not in maps_of(model, pictures)["blocks.0.attn"]
    model.dist_token = model.reg_token
    assert "distillation_attention" in maps_of(model, pictures)["blocks.0.attn"]
    recorder = recorded(peaked(with_latents(1)), pictures, images=1)
    assert "latents" in recorder.missing["self_attention"]["attn_pool"]
    assert not any(
        name.startswith("distillation") or "by_class" in name for name in recorder.missing
    )
