"""flex_attention: logits that are changed and masked
by functions are rebuilt in blocks, and equal loops.
"""

import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tcnn_probe
from tcnn_probe.attention.attention import Attention
from tests.tcnn_probe.attention.bruteforce import ReferenceAttention, grid
from tests.tcnn_probe.attention.checking import expect, recorded, same
from tests.tcnn_probe.attention.sharpen import sharpen

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile"),
    # torch.compile raises this warning when it compiles flex_attention.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HEADS, SIZE = 6, 5
COUNTS = {"prefix": 2, "height": 3, "width": 5}
TOKENS = 2 + 3 * 5
IMAGES = 2
Score = float | Tensor
Scalars = tuple[Any, Any, Any, Any]  # image, head, query, key


def tables() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    bias = torch.randn(IMAGES, 1, TOKENS, TOKENS, generator=generator)
    slopes = torch.rand(HEADS, generator=generator)
    return {"bias": bias.double(), "slopes": slopes.double()}


def biased(score: Score, b: Any, h: Any, i: Any, j: Any, *, table: Any) -> Any:
    """Add a mask as transformers does, and a slope by head."""
    # The mask has a single head that stands for all heads.
    bias = table["bias"][b][0][i][j]
    slope = table["slopes"][h]
    return score + bias - slope * (i - j)


def capped(score: Score, b: Any, h: Any, i: Any, j: Any, *, table: Any) -> Any:
    tanh = torch.tanh if isinstance(score, Tensor) else math.tanh
    soft = 2.5 * tanh(score / 2.5)
    return soft * (1 + table["slopes"][h])


def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Hide other keys in each image and head, but never the first two."""
    return ((3 * i + j + b + h) % 7 != 0) | (j < 2)


def blind(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Hide all keys from one query of the first image."""
    return (b > 0) | (i != 11)


