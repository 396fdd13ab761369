"""Statistics of softmax attention from plain tensors, against float64 brute force, whatever the size of the blocks."""

import pytest
import torch
from torch import Tensor, nn

from tcnn_probe.attention import statistics
from tcnn_probe.attention.call import AttentionCall, GivenLogits, ProductLogits
from tcnn_probe.attention.layout import Layout, Tokens
from tests.tcnn_model.helpers import LargestTensor

HEADS, WIDTH = 3, 11


def brute_force(logits: Tensor, prefix: int, height: int, width: int) -> dict[str, Tensor]:
    """(B, heads, N, N) logits in float64 -> means over queries, pixel by pixel."""
    attention = torch.softmax(logits, -1).nan_to_num(0)
    places = [(y, x) for y in range(height) for x in range(width)]
    far = torch.tensor([[((y - b) ** 2 + (x - a) ** 2) ** 0.5 for b, a in places] for y, x in places])
    grid = torch.softmax(logits[..., prefix:, prefix:], -1).nan_to_num(0)
    found = {
        "entropy": -torch.where(attention > 0, attention * attention.clamp_min(1e-300).log(), 0).sum(-1).mean(-1),
        "attention_distance": (grid * far.double()).sum(-1).mean(-1),
    }
    return found | (
        {"prefix_attention": attention[..., prefix:, :prefix].sum((-1, -2)) / len(places)} if prefix else {}
    )


def case(form: str, prefix: int, *, scale: float = 2.0) -> tuple[AttentionCall, dict[str, Tensor]]:
    torch.manual_seed(prefix)
    count = prefix + 5 * 7
    query, key = torch.randn(2, HEADS, count, WIDTH), torch.randn(2, HEADS, count, WIDTH)
    key[:, :, :prefix] *= 3  # class tokens that draw attention
    logits = query.double() @ key.double().transpose(2, 3) * scale
    mask = None
    if form == "added":
        mask = torch.randn(HEADS, count, count)
        logits = logits + mask
    if form == "hidden":
        mask = torch.rand(count, count) > 0.3
        mask[4], mask[prefix + 3, prefix:] = False, False  # a query that sees nothing, one that sees no patch
        logits = logits.masked_fill(~mask, -torch.inf)
    if form == "lowered":  # by the least number there is, as many models hide keys: rows all lowered are uniform
        mask = torch.zeros(count, count).masked_fill(torch.rand(count, count) > 0.7, torch.finfo(torch.float32).min)
        mask[4], mask[prefix + 3, prefix:] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
        mask[prefix + 3, :prefix] = 0
        logits = logits + mask
    source = ProductLogits(query, key, scale, mask) if form != "given" else GivenLogits(logits.float())
    tokens = Tokens(prefix, 5, 7)
    call = AttentionCall(nn.Identity(), 2, 1, source, Layout(tokens, tokens))
    return call, brute_force(logits.float().double() if form == "given" else logits, prefix, 5, 7)


@pytest.mark.parametrize("table", [0, 1 << 20], ids=["distances by block", "kept distances"])
@pytest.mark.parametrize("block", [1, 211, 1 << 18])
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("form", ["plain", "given", "added", "hidden", "lowered"])
def test_equals_brute_force(form: str, prefix: int, block: int, table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionCall, "BLOCK", block)
    monkeypatch.setattr(statistics, "_SMALL_TABLE", table)
    call, expected = case(form, prefix)
    got = statistics.attention_statistics(call)
    assert set(got) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name].double(), value, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_distance_over_patches_where_the_class_token_takes_nearly_everything() -> None:
    call, expected = case("plain", 1, scale=60.0)
    assert expected["prefix_attention"].max() > 0.3
    got = statistics.attention_statistics(call)["attention_distance"]
    torch.testing.assert_close(got.double(), expected["attention_distance"], rtol=1e-4, atol=1e-4)


def test_windows_are_averaged_within_their_image() -> None:
    torch.manual_seed(0)
    query, key, tokens = torch.randn(6, HEADS, 35, WIDTH), torch.randn(6, HEADS, 35, WIDTH), Tokens(0, 5, 7)
    call = AttentionCall(nn.Identity(), 2, 3, ProductLogits(query, key, 1.0, None), Layout(tokens, tokens))
    alone = brute_force(query.double() @ key.double().transpose(2, 3), 0, 5, 7)
    for name, value in statistics.attention_statistics(call).items():
        assert value.shape == (2, HEADS)
        torch.testing.assert_close(value.double(), alone[name].unflatten(0, (2, 3)).mean(1), rtol=1e-5, atol=1e-5)


def test_received_attention() -> None:
    call, _ = case("plain", 1)
    attention = call.weights(slice(None))
    torch.testing.assert_close(statistics.attention_received(call, [1]), attention[1:].mean(-2))


def test_no_n_by_n_tensor() -> None:
    tokens = Tokens(1, 47, 61)
    query, key = torch.randn(1, 2, tokens.count, 3), torch.randn(1, 2, tokens.count, 3)
    call = AttentionCall(nn.Identity(), 1, 1, ProductLogits(query, key, 1.0, None), Layout(tokens, tokens))
    with LargestTensor() as largest:
        statistics.attention_statistics(call)
    assert tokens.count**2 > 8 * 10**6
    assert largest.elements <= AttentionCall.BLOCK
