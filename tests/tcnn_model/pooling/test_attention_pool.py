"""Attention-based aggregation against a slow rewrite from the paper, in float64, and against timm's own block."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from timm.models.cait import LayerScaleBlockClassAttn
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tcnn_model import AttentionPool2d
from tcnn_model.pooling.attention_pool import ClassScores, PatchAttention
from tests.tcnn_model.numerics import assert_same, disturb, random, relative_error

pytestmark = pytest.mark.numerical

D, H, W, B, K = 11, 3, 5, 2, 7


def disturbed(pool: nn.Module) -> Any:
    """Return the pool in float64, with no parameter zero, one or tiny: fresh LayerScales would hide the block."""
    return disturb(pool.double(), scale=0.5)


def _norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    deviation = ((x - x.mean()) ** 2).mean().sqrt()
    assert deviation > 1e-2, "eps would matter"
    # timm's transformers, and so this block, have an eps of 1e-6; LayerNorm's default is 1e-5.
    return (x - x.mean()) / ((deviation**2 + 1e-6) ** 0.5) * norm.weight + norm.bias


def slow(pool: Any, features: Tensor, token: Tensor | None) -> Tensor:
    """Pool a map (d, H, W) into the features (d,) of a token: the paper's Fig. 3, a pixel at a time.

    Args:
        pool: Pool with the weights.
        features: Feature map.
        token: Token of a class, which is not among the keys; None for the single token, which is.
    """
    block, attention = pool.block, pool.block.attn
    single = token is None
    token = pool.cls_token[0, 0] if token is None else token
    pixels = [
        features[:, y, x]
        for y in range(features.shape[1])
        for x in range(features.shape[2])
    ]
    keys = [token, *pixels] if single else pixels
    normed = [_norm(key, block.norm1) for key in keys]
    query = attention.q.weight @ _norm(token, block.norm1) + attention.q.bias
    width = len(token) // attention.num_heads
    gathered = torch.empty_like(token)
    for head in range(attention.num_heads):
        part = slice(head * width, (head + 1) * width)
        total = torch.zeros(())
        weighted = torch.zeros_like(token[part])
        for source in normed:
            key = attention.k.weight @ source + attention.k.bias
            value = attention.v.weight @ source + attention.v.bias
            weight = (query[part] @ key[part] / width**0.5).exp()
            total = total + weight
            weighted = weighted + weight * value[part]
        gathered[part] = weighted / total
    projected = attention.proj.weight @ gathered + attention.proj.bias
    token = token + block.gamma_1 * projected
    hidden = block.mlp.fc1.weight @ _norm(token, block.norm2) + block.mlp.fc1.bias
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    token = token + block.gamma_2 * (block.mlp.fc2.weight @ hidden + block.mlp.fc2.bias)
    return _norm(token, pool.norm)


def slow_tokens(
    pool: AttentionPool2d, x: Tensor, tokens: Iterable[Tensor | None]
) -> Tensor:
    """Pool each image (B, C, H, W) for each token by itself: (B, tokens, C)."""
    rows = [torch.stack([slow(pool, image, token) for image in x]) for token in tokens]
    return torch.stack(rows, 1)


@torch.no_grad()
def test_pooling_is_the_papers() -> None:
    x = random(B, D, H, W)
    single = disturbed(AttentionPool2d(D))
    assert_same(single(x), torch.stack([slow(single, image, None) for image in x]))
    per_class = disturbed(AttentionPool2d(D, K))
    assert_same(per_class(x), slow_tokens(per_class, x, per_class.cls_token[0]))


@pytest.mark.parametrize("classes", [None, K])
@torch.no_grad()
def test_pooling_with_several_heads(classes: int | None) -> None:
    x = random(B, 3 * D, H, W)
    pool = disturbed(AttentionPool2d(3 * D, classes, num_heads=3))
    assert pool.num_heads == 3
    tokens = [None] if classes is None else list(pool.cls_token[0])
    result = pool(x).reshape(B, len(tokens), 3 * D)
    assert_same(result, slow_tokens(pool, x, tokens))
    if classes is None:
        pool.specialize(K)
        assert pool.num_heads == 3
        assert pool(x).shape == (B, K, 3 * D)


def test_heads_that_do_not_divide_the_channels() -> None:
    with pytest.raises(ValueError, match="divides 11 channels, got num_heads=3"):
        AttentionPool2d(D, num_heads=3)


@torch.no_grad()
def test_block_is_that_of_timm() -> None:
    pool = AttentionPool2d(D)
    x = random(B, D, H, W, dtype=torch.float32)
    norm = partial(nn.LayerNorm, eps=1e-6)
    block = LayerScaleBlockClassAttn(D, 1, mlp_ratio=3, qkv_bias=True, norm_layer=norm)
    # Fresh LayerScales would hide the block.
    disturb(pool)
    assert set(pool.state_dict()) == {"cls_token", "norm.weight", "norm.bias"} | {
        f"block.{name}" for name in block.state_dict()
    }
    block.load_state_dict(pool.block.state_dict())
    tokens = block(x.flatten(2).transpose(1, 2), pool.cls_token.expand(B, -1, -1))[:, 0]
    assert_same(pool(x), pool.norm(tokens))


def test_fused_is_unfused() -> None:
    pool = disturbed(AttentionPool2d(D, K))
    x = random(B, D, H, W).requires_grad_()
    results = []
    for fused in (True, False):
        pool.block.attn.fused_attn = fused
        y = pool(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *pool.parameters()])
        results.append([y, *gradients])
    for fused, unfused in zip(*results, strict=True):
        # Gradients are near 1, but one is zero.
        torch.testing.assert_close(fused, unfused, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_dropout_is_of_training_only(fused: bool) -> None:
    # At a rate of 0.5 two draws of the same weights are as good as impossible.
    pool = disturbed(AttentionPool2d(D, K, attn_drop=0.5))
    x = random(B, D, H, W)
    pool.block.attn.fused_attn = fused
    assert not torch.equal(pool(x), pool(x))
    pool.eval()
    assert torch.equal(pool(x), pool(x))


@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_multiple_heads(fused: bool) -> None:
    # Two tokens before five patches; 12 channels are three heads of four.
    attention = PatchAttention(12, 3, tokens=2).double()
    x = random(B, 2 + 5, 12)
    attention.fused_attn = fused
    parts = []
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (
            x @ m.weight[rows].T + m.bias[rows]
            for m in (attention.q, attention.k, attention.v)
        )
        # The tokens ask and the patches answer; 2 is the root of four channels.
        logits = q[:, :2] @ k[:, 2:].transpose(1, 2) / 2
        parts.append(logits.softmax(-1) @ v[:, 2:])
    assert_same(attention(x), attention.proj(torch.cat(parts, -1)))


@torch.no_grad()
def test_initial_values_are_the_papers() -> None:
    # Sizes for which a standard deviation says something.
    pool = AttentionPool2d(64, 50, init_values=1e-6)
    assert pool.per_class
    assert pool.block.gamma_1.unique().tolist() == pytest.approx([1e-6])
    assert pool.block.gamma_2.unique().tolist() == pytest.approx([1e-6])
    for weight in (pool.cls_token, pool.block.attn.q.weight, pool.block.mlp.fc1.weight):
        # 3,200 random weights at least: their standard deviation scatters by 1.3 % of itself.
        assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    assert not any(
        bool(p.any()) for name, p in pool.named_parameters() if name.endswith("bias")
    )


@torch.no_grad()
def test_scores_are_of_their_own_tokens() -> None:
    linear = nn.Linear(D, K).double()
    tokens = random(B, K, D)
    scores = ClassScores.of(linear)
    expected = torch.stack([linear(tokens[:, k])[:, k] for k in range(K)], 1)
    # Heads of timm flatten tokens into the batch, some as 1 x 1 maps.
    for form in (tokens, tokens.flatten(0, 1), tokens.flatten(0, 1)[:, :, None, None]):
        assert_same(scores(form), expected)
    assert scores.weight is linear.weight


@torch.no_grad()
def test_scores_of_other_classifiers() -> None:
    conv = nn.Conv2d(D, K, 1).double()
    tokens = random(B, K, D)
    # Frozen in part, as for fine-tuning: the new form must keep it.
    conv.weight.requires_grad_(False)
    scores = ClassScores.of(conv)
    expected = torch.stack(
        [conv(tokens[:, k, :, None, None])[:, k, 0, 0] for k in range(K)], 1
    )
    assert_same(scores(tokens), expected)
    assert not scores.weight.requires_grad
    assert scores.bias.requires_grad
    unbiased = nn.Linear(D, K, bias=False).double()
    assert_same(ClassScores.of(unbiased)(tokens), (tokens * unbiased.weight).sum(-1))


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
def test_no_scores_of_other_layers(layer: nn.Module) -> None:
    with pytest.raises(
        ValueError,
        match="expected a classifier that is a Linear or a 1 x 1 convolution, got",
    ):
        ClassScores.of(layer)


@torch.no_grad()
def test_change_of_the_output_when_specialized() -> None:
    """The token is no longer among its keys: the output of attention moves away from its value, by w0 / (1 - w0)."""
    pool = disturbed(AttentionPool2d(D))
    x = random(B, D, H, W)
    block, attention = pool.block, pool.block.attn
    token = pool.cls_token.expand(B, -1, -1)
    u = block.norm1(torch.cat([token, x.flatten(2).transpose(1, 2)], 1))
    logits = attention.q(u[:, :1]) @ attention.k(u).transpose(1, 2) / D**0.5
    weights = logits.softmax(-1)
    share = weights[..., :1]
    values = attention.v(u)
    assert share.min() > 1e-3, "the token should matter"
    gathered = weights @ values
    moved = gathered + (gathered - values[:, :1]) * share / (1 - share)
    expected = token + block.gamma_1 * attention.proj(moved)
    expected = pool.norm(expected + block.gamma_2 * block.mlp(block.norm2(expected)))
    single = pool(x)
    pool.specialize(K)
    assert_same(pool(x), expected.expand(-1, K, -1))
    assert relative_error(pool(x)[:, 0], single) > 1e-3


def test_specialized_pool_shares_the_weights() -> None:
    pool = AttentionPool2d(D, attn_drop=0.3).eval()
    before = dict(pool.named_parameters())
    # Not the defaults: settings of the old attention have to carry over.
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


def test_errors() -> None:
    for arguments in ((0,), (5, 0), (-1, 3)):
        with pytest.raises(
            ValueError, match="expected at least one channel and one class, got"
        ):
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
