"""Attention pooling against a slow rewrite from the paper,
in float64, and against timm's own block.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.cait import LayerScaleBlockClassAttn
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tcnn_model import AttentionPool2d
from tcnn_model.pooling.attention_pool import ClassScores
from tests.tcnn_model.numerics import assert_same, disturb, random

pytestmark = pytest.mark.numerical

D, H, W, B, K = 11, 3, 5, 2, 7


def disturbed(pool: nn.Module) -> Any:
    """Return the pool in float64 with disturbed parameters,
    as the initial LayerScales would hide the block.
    """
    return disturb(pool.double(), scale=0.5)


def _norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean()
    variance = (centred**2).mean()
    assert variance > 1e-4, "eps would matter"
    # timm's transformers and this block have an eps of 1e-6; LayerNorm's default is 1e-5.
    return centred / (variance + 1e-6).sqrt() * norm.weight + norm.bias


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return layer.weight @ x + layer.bias


def slow(pool: Any, features: Tensor, token: Tensor | None) -> Tensor:
    """Pool a map (d, H, W) into the features (d,) of a token:
    the paper's Fig. 3, one pixel at a time.

    Args:
        pool: Pool with the weights.
        features: Feature map.
        token: Token of a class, which is not among its keys; None for the single token, which is
            among them.
    """
    block = pool.block
    attention = pool.block.attn
    sources = [features[:, y, x] for y, x in np.ndindex(features.shape[1:])]
    if token is None:
        token = pool.cls_token[0, 0]
        sources = [token, *sources]

    # The token is the query of the attention, computed head by head.
    normed = [_norm(source, block.norm1) for source in sources]
    query = _linear(_norm(token, block.norm1), attention.q)
    width = len(token) // attention.num_heads
    gathered = torch.empty_like(token)
    for head in range(attention.num_heads):
        part = slice(head * width, (head + 1) * width)
        total = torch.zeros(())
        weighted = torch.zeros_like(token[part])
        for source in normed:
            key = _linear(source, attention.k)[part]
            value = _linear(source, attention.v)[part]
            weight = (query[part] @ key / width**0.5).exp()
            total = total + weight
            weighted = weighted + weight * value
        gathered[part] = weighted / total
    token = token + block.gamma_1 * _linear(gathered, attention.proj)

    # The MLP has an exact GELU.
    hidden = _linear(_norm(token, block.norm2), block.mlp.fc1)
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    token = token + block.gamma_2 * _linear(hidden, block.mlp.fc2)
    return _norm(token, pool.norm)


def slow_tokens(pool: AttentionPool2d, x: Tensor, tokens: Iterable[Tensor | None]) -> Tensor:
    """Pool each image (B, C, H, W) for each token separately: (B, tokens, C)."""
    by_token = []
    for token in tokens:
        pooled = [slow(pool, image, token) for image in x]
        by_token.append(torch.stack(pooled))
    return torch.stack(by_token, 1)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("classes", [None, K])
@torch.no_grad()
def test_pooling_equals_the_papers(classes: int | None, heads: int, fused: bool) -> None:
    x = random(B, 3 * D, H, W)
    pool = disturbed(AttentionPool2d(3 * D, classes, num_heads=heads))
    pool.block.attn.fused_attn = fused
    tokens = [None] if classes is None else list(pool.cls_token[0])
    result = pool(x).reshape(B, len(tokens), 3 * D)
    assert_same(result, slow_tokens(pool, x, tokens))
    if classes is None:
        pool.specialize(K)
        expected = slow_tokens(pool, x, pool.cls_token[0])
        assert_same(pool(x), expected)


def test_heads_that_do_not_divide_the_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="divides 11 channels, got num_heads=3"):
        AttentionPool2d(D, num_heads=3)


@torch.no_grad()
def test_block_equals_timms() -> None:
    pool = AttentionPool2d(D)
    x = random(B, D, H, W, dtype=torch.float32)
    norm = partial(nn.LayerNorm, eps=1e-6)
    block = LayerScaleBlockClassAttn(D, 1, mlp_ratio=3, qkv_bias=True, norm_layer=norm)
    # The initial LayerScales would hide the block.
    disturb(pool)
    names = {f"block.{name}" for name in block.state_dict()}
    assert set(pool.state_dict()) == names | {"cls_token", "norm.weight", "norm.bias"}
    block.load_state_dict(pool.block.state_dict())
    patches = x.flatten(2).transpose(1, 2)
    token = block(patches, pool.cls_token.expand(B, -1, -1))[:, 0]
    assert_same(pool(x), pool.norm(token))


@pytest.mark.parametrize("fused", [True, False])
def test_dropout_acts_in_training_only(fused: bool) -> None:
    # At a rate of 0.5, two equal draws are practically impossible.
    pool = disturbed(AttentionPool2d(D, K, attn_drop=0.5))
    x = random(B, D, H, W)
    pool.block.attn.fused_attn = fused
    assert not torch.equal(pool(x), pool(x))
    pool.eval()
    assert torch.equal(pool(x), pool(x))


@torch.no_grad()
def test_initial_values_equal_the_papers() -> None:
    # The pool is large enough for standard deviations to be informative.
    pool = AttentionPool2d(64, 50, init_values=1e-6)
    assert pool.per_class
    assert pool.block.gamma_1.unique().tolist() == pytest.approx([1e-6])
    assert pool.block.gamma_2.unique().tolist() == pytest.approx([1e-6])
    for weight in (pool.cls_token, pool.block.attn.q.weight, pool.block.mlp.fc1.weight):
        # With at least 3,200 random weights, the standard deviation has a relative error of at most
        # 1.3 %.
        assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    for name, parameter in pool.named_parameters():
        assert not (name.endswith("bias") and parameter.any()), name


@torch.no_grad()
def test_each_class_is_scored_by_its_own_token() -> None:
    linear = nn.Linear(D, K).double()
    tokens = random(B, K, D)
    scores = ClassScores.of(linear)
    # Each token gives the score of its own class.
    expected = torch.stack([linear(tokens[:, k])[:, k] for k in range(K)], 1)
    # Heads of timm flatten tokens into the batch, some of them as 1 x 1 maps.
    flat = tokens.flatten(0, 1)
    maps = flat[:, :, None, None]
    for form in (tokens, flat, maps):
        assert_same(scores(form), expected)
    assert scores.weight is linear.weight


@torch.no_grad()
def test_scores_of_a_convolutional_classifier() -> None:
    conv = nn.Conv2d(D, K, 1).double()
    tokens = random(B, K, D)
    # Part of it is frozen, as in fine-tuning, and must stay so.
    conv.weight.requires_grad_(False)
    scores = ClassScores.of(conv)
    maps = tokens[..., None, None]
    expected = torch.stack([conv(maps[:, k])[:, k, 0, 0] for k in range(K)], 1)
    assert_same(scores(tokens), expected)
    assert not scores.weight.requires_grad
    assert scores.bias.requires_grad
    unbiased = nn.Linear(D, K, bias=False).double()
    expected = (tokens * unbiased.weight).sum(-1)
    assert_same(ClassScores.of(unbiased)(tokens), expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Identity(),
        weight_norm(nn.Linear(3, 5)),
    ],
    ids=["3 x 3", "grouped", "none", "computed"],
)
def test_other_classifiers_are_refused(layer: nn.Module) -> None:
    with pytest.raises(
        ValueError,
        match="expected a classifier that is a Linear or a 1 x 1 convolution, got",
    ):
        ClassScores.of(layer)


def test_specialized_pool_shares_the_weights() -> None:
    pool = AttentionPool2d(D, attn_drop=0.3).eval()
    before = dict(pool.named_parameters())
    # These are not the defaults: settings of the old attention have to carry over.
    pool.block.attn.fused_attn = False
    pool.cls_token.requires_grad_(False)
    pool.specialize(K)
    after = dict(pool.named_parameters())
    assert all(after[name] is before[name] for name in before if name != "cls_token")
    assert torch.equal(after["cls_token"], before["cls_token"].expand(1, K, D))
    assert not after["cls_token"].requires_grad
    assert pool.num_classes == K
    assert pool.block.attn.tokens == K
    assert not pool.block.attn.fused_attn
    assert pool.block.attn.attn_drop.p == 0.3
    assert not any(module.training for module in pool.modules())


def test_bad_arguments_are_refused() -> None:
    for arguments in ((0,), (5, 0), (-1, 3)):
        with pytest.raises(ValueError, match="expected at least one channel and one class, got"):
            AttentionPool2d(*arguments)
    single = AttentionPool2d(D)
    per_class = AttentionPool2d(D, K)
    with pytest.raises(ValueError, match="a single token serves any number of classes"):
        single.reset_tokens(3)
    with pytest.raises(ValueError, match=f"a token for each of {K} classes already"):
        per_class.specialize(3)
    for call in (single.specialize, per_class.reset_tokens):
        with pytest.raises(ValueError, match="expected at least one class, got 0"):
            call(0)
    assert per_class(torch.zeros(1, D, H, W)).shape == (1, K, D)
