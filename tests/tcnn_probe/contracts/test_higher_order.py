"""Models with higher-order operators, or that compile themselves,
run as they do alone; flex_attention is recorded.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, cond, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace, clean, images, vit


class FlexAttention(nn.Module):
    """ALiBi-like attention of 3 heads, as users write it."""

    num_heads = 3

    def __init__(self, width: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.attend = attend

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        heads = self.attend(
            query,
            key,
            value,
            score_mod=lambda score, b, h, i, j: score + 0.01 * (i - j),
        )
        return self.proj(heads.transpose(1, 2).flatten(2))


class Around(nn.Module):
    """Attention layer inside an operator."""

    def __init__(self, operator: Callable[..., Tensor], inner: nn.Module) -> None:
        super().__init__()
        self.operator = operator
        self.inner = inner

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.operator(self.inner, x)


def of_cond_around(inner: nn.Module, x: Tensor) -> Tensor:
    return cond(x.sum() > 0, inner, inner, (x,))


def of_checkpoint(inner: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(inner, x, use_reentrant=False)


def of_reentrant_checkpoint(inner: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(inner, x, use_reentrant=True)


def of_vmap(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(torch.vmap(torch.sin)(x))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def of_autograd_function(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(Doubled.apply(x))


compiled_sin = torch.compile(torch.sin, backend="eager")
whole_sin = torch.compile(lambda x: x.sin(), backend="eager", fullgraph=True)


def of_compiled_function(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(compiled_sin(x))


def of_fullgraph_function(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(whole_sin(x))


def of_nothing(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x)


OPERATORS = {
    "checkpoint": of_checkpoint,
    "reentrant checkpoint": of_reentrant_checkpoint,
    "vmap": of_vmap,
    "autograd function": of_autograd_function,
    "compiled function": of_compiled_function,
    "fullgraph function": of_fullgraph_function,
    "exported": of_nothing,
}


class Inner(nn.Module):
    """Layer that torch.export accepts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


OLD = torch.__version__ < (2, 9)


@pytest.mark.study(but=["checkpoint", "vmap", "compiled function"])
@pytest.mark.filterwarnings(
    "ignore:.*flex_attention called without torch.compile",
    "ignore::DeprecationWarning",
    # torch._dynamo suppresses this warning of its own, but a filter that raises brings it back.
    "ignore:The .grad attribute of a Tensor",
    # torch gives this warning without gradients.
    "ignore:None of the inputs have requires_grad",
)
@pytest.mark.parametrize("kind", ["flex", "compiled flex", "fullgraph flex", *OPERATORS])
def test_recorded_model_runs_as_it_does_alone(kind: str) -> None:
    model, x = vit(), images()
    block = model.blocks[1]
    is_flex = "flex" in kind
    if is_flex:
        attend = (
            # dynamo traces it, without the C++ compiler that inductor needs.
            flex_attention
            if kind == "flex"
            else torch.compile(flex_attention, backend="eager", fullgraph="fullgraph" in kind)
        )
        block.attn = FlexAttention(block.attn.qkv.in_features, attend)
    elif kind == "exported":
        tokens = torch.randn(3, 36, 12)
        block.attn = Around(of_nothing, torch.export.export(Inner(block.attn), (tokens,)).module())
        for module in model.modules():  # exported modules refuse eval()
            module.training = False
    else:
        block.attn = Around(OPERATORS[kind], block.attn)
    # flex_attention has no backward pass on a CPU.
    for gradients in (False,) if is_flex else (False, True):
        with torch.set_grad_enabled(gradients):
            check_as_alone(model, x, kind, gradients=gradients)
    assert clean()


def of_vmap_around(inner: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(inner)(x[:, None])[:, 0]


class KeywordSoftmax(nn.Module):
    """Attention without projections, with a softmax whose input is given by name."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return torch.softmax(input=x @ x.mT, dim=-1) @ x


def test_softmax_with_keywords_under_a_transform() -> None:
    model = vit()
    model.blocks[1].attn = Around(of_vmap_around, KeywordSoftmax())
    expected = model(images())
    with tcnn_probe.record(model) as recorder:
        torch.testing.assert_close(model(images()), expected, rtol=0, atol=0)
        recorder.mark(epoch=0)
    assert "under torch.vmap" in recorder.unsupported["blocks.1.attn.inner"]


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
@pytest.mark.parametrize(
    ("operator", "layer", "reason"),
    [
        (of_cond_around, "blocks.1.attn", "in a function that torch.cond runs"),
        (of_vmap_around, "blocks.1.attn.inner", "under torch.vmap"),
        (None, "blocks.1.attn.inner", "in a graph of torch.export"),
    ],
)
def test_attention_that_is_hidden_has_a_reason(
    operator: Callable[..., Tensor] | None, layer: str, reason: str
) -> None:
    if OLD and operator is of_cond_around:
        pytest.skip("torch 2.8 does not show modes the operators that it compiles")
    model = vit()
    block = model.blocks[1]
    if operator is None:
        program = torch.export.export(Inner(block.attn), (torch.randn(3, 36, 12),))
        block.attn = Around(of_nothing, program.module())
        for module in model.modules():  # exported modules refuse eval()
            module.training = False
    else:
        block.attn = Around(operator, block.attn)
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(images())
        recorder.mark(epoch=0)
    assert layer not in recorder.layers
    assert reason in recorder.unsupported[layer]
    # Class scores inside an operator are not attention.
    assert [*recorder.unsupported] == [layer]


def gradients_of(model: nn.Module, output: Tensor) -> list[Tensor | None]:
    output.square().sum().backward()  # torch.autograd.grad does not support reentrant checkpoints
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return gradients


def check_as_alone(model: nn.Module, x: Tensor, kind: str, *, gradients: bool) -> None:
    is_flex = "flex" in kind
    expected = model(x)
    before = Trace(model)
    slopes = gradients_of(model, expected) if gradients else []
    # The layer that holds the operator is recorded, and then it is not.
    for layers in (None, ["blocks.0.attn"]):
        with tcnn_probe.record(model, layers=layers) as recorder:
            output = model(x)
            recorder.mark(epoch=0)
        # Equal bit for bit, as a recorder only observes.
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        if gradients:
            torch.testing.assert_close(gradients_of(model, output), slopes)
        if is_flex:
            assert ("blocks.1.attn" in recorder.layers) == (layers is None)
            assert not recorder.unsupported
    with tcnn_probe.attention_stream(model, lambda attention: None) as stream:
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert ("blocks.1.attn" in stream.layers) == (kind not in OPERATORS)
    maps = tcnn_probe.attention_maps(model, x, layers=["blocks.0.attn"])
    assert maps.children
    for layer in ("blocks.0.attn", *(["blocks.1.attn"] if is_flex else [])):
        with tcnn_probe.ablate(model, {layer: [0]}):
            ablated = model(x)
            if gradients:
                gradients_of(model, ablated)
        assert not torch.allclose(ablated, expected)
    assert before == Trace(model)
