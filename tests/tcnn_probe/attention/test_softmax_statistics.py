"""Statistics of softmax attention from plain tensors, against float64 brute force, whatever the size of the blocks.

Rounding by float32 is bounded term by term. Logit j of a row is off by no more than a few eps * size_j, with size_j the
sum of |scale q_d k_d| over d; so A_j, relatively, by that and its mean over the row; and a sum over A_j by the same sum
of absolute values. The factor is 4: dot products of 11 terms, exponentials and sums add up to less.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from tcnn_probe.attention import softmax_statistics
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.patterns import QUERIES
from tcnn_probe.attention.softmax import (
    GivenLogits,
    Logits,
    ProductLogits,
    SoftmaxAttention,
)
from tests.tcnn_model.numerics import LargestTensor

pytestmark = pytest.mark.numerical

HEADS, WIDTH, GRID = 3, 11, (5, 7)
EPS = torch.finfo(torch.float32).eps

# Values and bounds on their rounding, (B, heads) each.
Bounded = dict[str, tuple[Tensor, Tensor]]


def brute_force(logits: Tensor, size: Tensor, prefix: int) -> Bounded:
    """(B, heads, N, N) logits in float64 -> means over queries, pixel by pixel."""
    places = [(y, x) for y in range(GRID[0]) for x in range(GRID[1])]
    far = torch.tensor(
        [[math.dist(query, key) for key in places] for query in places],
        dtype=torch.float64,
    )

    def mean(weights: Tensor, terms: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        # A weight is rounded by its own logit, and by the mean over the row, which normalises it.
        moved = 1 + size + (weights * size).sum(-1, keepdim=True)
        products = weights * terms
        rounding = (products * moved).sum(-1).mean(-1)
        return products.sum(-1).mean(-1), 4 * EPS * (rounding + 1)

    attention = torch.softmax(logits, -1).nan_to_num(0)
    grid = torch.softmax(logits[..., prefix:, prefix:], -1).nan_to_num(0)
    means = {
        "entropy": mean(attention, -attention.clamp_min(1e-300).log(), size),
        "attention_distance": mean(grid, far, size[..., prefix:, prefix:]),
        "max_logit": (logits.amax((-2, -1)), 4 * EPS * size.amax((-2, -1))),
    }
    if prefix:
        on_prefix = (torch.arange(attention.shape[-1]) < prefix).double()
        means["prefix_attention"] = mean(
            attention[..., prefix:, :], on_prefix, size[..., prefix:, :]
        )
    return means


def attention_of(
    logits: Logits, tokens: Tokens | None, windows: int = 1, images: int = 2
) -> SoftmaxAttention:
    layout = Layout(tokens, tokens)
    return SoftmaxAttention(
        module=nn.Identity(),
        images=images,
        windows=windows,
        logits=logits,
        layout=layout,
    )


def case(form: str, prefix: int, windows: int = 1) -> tuple[SoftmaxAttention, Bounded]:
    torch.manual_seed(prefix)
    tokens = Tokens(prefix, *GRID)
    count = tokens.count
    lowest = torch.finfo(torch.float32).min
    scale, mask = 2.0, None
    query, key = (torch.randn(2 * windows, HEADS, count, WIDTH) for _ in range(2))
    key[:, :, :prefix] *= 3  # class tokens that draw attention
    # Whole numbers up to +-1000, exact: attention is one key, or shared evenly by a few.
    if form == "huge":
        query = query[..., :1].round().clamp(-2, 2)
        key = key[..., :1].round().clamp(-2, 2)
        scale = 250.0
    logits = scale * query.double() @ key.double().mT
    size = scale * query.double().abs() @ key.double().abs().mT
    if form == "added":
        mask = torch.randn(HEADS, count, count)
        logits = logits + mask
        size = size + mask.abs()
    # The patches have exp(-300) of it; where a query looks among them is exact all the same.
    if form == "swallowed":
        mask = torch.zeros(count, count)
        mask[:, 0] = 300
        logits = logits + mask
    if form == "hidden":
        mask = torch.rand(count, count) > 0.3
        # A query that sees nothing, and one that sees no patch.
        mask[4], mask[prefix + 3, prefix:] = (False, False)
        logits = logits.masked_fill(~mask, -torch.inf)
    # Lowered by the least number there is, as many models hide keys: rows all lowered are uniform.
    if form == "lowered":
        mask = torch.zeros(count, count).masked_fill(
            torch.rand(count, count) > 0.7, lowest
        )
        mask[4] = lowest
        mask[prefix + 3, prefix:] = lowest
        mask[prefix + 3, :prefix] = 0
        logits = logits + mask
    source = (
        ProductLogits(query, key, scale, mask)
        if form != "given"
        else GivenLogits(logits.float())
    )
    call = attention_of(source, tokens, windows)
    exact = torch.zeros_like(size) if form == "huge" else size
    return call, brute_force(
        logits.float().double() if form == "given" else logits, exact, prefix
    )


def check(call: SoftmaxAttention, expected: Bounded) -> None:
    got = softmax_statistics.measure_softmax(call).means
    assert got.keys() == expected.keys()
    for name, (value, bound) in expected.items():
        value, bound = (
            x.unflatten(0, (call.images, call.windows)) for x in (value, bound)
        )
        if name == "max_logit":
            value, bound = value.amax(1), bound.amax(1)
        else:
            value, bound = value.mean(1), bound.mean(1)
        assert got[name].shape == value.shape
        assert ((got[name] - value).abs() <= bound).all(), (
            name,
            got[name] - value,
            bound,
        )


# Blocks of one element, of a prime that cuts rows, and of everything.
@pytest.mark.parametrize(("block", "table"), [(1, 0), (211, 1 << 20), (1 << 18, 0)])
@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize(
    "form", ["plain", "given", "added", "hidden", "lowered", "huge", "swallowed"]
)
def test_equals_brute_force(
    form: str, prefix: int, block: int, table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "BLOCK", block)
    monkeypatch.setattr(softmax_statistics, "_SMALL_TABLE", table)
    check(*case(form, prefix))


def test_windows_are_averaged_within_their_image() -> None:
    check(*case("plain", 0, windows=3))


def test_received_attention() -> None:
    """Attention that the keys of image 1 receive; a query that sees nothing looks at nothing."""
    call, _ = case("hidden", 1)
    attention = torch.softmax(
        call.logits(slice(None), slice(None)).double(), -1
    ).nan_to_num(0)
    received = call.received([1])  # of 36 terms, each to an eps
    torch.testing.assert_close(
        received.double(), attention[1:, None].mean(-2), rtol=36 * EPS, atol=0
    )


def test_no_n_by_n_tensor() -> None:
    tokens = Tokens(1, 47, 61)
    query = torch.randn(1, 2, tokens.count, 3)
    key = torch.randn(1, 2, tokens.count, 3)
    call = attention_of(ProductLogits(query, key, 1.0, None), tokens, images=1)
    with LargestTensor() as largest:
        softmax_statistics.measure_softmax(call)
    assert tokens.count**2 > 8 * 10**6
    # A block, or sums over images.
    assert largest.elements <= max(Attention.BLOCK, 2 * QUERIES * tokens.count)


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 13), ("meta", 1)])
def test_blocks_are_larger_where_each_is_a_launch(device: str, blocks: int) -> None:
    query = torch.empty(64, HEADS, 257, WIDTH, device=device)
    call = attention_of(ProductLogits(query, query, 1.0, None), None, images=64)
    assert len(list(call.blocks())) == blocks
