"""Both ways in which attention is applied give the same, whatever the sizes that choose between them."""

import pytest
import torch

from tcnn_model import GPSA, attention


@pytest.mark.parametrize("limit", [0, 10**9], ids=["gather twice, mix outputs", "mix attention, gather once"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0)])
def test_apply_is_the_dense_attention_times_padded_values(
    monkeypatch: pytest.MonkeyPatch, limit: int, stride: int, padding: int
) -> None:
    monkeypatch.setattr(attention, "_MIX_ATTENTION_BELOW", limit)
    torch.manual_seed(0)
    layer = GPSA(5, 7, 3, stride, padding, locality_strength=0.7, gating=0.3).double()
    with torch.no_grad():
        layer.query.mul_(40)
    x, values = torch.randn(2, 5, 11, 13, dtype=torch.float64), torch.randn(2, 5, 11, 13, dtype=torch.float64)
    parts = layer.gated_attention(x)
    padded = torch.nn.functional.pad(values, (padding,) * 4).flatten(2)
    expected = torch.einsum("bhqk,bck->bchq", parts.dense(), padded)
    torch.testing.assert_close(parts.apply(values).flatten(3), expected, rtol=0, atol=1e-14)


def test_the_sizes_of_the_papers_mix_first_and_large_maps_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = attention.apply_separable
    monkeypatch.setattr(attention, "apply_separable", lambda *a: calls.append(1) or original(*a))
    GPSA(512, 8, 3, padding=1)(torch.randn(1, 512, 14, 14))
    assert calls == []
    GPSA(3, 8, 3, padding=1)(torch.randn(1, 3, 14, 14))
    assert calls == [1]
