"""PatchConvNet's weights under the names of the original implementation:
they load and give the same function.
"""

from collections.abc import Iterator
from itertools import pairwise
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
    """Yield names and shapes of a small original (facebookresearch/deit),
    with one token or a token per class.
    """
    # The stem has the published proportions.
    widths = (3, D // 8, D // 4, D // 2, D)
    yield "cls_token", (1, classes or 1, D)
    for i, (width, next_width) in enumerate(pairwise(widths)):
        yield f"patch_embed.proj.{2 * i}.0.weight", (next_width, width, 3, 3)
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
    if classes:
        # Each class has a row of scores for its own token.
        layers |= {f"head.{k}": (1, D) for k in range(classes)}
    else:
        layers["head"] = (K, D)
    for name, shape in layers.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]


def _published(classes: int | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        # The weights are large, so that no LayerScale makes its block negligible.
        name: 0.4 * torch.randn(shape, generator=generator)
        for name, shape in _published_shapes(classes)
    }


def _original(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute the original's function with its weights: images (B, 3, H, W) to scores (B, K)."""

    def linear(name: str, y: Tensor) -> Tensor:
        return F.linear(y, w[f"{name}.weight"].flatten(1), w[f"{name}.bias"])

    def norm(name: str, y: Tensor) -> Tensor:
        return F.layer_norm(y, (D,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    # The stem has four convolutions, each of which halves the image, with GELU between them.
    for i in range(4):
        if i:
            x = F.gelu(x)
        weight = w[f"patch_embed.proj.{2 * i}.0.weight"]
        x = F.conv2d(x, weight, stride=2, padding=1)
    grid = x.shape[2:]
    x = x.flatten(2).transpose(1, 2)

    # The trunk works on tokens (B, N, D).
    for i in range(DEPTH):
        p = f"blocks.{i}.attn.qkv_pos"
        y = norm(f"blocks.{i}.norm1", x)
        y = F.gelu(linear(f"{p}.0", y))
        # This depthwise convolution covers 3 x 3 patches.
        image = y.transpose(1, 2).unflatten(2, grid)
        weight, bias = w[f"{p}.2.weight"], w[f"{p}.2.bias"]
        image = F.conv2d(image, weight, bias, padding=1, groups=D)
        y = F.gelu(image.flatten(2).transpose(1, 2))
        # Squeeze-and-excitation.
        squeezed = linear(f"{p}.4.conv_reduce", y.mean(1)).relu()
        excitation = linear(f"{p}.4.conv_expand", squeezed).sigmoid()
        y = y * excitation[:, None]
        x = x + w[f"blocks.{i}.gamma_1"] * linear(f"{p}.5", y)

    # Attention-based aggregation by one token or several.
    p = "blocks_token_only.0"
    tokens = w["cls_token"].expand(len(x), -1, -1)
    # A single token is among its own keys, but tokens of classes are not.
    single = tokens.shape[1] == 1
    sources = torch.cat([tokens, x], 1) if single else x
    sources = norm(f"{p}.norm1", sources)
    query = linear(f"{p}.attn.q", norm(f"{p}.norm1", tokens))
    key = linear(f"{p}.attn.k", sources)
    value = linear(f"{p}.attn.v", sources)
    logits = query @ key.transpose(1, 2) / D**0.5
    gathered = logits.softmax(-1) @ value
    tokens = tokens + w[f"{p}.gamma_1"] * linear(f"{p}.attn.proj", gathered)

    # The MLP and the classifier.
    hidden = linear(f"{p}.mlp.fc1", norm(f"{p}.norm2", tokens))
    tokens = tokens + w[f"{p}.gamma_2"] * linear(f"{p}.mlp.fc2", F.gelu(hidden))
    tokens = norm("norm", tokens)
    if single:
        return linear("head", tokens[:, 0])
    by_class = enumerate(tokens.unbind(1))
    return torch.cat([linear(f"head.{k}", token) for k, token in by_class], 1)


def _load(kind: str, weights: dict[str, Tensor], path: Path, **options: Any) -> Any:
    file = path / "weights.pth"
    torch.save({"model": weights}, file)
    overlay = {"file": str(file), "num_classes": K}
    options = SMALL | options
    model = timm.create_model(kind, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    return model.eval()


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
def test_a_published_single_token_initialises_a_token_per_class(tmp_path: Path) -> None:
    weights = _published(None)
    x = torch.randn(2, 3, 48, 80)
    single = _load(KINDS[0], weights, tmp_path)
    per_class = _load(KINDS[1], weights, tmp_path)
    assert torch.equal(per_class(x), specialize(single)(x))


@pytest.mark.parametrize("classes", [None, K])
@torch.no_grad()
def test_published_weights_for_other_classes(classes: int | None, tmp_path: Path) -> None:
    weights = _published(classes)
    # The trunk must load although the classifier does not fit.
    model = _load(KINDS[1], weights, tmp_path, num_classes=3)
    assert model(torch.randn(2, 3, 48, 80)).shape == (2, 3)
    published = weights["blocks.1.attn.qkv_pos.0.weight"]
    assert torch.equal(model.blocks[1].conv1.weight, published)
    if classes is None:
        token = weights["cls_token"]
        assert torch.equal(model.pool.cls_token, token.expand(1, 3, D))


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


# The model's own names must not be taken for the original's.
def test_own_weights_load_unchanged(tmp_path: Path) -> None:
    state = timm.create_model(KINDS[1], **SMALL).state_dict()
    loaded = _load(KINDS[1], state, tmp_path)
    assert isinstance(loaded, PatchConvNet)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name])
