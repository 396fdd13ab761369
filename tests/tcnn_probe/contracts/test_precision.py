"""Autocast and half precision: statistics of the queries and keys as they were rounded, in float32 or more."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace, images, vit


def rounded(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies and distances of the q and k that reach attention, (layers, heads), in float64 from there on."""
    seen: list[tuple[Tensor, Tensor]] = []
    original = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q.detach().double(), k.detach().double()))
        return original(q, k, *args, **kwargs)

    F.scaled_dot_product_attention = spy
    try:
        model(x)
    finally:
        F.scaled_dot_product_attention = original
    places = torch.tensor([(y, x) for y in range(5) for x in range(7)]).double()
    distance = torch.cdist(places, places)
    entropies, distances = [], []
    for q, k in seen:
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        entropies.append(-(weights * weights.log()).sum(-1).mean((0, 2)))
        grid = weights[..., 1:, 1:] / weights[..., 1:, 1:].sum(-1, keepdim=True)
        distances.append((grid * distance).sum(-1).mean((0, 2)))
    return torch.stack(entropies), torch.stack(distances)


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


CASES = {
    "bfloat16 autocast": (torch.float32, autocast),
    "bfloat16": (torch.bfloat16, contextlib.nullcontext),
    "float16": (torch.float16, contextlib.nullcontext),
    "float64": (torch.float64, contextlib.nullcontext),
    "float32": (torch.float32, contextlib.nullcontext),
}


@pytest.mark.parametrize("grad", [True, False, "inference"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_rounded_queries_and_keys(case: str, grad: Any) -> None:
    dtype, context = CASES[case]
    model, x = vit().to(dtype), images().to(dtype)
    mode = torch.inference_mode() if grad == "inference" else torch.set_grad_enabled(grad)
    with context(), mode:
        logits = model(x)
        entropy, distance = rounded(model, x)
    before = Trace(model)
    with tcnn_probe.record(model, images=[0]) as recorder:
        mode = torch.inference_mode() if grad == "inference" else torch.set_grad_enabled(grad)
        with context(), mode:
            again = model(x)
        assert torch.equal(again, logits)
        assert again.dtype == logits.dtype
        recorder.mark(epoch=0)
        found = recorder.dataset
    # Float32 from the rounded values on: 36 keys, so no more than some 1e-6; nothing near bfloat16's 4e-3.
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    for name, expected in (("entropy", entropy), ("attention_distance", distance)):
        assert found[name].dtype == "float64"
        torch.testing.assert_close(torch.as_tensor(found[name].values[0]), expected, rtol=tolerance, atol=tolerance)
    torch.set_grad_enabled(True)
    assert before == Trace(model)


def test_without_fused_attention() -> None:
    """A softmax of bfloat16 logits is that of these logits: what was rounded is what is measured."""
    model, x = vit().bfloat16(), images().bfloat16()
    for block in model.blocks:
        block.attn.fused_attn = False
    logits: list[Tensor] = []
    handles = [
        block.attn.attn_drop.register_forward_pre_hook(lambda _, args: logits.append(args[0].double()))
        for block in model.blocks
    ]
    model(x)
    for handle in handles:
        handle.remove()
    with tcnn_probe.record(model) as recorder:
        model(x)
        recorder.mark(epoch=0)
    expected = torch.stack([-(a * a.clamp_min(1e-300).log()).sum(-1).mean((0, 2)) for a in logits])
    # The attention of the model is rounded after its softmax (a relative 2^-9, log 36 = 3.6); ours is not.
    found = torch.as_tensor(recorder.dataset.entropy.values[0])
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=2e-2)


class Direct(nn.Module):
    """Attention of its own input, which autocast rounds on the way into torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_queries_that_autocast_rounds_last() -> None:
    model, x = Direct().eval(), 1.5 * torch.randn(3, 2, 7, 5, generator=torch.Generator().manual_seed(0))
    with tcnn_probe.record(model) as recorder:
        with autocast():
            assert model(x).dtype == torch.bfloat16
        recorder.mark(epoch=0)
    given = x.bfloat16().double()
    weights = (given @ given.transpose(-1, -2) / 5**0.5).softmax(-1)
    expected = -(weights * weights.log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.as_tensor(recorder.dataset.entropy.values[0, 0]), expected, rtol=5e-6, atol=5e-6)