class Flex(nn.Module):
    """Grouped-query attention by flex_attention, with 6 heads and ``groups`` keys and values."""

    num_heads = HEADS

    def __init__(self, score_mod: Any, mask_mod: Any, groups: int, compiled: bool) -> None:
        super().__init__()
        self.groups = groups
        self.query = nn.Linear(13, HEADS * SIZE)
        self.key = nn.Linear(13, groups * SIZE)
        self.value = nn.Linear(13, groups * SIZE)
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self.attend: Any = flex_attention
        if compiled:
            self.attend = torch.compile(flex_attention, backend="eager")

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def by_head(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, SIZE)).transpose(1, 2)

        return by_head(self.query(x)), by_head(self.key(x)), by_head(self.value(x))

    def forward(self, x: Tensor) -> Tensor:
        mask, score_mod = None, None
        if self.mask_mod is not None:
            sizes = (len(x), HEADS, x.shape[1], x.shape[1])
            mask = create_block_mask(self.mask_mod, *sizes, device="cpu")
        if self.score_mod is not None:
            table = {name: tensor.to(x.dtype) for name, tensor in tables().items()}

            def score_mod(score: Tensor, *place: Tensor) -> Tensor:
                return self.score_mod(score, *place, table=table)

        heads = self.attend(
            *self.split(x),
            score_mod=score_mod,
            block_mask=mask,
            scale=0.4,
            enable_gqa=self.groups < HEADS,
        )
        return heads.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two tokens of the model's own before or behind the patches of 24 x 40 pixels."""

    def __init__(self, *options: Any, behind: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 13, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 13))
        self.register = nn.Parameter(torch.zeros(1, 1, 13))
        self.attn = Flex(*options)
        self.behind = behind

    def tokens(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)
        cls_token = self.cls_token.expand(len(images), 1, -1)
        register = self.register.expand(len(images), 1, -1)
        if self.behind:
            return torch.cat([patches, register, cls_token], 1)
        return torch.cat([cls_token, register, patches], 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.attn(self.tokens(images))


def by_loops(model: Model, images: Tensor) -> ReferenceAttention:
    """Compute logits entry by entry, from queries and keys in float64."""
    attn = model.attn
    query, key, _ = attn.split(model.tokens(images))
    table = tables()
    # Logits that the mask hides stay at minus infinity.
    logits = torch.full((len(images), HEADS, TOKENS, TOKENS), -torch.inf).double()
    heads_per_key = HEADS // attn.groups
    for place in np.ndindex(logits.shape):
        b, h, i, j = place
        shared = h // heads_per_key
        score = 0.4 * float(query[b, h, i] @ key[b, shared, j])
        if attn.score_mod is not None:
            score = float(attn.score_mod(score, *place, table=table))
        if attn.mask_mod is None or attn.mask_mod(*place):
            logits[b, h, i, j] = score
    weights = torch.softmax(logits, -1).nan_to_num(0)
    return ReferenceAttention("attn", attn, weights, logits)


def make(*options: Any, **place: Any) -> tuple[Model, Tensor]:
    generator = torch.Generator().manual_seed(3)
    model = sharpen(Model(*options, **place), 2.3)
    return model, torch.randn(IMAGES, 3, 24, 40, generator=generator)


CASES: Mapping[str, tuple[Any, ...]] = {
    "bias, compiled": (biased, None, HEADS, True),
    "softcap, groups": (capped, None, 2, False),
    "all at once": (biased, visible, 3, False),
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_equal_loops(case: str) -> None:
    model, images = make(*CASES[case])
    with torch.no_grad():
        alone = model(images)
        with tcnn_probe.record(model) as recorder:
            torch.testing.assert_close(model(images), alone, rtol=0, atol=0)
            recorder.mark(epoch=0)
        model, images = model.double(), images.double()
        reference = by_loops(model, images)
        # Blocks hold a few queries, so that their indices may begin anywhere.
        with mock.patch.object(Attention, "BLOCK", 700):
            ds, layers, unsupported = recorded(model, [images])
    assert layers == ("attn",)
    assert not unsupported
    layout = same(grid(**COUNTS))
    expect(ds, [reference], {"attn": layout}, IMAGES)


def weights_and_loops(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    calls = []

    def look(attention: Attention) -> None:
        calls.append(attention.weights())
        assert attention.layout.prefix == COUNTS["prefix"]

    with torch.no_grad():
        with tcnn_probe.attention_stream(model, look):
            model(images)
        return calls[0][:, 0], by_loops(model, images).weights


def test_indices_follow_tokens_that_are_moved_before_the_grid() -> None:
    model, images = make(biased, visible, 3, False, behind=True)
    weights, expected = weights_and_loops(model.double(), images.double())
    # The recorder moves tokens behind the grid before it, the last one first.
    order = [TOKENS - 1, TOKENS - 2, *range(TOKENS - 2)]
    in_order = expected[..., order, :][..., order]
    torch.testing.assert_close(weights, in_order, rtol=0, atol=1e-12)


def test_a_query_that_sees_no_key_has_no_attention() -> None:
    model, images = make(biased, blind, HEADS, False)
    weights, expected = weights_and_loops(model.double(), images.double())
    assert not weights[0, :, 11].any()
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def test_heads_are_ablated() -> None:
    model, images = make(biased, visible, 3, False)
    model, images = model.double(), images.double()
    with torch.no_grad():
        alone = model(images)
        expected = alone.clone().unflatten(-1, (HEADS, SIZE))
        expected[..., [1, 4], :] = 0
        with tcnn_probe.ablate(model, {"attn": [1, 4]}):
            ablated = model(images)
        torch.testing.assert_close(ablated, expected.flatten(2), rtol=0, atol=0)

        # These images differ from those on which the model runs.
        references = images.roll(5, -1)
        weights = by_loops(model, references).weights.mean(0)
        # Six heads share three keys and values, and head 4 has the last of them.
        _, _, values = model.attn.split(model.tokens(images))
        expected = weights[4] @ values[:, 2]
        with tcnn_probe.ablate(model, {"attn": [4]}, mode="static", images=references):
            static = model(images).unflatten(-1, (HEADS, SIZE))
        torch.testing.assert_close(static[..., 4, :], expected, rtol=0, atol=1e-12)
        # All other heads are unchanged.
        static[..., 4, :] = alone.unflatten(-1, (HEADS, SIZE))[..., 4, :]
        torch.testing.assert_close(static.flatten(2), alone, rtol=0, atol=0)


def test_grid_of_shuffled_tokens_is_dropped() -> None:
    class Shuffled(Model):
        def tokens(self, images: Tensor) -> Tensor:
            # The patches are in reverse order, behind the model's two own tokens.
            order = [0, 1, *range(TOKENS - 1, 1, -1)]
            return super().tokens(images)[:, torch.tensor(order)]

    model = sharpen(Shuffled(None, None, HEADS, False))
    with torch.no_grad(), tcnn_probe.attention_stream(model, check_reason) as stream:
        model(torch.randn(2, 3, 24, 40))
    assert [*stream.layers] == ["attn"]


def check_reason(attention: Attention) -> None:
    assert attention.layout.keys is None
    assert "not in the order" in attention.layout.reason


class Renormalized(Flex):
    """Attention with a sink's logit per head that is applied to the output,
    as in transformers and torchtitan.
    """

    def __init__(self, compiled: bool, is_static: bool) -> None:
        super().__init__(None, None, HEADS, compiled)
        self.sinks = nn.Parameter(torch.linspace(-1, 3, HEADS))
        self.is_static = is_static

    def forward(self, x: Tensor) -> Tensor:
        heads, lse = self.attend(*self.split(x), return_lse=True)
        if self.is_static:
            share = torch.sigmoid(self.sinks)[:, None, None]
        else:
            share = torch.sigmoid(lse - self.sinks[:, None])[..., None]
        heads = heads.transpose(1, 2)
        share = share.transpose(-2, -3)
        return (heads * share).flatten(2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_a_sink_that_is_applied_to_the_output_is_refused_with_the_reason(
    compiled: bool,
) -> None:
    for is_static in (True, False):
        model = sharpen(Model(None, None, HEADS, False))
        model.attn = sharpen(Renormalized(compiled, is_static))
        model.eval()
        images = torch.randn(2, 3, 24, 40)
        with torch.no_grad():
            alone = model(images)
            with tcnn_probe.attention_stream(model, lambda attention: None) as stream:
                torch.testing.assert_close(model(images), alone, rtol=0, atol=0)
        # A constant scale per head is not a part of the softmax.
        assert list(stream.layers) == (["attn"] if is_static else [])
        assert ("a sink" in stream.unsupported.get("attn", "")) != is_static
