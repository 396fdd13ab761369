"""Statistics of softmax attention from plain tensors,
against float64 brute force, for blocks of any size.

The rounding of float32 is bounded term by term. The error of logit j of a row is at most a few eps
* size_j, where size_j is the sum of |scale q_d k_d| over d. The relative error of A_j is that, plus
its mean over the row; the error of a sum over A_j is the same sum of absolute values. The factor is
4, which exceeds the errors of dot products of 11 terms, exponentials and sums together.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from tcnn_probe.attention import softmax_statistics
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.logits import GivenLogits, Logits, ProductLogits
from tcnn_probe.attention.sampled_queries import QUERIES
from tcnn_probe.attention.softmax import SoftmaxAttention
from tests.tcnn_model.numerics import LargestTensor

pytestmark = pytest.mark.numerical

HEADS, WIDTH, GRID = 3, 11, (5, 7)
EPS = torch.finfo(torch.float32).eps

# Values and bounds on their rounding, each (B, heads).
Bounded = dict[str, tuple[Tensor, Tensor]]


def brute_force(logits: Tensor, size: Tensor, prefix: int) -> Bounded:
    """Compute means over queries from logits (B, heads, N, N) in float64, pixel by pixel."""
    places = [(y, x) for y in range(GRID[0]) for x in range(GRID[1])]
    far = torch.tensor(
        [[math.dist(query, key) for key in places] for query in places],
        dtype=torch.float64,
    )

    def mean(weights: Tensor, terms: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        # A weight has the error of its own logit, and that of the row's mean through the
        # normaliser.
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
    key[:, :, :prefix] *= 3  # class tokens attract attention
    # Logits are integers up to +-1000, which are exact: attention goes to one key, or equally to a
    # few.
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
    # The patches get exp(-300) of the attention; its distribution among them is exact all the same.
    if form == "swallowed":
        mask = torch.zeros(count, count)
        mask[:, 0] = 300
        logits = logits + mask
    if form == "hidden":
        mask = torch.rand(count, count) > 0.3
        # One query sees no key, and another no patch.
        mask[4], mask[prefix + 3, prefix:] = (False, False)
        logits = logits.masked_fill(~mask, -torch.inf)
    # Many models hide keys by the lowest number of the dtype; a row with all keys lowered is
    # uniform.
    if form == "lowered":
        mask = torch.zeros(count, count).masked_fill(torch.rand(count, count) > 0.7, lowest)
        mask[4] = lowest
        mask[prefix + 3, prefix:] = lowest
        mask[prefix + 3, :prefix] = 0
        logits = logits + mask
    source = (
        ProductLogits(query, key, scale, mask) if form != "given" else GivenLogits(logits.float())
    )
    call = attention_of(source, tokens, windows)
    exact = torch.zeros_like(size) if form == "huge" else size
    return call, brute_force(logits.float().double() if form == "given" else logits, exact, prefix)


def check(call: SoftmaxAttention, expected: Bounded) -> softmax_statistics.SoftmaxMeasurements:
    measured = softmax_statistics.measure_softmax(call)
    got = measured.means
    assert got.keys() == expected.keys()
    for name, (value, bound) in expected.items():
        value, bound = (x.unflatten(0, (call.images, call.windows)) for x in (value, bound))
        if name == "max_logit":
            value = value.amax(1)
            bound = bound.amax(1)
        else:
            value = value.mean(1)
            bound = bound.mean(1)
        assert got[name].shape == value.shape
        assert ((got[name] - value).abs() <= bound).all(), (
            name,
            got[name] - value,
            bound,
        )
    return measured


# Blocks have one element, a prime number that cuts rows, or all elements.
@pytest.mark.parametrize(("block", "table"), [(1, 0), (211, 1 << 20), (1 << 18, 0)])
@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize(
    "form", ["plain", "given", "added", "hidden", "lowered", "huge", "swallowed"]
)
def test_statistics_equal_brute_force(
    form: str, prefix: int, block: int, table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "BLOCK", block)
    monkeypatch.setattr(softmax_statistics, "_SMALL_TABLE", table)
    check(*case(form, prefix))


def test_windows_are_averaged_within_an_image() -> None:
    check(*case("plain", 0, windows=3))


def test_received_attention() -> None:
    """A key of image 1 receives the mean over queries; a query that sees no key attends to none."""
    call, _ = case("hidden", 1)
    attention = torch.softmax(call.logits(slice(None), slice(None)).double(), -1).nan_to_num(0)
    received = call.received([1])  # sums of 36 terms, each with an error of eps
    torch.testing.assert_close(
        received.double(), attention[1:, None].mean(-2), rtol=36 * EPS, atol=0
    )


def test_no_n_by_n_tensor_is_made() -> None:
    tokens = Tokens(1, 47, 61)
    query = torch.randn(1, 2, tokens.count, 3)
    key = torch.randn(1, 2, tokens.count, 3)
    call = attention_of(ProductLogits(query, key, 1.0, None), tokens, images=1)
    with LargestTensor() as largest:
        softmax_statistics.measure_softmax(call)
    assert tokens.count**2 > 8 * 10**6
    # The largest tensor is a block, or a sum over images.
    assert largest.elements <= max(Attention.BLOCK, 2 * QUERIES * tokens.count)


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 64), ("meta", 1)])
def test_blocks_are_larger_on_devices_with_kernel_launches(device: str, blocks: int) -> None:
    query = torch.empty(64, HEADS, 257, WIDTH, device=device)
    call = attention_of(ProductLogits(query, query, 1.0, None), None, images=64)
    assert len(list(call.blocks())) == blocks
