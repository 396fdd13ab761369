"""Nested ablations, which are recorded, explained, and seen by other hooks."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.contracts.helpers import vit
from tests.tcnn_probe.interventions.ablations import State, chain_images, other_chain
from tests.tcnn_probe.networks import Chain, scatter


def test_hooks_of_the_user_see_the_ablated_output() -> None:
    model = Chain()
    outputs = []
    model.near.register_forward_hook(lambda module, args, output: outputs.append(output))
    with tcnn_probe.ablate(model, "near"):
        model(chain_images())
    assert torch.equal(outputs[0], model.near.bias[:, None, None].expand_as(outputs[0]))  # type: ignore[index]


@torch.no_grad()
def test_nested_ablations() -> None:
    """The last ablation decides a head's output,
    independently of gates; ablations may end in any order.
    """
    model = Chain()
    x = chain_images()
    before = State(model)
    heads = {"near": [0, 1]}

    def output(*ablations: Any) -> Tensor:
        with ExitStack() as stack:
            for ablation in ablations:
                stack.enter_context(ablation)
            return model(x)

    def ended(*choice: Any, **options: Any) -> Any:
        ablation = tcnn_probe.ablate(model, *choice, **options)
        ablation.remove()
        return ablation

    def replaced(heads: Any) -> Any:
        return ended(heads, "replaced", source=other_chain())

    zero = ended(heads)
    mean = ended(heads, "mean")
    replacement = replaced(heads)
    gates = ended({"near": 1}, "positional")
    torch.testing.assert_close(output(zero, mean, replacement), output(replacement))
    torch.testing.assert_close(output(zero, replacement, mean), output(mean))
    torch.testing.assert_close(output(mean, gates, replacement, zero), output(zero))
    second = ended({"near": 1})
    torch.testing.assert_close(output(replacement, second), output(replaced({"near": 0}), second))
    gated = output(gates)
    content = ended("near", "content")
    # By hand, all heads attend by content but head 1, whose ablation came last. In float32,
    # sigmoid(40) is 1, and sigmoid(-40) = 4e-18 is negligible.
    model.near.gating[:] = torch.tensor([-40.0, 40, *[-40] * 7])
    torch.testing.assert_close(output(content, gates), model(x))
    model.near.load_state_dict(Chain().near.state_dict())
    # The ablation that starts first also ends first.
    zero.__enter__()
    gates.__enter__()
    zero.__exit__(None, None, None)
    assert torch.equal(model(x), gated)
    gates.__exit__(None, None, None)
    before.check(model)


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False], ids=["recorded inside", "ablated inside"])
def test_ablated_models_are_recorded(inside: bool) -> None:
    """Gates are recorded as ablated, and entropies of the attention that runs;
    additional forwards are not recorded.
    """
    model = Chain()
    x = chain_images()

    def enter(stack: ExitStack) -> None:
        stack.enter_context(tcnn_probe.ablate(model, {"near": [1, 2]}, "positional"))
        stack.enter_context(tcnn_probe.ablate(model, {"near": 5}, "content"))
        stack.enter_context(tcnn_probe.ablate(model, {"near": [2, 4]}, "mean"))
        stack.enter_context(
            tcnn_probe.ablate(model, {"near": [6]}, "replaced", source=other_chain())
        )

    with ExitStack() as stack:
        if inside:
            enter(stack)
        recorder = stack.enter_context(tcnn_probe.record(model))
        if not inside:
            enter(stack)
        output = model(x)
        recorder.mark(epoch=0)
        recorder.remove()
        assert torch.equal(model(x), output)
    near = recorder.dataset.sel(epoch=0, layer="near")
    gates = torch.sigmoid(model.near.gating)
    gates[[1, 2, 5]] = torch.tensor([1.0, 1, 0])
    torch.testing.assert_close(torch.tensor(near.gate.values[:9]), gates.double())
    assert near.gate.values[[1, 2, 5]].tolist() == [1, 1, 0]
    # Gates of 1 or 0 give A = P or A = C, computed in another way in float32.
    assert abs(near.entropy - near.positional_entropy).values[[1, 2]].max() < 1e-6
    assert abs(near.entropy - near.content_entropy).values[5] < 1e-6
    assert near.images == 3


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False], ids=["recorded inside", "ablated inside"])
def test_a_model_that_is_a_single_layer_is_recorded_as_ablated(inside: bool) -> None:
    model = scatter(GPSA(2, 5, 3, padding=1)).eval()
    ablations = [
        tcnn_probe.ablate(model, mode="positional"),
        tcnn_probe.ablate(model, {"": [1, 3]}),
    ]
    recorder = tcnn_probe.record(model) if not inside else None
    with ablations[0], ablations[1]:
        recorder = recorder or tcnn_probe.record(model)
        model(chain_images())
        recorder.mark(epoch=0)
    recorder.remove()
    # With gates of 1, the whole attention is its positional part.
    assert abs(recorder.dataset.entropy - recorder.dataset.positional_entropy).max() < 1e-6


class Single(nn.Module):
    """Attention with one head, whose softmax is recognised by the storage of its result."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


@torch.no_grad()
def test_a_single_head_is_recorded_while_it_is_ablated() -> None:
    model = nn.Sequential(Single()).eval()
    x = torch.randn(2, 5, 7)
    with tcnn_probe.ablate(model, "0"), tcnn_probe.record(model) as recorder:
        assert (model(x) == 0).all()
        recorder.mark(epoch=0)
    assert recorder.layers == ("0",)


def test_ablated_models_are_explained() -> None:
    model = vit()
    x = vit_images(2)
    for method in ("class_attention", "rollout"):
        plain = tcnn_probe.saliency(model, x, target=1, method=method)
        with tcnn_probe.ablate(model, "blocks.0.attn"):
            ablated = tcnn_probe.saliency(model, x, target=1, method=method)
        assert abs(ablated - plain).max() > 1e-3 * abs(plain).max()
