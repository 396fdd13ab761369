"""PatchConvNet's weights under the names of the original implementation, and the function they give."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from tcnn_model import specialize
from tcnn_model.models.patchconvnet import PatchConvNet
from tests.tcnn_model.models.test_patchconvnet import DEPTH, KINDS, SMALL, D, K
from tests.tcnn_model.numerics import assert_same, random


def _published_shapes(classes: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the original implementation (facebookresearch/deit), small; with a token per class."""
    # The stem's widths, as published.
    widths = (3, D // 8, D // 4, D // 2, D)
    yield "cls_token", (1, classes or 1, D)
    for i in range(4):
        yield f"patch_embed.proj.{2 * i}.0.weight", (widths[i + 1], widths[i], 3, 3)
    for i in range(DEPTH):
        qkv_pos = f"blocks.{i}.attn.qkv_pos"
        layers = {
            f"blocks.{i}.norm1": (D,),
            f"{qkv_pos}.0": (D, D, 1, 1),
            f"{qkv_pos}.2": (D, 1, 3, 3),
            f"{qkv_pos}.4.conv_reduce": (D // 4, D, 1, 1),
            f"{qkv_pos}.4.conv_expand": (D, D // 4, 1, 1),
            f"{qkv_pos}.5": (D, D, 1, 1),
        }
        yield f"blocks.{i}.gamma_1", (D,)
        for name, shape in layers.items():
            yield f"{name}.weight", shape
            yield f"{name}.bias", shape[:1]
    token = "blocks_token_only.0"
    yield f"{token}.gamma_1", (D,)
    yield f"{token}.gamma_2", (D,)
    layers = {f"{token}.norm1": (D,), f"{token}.norm2": (D,), "norm": (D,)}
    layers |= {f"{token}.attn.{part}": (D, D) for part in ("q", "k", "v", "proj")}
    layers |= {f"{token}.mlp.fc1": (3 * D, D), f"{token}.mlp.fc2": (D, 3 * D)}
    layers |= (
        {f"head.{k}": (1, D) for k in range(classes)} if classes else {"head": (K, D)}
    )
    for name, shape in layers.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]


def _published(classes: int | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        # Large enough that no LayerScale hides its block.
        name: 0.4 * torch.randn(shape, generator=generator)
        for name, shape in _published_shapes(classes)
    }


def _original(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute the function of the original with its weights: images (B, 3, H, W) to scores (B, K)."""

    def linear(name: str, y: Tensor) -> Tensor:
        return F.linear(y, w[f"{name}.weight"].flatten(1), w[f"{name}.bias"])

    def norm(name: str, y: Tensor) -> Tensor:
        return F.layer_norm(y, (D,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    for i in range(4):
        x = F.conv2d(
            F.gelu(x) if i else x,
            w[f"patch_embed.proj.{2 * i}.0.weight"],
            stride=2,
            padding=1,
        )
    grid = x.shape[2:]
    x = x.flatten(2).transpose(1, 2)
    for i in range(DEPTH):
        p = f"blocks.{i}.attn.qkv_pos"
        y = F.gelu(linear(f"{p}.0", norm(f"blocks.{i}.norm1", x)))
        image = y.transpose(1, 2).unflatten(2, grid)
        image = F.conv2d(
            image, w[f"{p}.2.weight"], w[f"{p}.2.bias"], padding=1, groups=D
        )
        y = F.gelu(image.flatten(2).transpose(1, 2))
        squeezed = linear(f"{p}.4.conv_reduce", y.mean(1)).relu()
        y = y * linear(f"{p}.4.conv_expand", squeezed).sigmoid()[:, None]
        x = x + w[f"blocks.{i}.gamma_1"] * linear(f"{p}.5", y)
    p = "blocks_token_only.0"
    tokens = w["cls_token"].expand(len(x), -1, -1)
    # A single token is among its keys; tokens of classes are not.
    single = tokens.shape[1] == 1
    query = linear(f"{p}.attn.q", norm(f"{p}.norm1", tokens))
    keys = norm(f"{p}.norm1", torch.cat([tokens, x], 1) if single else x)
    logits = query @ linear(f"{p}.attn.k", keys).transpose(1, 2) / D**0.5
    gathered = logits.softmax(-1) @ linear(f"{p}.attn.v", keys)
    tokens = tokens + w[f"{p}.gamma_1"] * linear(f"{p}.attn.proj", gathered)
    hidden = F.gelu(linear(f"{p}.mlp.fc1", norm(f"{p}.norm2", tokens)))
    tokens = tokens + w[f"{p}.gamma_2"] * linear(f"{p}.mlp.fc2", hidden)
    tokens = norm("norm", tokens)
    if single:
        return linear("head", tokens[:, 0])
    return torch.cat(
        [linear(f"head.{k}", tokens[:, k]) for k in range(tokens.shape[1])], 1
    )


def _load(kind: str, weights: dict[str, Tensor], path: Path, **options: Any) -> Any:
    torch.save({"model": weights}, path / "weights.pth")
    overlay = {"file": str(path / "weights.pth"), "num_classes": K}
    return timm.create_model(
        kind, pretrained=True, pretrained_cfg_overlay=overlay, **SMALL | options
    ).eval()


@pytest.mark.parametrize(("kind", "classes"), [(KINDS[0], None), (KINDS[1], K)])
@torch.no_grad()
def test_published_weights_give_the_published_function(
    kind: str, classes: int | None, tmp_path: Path
) -> None:
    weights = _published(classes)
    x = random(2, 3, 48, 80, dtype=torch.float32)
    model = _load(kind, weights, tmp_path)
    assert_same(model(x), _original(weights, x))


@torch.no_grad()
def test_a_published_single_token_starts_a_token_a_class(tmp_path: Path) -> None:
    weights = _published(None)
    x = torch.randn(2, 3, 48, 80)
    model = _load(KINDS[1], weights, tmp_path)
    assert torch.equal(model(x), specialize(_load(KINDS[0], weights, tmp_path))(x))


@pytest.mark.parametrize("classes", [None, K])
@torch.no_grad()
def test_published_weights_for_other_classes(
    classes: int | None, tmp_path: Path
) -> None:
    weights = _published(classes)
    # The trunk is worth loading though the classifier does not fit.
    model = _load(KINDS[1], weights, tmp_path, num_classes=3)
    assert model(torch.randn(2, 3, 48, 80)).shape == (2, 3)
    assert torch.equal(
        model.blocks[1].conv1.weight, weights["blocks.1.attn.qkv_pos.0.weight"]
    )
    if classes is None:
        assert torch.equal(model.pool.cls_token, weights["cls_token"].expand(1, 3, D))


@torch.no_grad()
def test_published_weights_without_a_classifier(tmp_path: Path) -> None:
    weights = _published(None)
    x = torch.randn(2, 3, 48, 80)
    model = _load(KINDS[0], weights, tmp_path)
    features = model.forward_features(x)
    headless = _load(KINDS[0], weights, tmp_path, num_classes=0)
    assert torch.equal(headless(x), model.forward_head(features, pre_logits=True))
    trunk = _load(KINDS[0], weights, tmp_path, num_classes=0, global_pool="")
    assert torch.equal(trunk(x), features)
    extractor = _load(KINDS[0], weights, tmp_path, features_only=True)
    assert torch.equal(extractor(x)[0], features)


# Names that are ours must not be taken for the original's.
def test_own_weights_load_as_they_are(tmp_path: Path) -> None:
    model = timm.create_model(KINDS[1], **SMALL)
    loaded = _load(KINDS[1], model.state_dict(), tmp_path)
    assert isinstance(loaded, PatchConvNet)
    assert all(
        torch.equal(value, model.state_dict()[name])
        for name, value in loaded.state_dict().items()
    )
