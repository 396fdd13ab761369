"""Attention asked for in ways that users' own modules have: broadcast latents, merged heads, no batch, masks."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention import statistics
from tcnn_probe.attention.call import AttentionCall, ProductLogits
from tcnn_probe.attention.layout import Layout

HEADS, DIM = 3, 5


class Own(nn.Module):
    """Says how many heads it has under a name of its own, and hands on what it is given."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor], name: str = "") -> None:
        super().__init__()
        self.attend = attend
        if name:
            setattr(self, name, HEADS)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.attend(query, key)


class Patches(nn.Module):
    """One head whose queries and keys are the patches."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.stem, self.mask = nn.Conv2d(3, DIM, 4, 4), mask

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).mT[:, None]
        return F.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=self.mask)


def fused(query: Tensor, key: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, key)


def merged(query: Tensor, key: Tensor) -> Tensor:
    """Rows and heads in one dimension."""
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    return torch.bmm(torch.softmax(query @ key.mT * DIM**-0.5, -1), key)


def entropy(query: Tensor, key: Tensor) -> Tensor:
    """(rows, heads), in float64."""
    weights = torch.softmax(query.double() @ key.double().mT * DIM**-0.5, -1)
    return -(weights * weights.log()).sum(-1).mean(-1)


def recorded(module: nn.Module, query: Tensor, key: Tensor) -> Tensor:
    with tcnn_probe.record(module.eval()) as recorder, torch.no_grad():
        module(query, key)
        recorder.mark(epoch=0)
    return torch.as_tensor(recorder.dataset.entropy.values[0, 0])


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)], ids=["queries", "keys"])
def test_that_broadcast_over_the_batch(rows: tuple[int, int]) -> None:
    query, key = (torch.randn(n, HEADS, tokens, DIM) for n, tokens in zip(rows, (7, 11), strict=True))
    torch.testing.assert_close(recorded(Own(fused), query, key), entropy(query, key).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["", "num_heads"])
def test_one_head_without_a_batch(name: str) -> None:
    query, key = torch.randn(7, DIM), torch.randn(11, DIM)
    torch.testing.assert_close(recorded(Own(fused, name), query, key), entropy(query, key)[None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["num_heads", "n_heads", "nhead", "heads", "n_head", "num_attention_heads"])
def test_heads_merged_with_the_batch(name: str) -> None:
    query, key = torch.randn(2, HEADS, 7, DIM), torch.randn(2, HEADS, 11, DIM)
    torch.testing.assert_close(
        recorded(Own(merged, name), query, key), entropy(query, key).mean(0), rtol=1e-5, atol=1e-6
    )


def test_a_query_that_sees_no_key_looks_at_nothing() -> None:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    model = Patches(mask).eval()
    with tcnn_probe.record(model, images=1) as recorder, torch.no_grad():
        model(torch.randn(1, 3, 8, 12))
        recorder.mark(epoch=0)
    maps = recorder.tree["maps/1x2x3"].dataset.isel(epoch=0, layer=0, image=0, head=0)
    assert float(maps.attention_received.sum()) == pytest.approx(5 / 6, abs=2e-3)


def test_distances_of_many_tokens_are_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Patches().eval(), torch.randn(2, 3, 4 * 11, 4 * 13)
    found, sizes = [], []
    distances = statistics.Layout.distances
    monkeypatch.setattr(statistics.Layout, "distances", lambda *args: sizes.append(len(d := distances(*args))) or d)
    monkeypatch.setattr(statistics.AttentionCall, "BLOCK", 11 * 13 * 7)
    for most in (1 << 20, 1 << 10):
        monkeypatch.setattr(statistics, "_SMALL_TABLE", most)
        statistics._table.cache_clear()
        with tcnn_probe.record(model) as recorder, torch.no_grad():
            model(x)
            recorder.mark(epoch=0)
        found.append(float(recorder.dataset.attention_distance.squeeze()))
    assert found[0] == found[1] > 0
    assert sizes == [143] + 2 * ([7] * 20 + [3])


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 64), ("meta", 1)])
def test_blocks_are_larger_where_each_is_a_launch(device: str, blocks: int) -> None:
    query = torch.empty(64, HEADS, 257, DIM, device=device)
    logits = ProductLogits(query, query, 1.0, None)
    call = AttentionCall(nn.Identity(), 64, 1, logits, Layout(None, None))
    assert len(list(call.blocks())) == blocks
