"""Autocast and half precision: statistics of the queries and keys as they were rounded, in float32 or more."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace, images, vit

pytestmark = pytest.mark.numerical


def rounded(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Entropies and distances of the q and k that reach attention, (layers, heads), in float64 from there on."""
    seen: list[tuple[Tensor, Tensor]] = []
    original = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q.detach().double(), k.detach().double()))
        return original(q, k, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        model(x)
    places = torch.tensor([(y, x) for y in range(5) for x in range(7)]).double()
    found: dict[str, list[Tensor]] = {"entropy": [], "attention_distance": []}
    for q, k in seen:
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        found["entropy"].append(-(weights * weights.log()).sum(-1).mean((0, 2)))
        grid = weights[..., 1:, 1:] / weights[..., 1:, 1:].sum(-1, keepdim=True)
        found["attention_distance"].append((grid * torch.cdist(places, places)).sum(-1).mean((0, 2)))
    return {name: torch.stack(values) for name, values in found.items()}


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


CASES = {
    "bfloat16 autocast": (torch.float32, autocast),
    "bfloat16": (torch.bfloat16, contextlib.nullcontext),
    "float16": (torch.float16, contextlib.nullcontext),
    "float64": (torch.float64, contextlib.nullcontext),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_rounded_queries_and_keys(case: str, mode: Any) -> None:
    dtype, context = CASES[case]
    model, x = vit().to(dtype), images().to(dtype)
    with context(), mode():
        logits, expected = model(x), rounded(model, x)
    before = Trace(model)
    with tcnn_probe.record(model, images=[0]) as recorder:
        with context(), mode():
            assert torch.equal(model(x), logits)
        recorder.mark(epoch=0)
    # Of the rounded values on, sums of 36 terms in float32 (2^-24 each), logits up to 10: far below bfloat16's 4e-3.
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for name, value in expected.items():
        found = recorder.dataset[name]
        assert found.dtype == "float64"
        torch.testing.assert_close(torch.as_tensor(found.values[0]), value, rtol=tolerance, atol=tolerance)
    assert before == Trace(model)


class Direct(nn.Module):
    """Attention of its own input, which autocast rounds on the way into torch's function."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(x, x, x)
        return ((x @ x.mT) * 5**-0.5).softmax(-1) @ x


@pytest.mark.parametrize("fused", [True, False])
def test_what_autocast_rounds_last(fused: bool) -> None:
    """Queries and keys of fused attention; the logits, where the softmax is a call of its own."""
    x = 1.5 * torch.randn(3, 2, 7, 5, generator=torch.Generator().manual_seed(0))
    with tcnn_probe.record(model := Direct(fused=fused)) as recorder, autocast():
        assert model(x).dtype == torch.bfloat16
        recorder.mark(epoch=0)
    given = x.bfloat16()
    logits = given.double() @ given.double().mT / 5**0.5 if fused else ((given @ given.mT) * 5**-0.5).double()
    weights = logits.softmax(-1)
    expected = -(weights * weights.log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.as_tensor(recorder.dataset.entropy.values[0, 0]), expected, rtol=1e-5, atol=1e-5)
