"""Accelerated ConViT of timm: the function,
state and hooks stay the same, and removal restores timm's layers.
"""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from timm.models import convit
from torch import Tensor, nn

from tcnn_model import accelerate
from tcnn_model.gpsa import convit as accelerated
from tests.tcnn_model.numerics import (
    assert_same,
    default_dtype,
    disturb,
    random,
    relative_error,
    snapshot,
)

pytestmark = pytest.mark.numerical


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    # timm computes ConViT's positions in the default dtype; in float32, rounding would hide errors.
    with default_dtype(torch.float64):
        yield


def _model(**options: Any) -> nn.Module:
    """Return three blocks, two of them gated, on 4 x 4 tokens,
    with attention that is neither uniform nor Gaussian.
    """
    torch.manual_seed(0)
    small = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 12,
        "depth": 3,
        "num_heads": 3,
        # The last block has no gates, so that both kinds of attention are accelerated.
        "local_up_to_layer": 2,
    }
    model = timm.create_model("convit_tiny", num_classes=5, **small | options).double().eval()
    # Initially, all layers have the same positions and gates.
    disturb(model, 1, scale=0.5, part="attn")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, convit.GPSA):
                # Attention that grows with the distance is not Gaussian.
                module.pos_proj.weight[0, 2] = 0.1
    return model


def _images(batch: int = 2) -> Tensor:
    return random(batch, 3, 32, 32)


@pytest.mark.parametrize(
    "options",
    # Blocks may all be gated, or none: a model without gates is accelerated, too.
    [{}, {"qkv_bias": True}, {"local_up_to_layer": 3}, {"local_up_to_layer": 0}],
)
def test_same_output_and_gradients(options: dict[str, Any]) -> None:
    if options.get("local_up_to_layer") == 0:
        model = timm.create_model(
            "convit_tiny", num_classes=5, img_size=32, depth=2, local_up_to_layer=0
        ).double()
    else:
        model = _model(**options)
    x = _images().requires_grad_()
    leaves = {"x": x, **dict(model.named_parameters())}

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        output = model(x)
        return output, torch.autograd.grad(
            output.square().sum(), list(leaves.values()), materialize_grads=True
        )

    expected, expected_gradients = run()
    with accelerate(model):
        output, gradients = run()
    assert_same(output, expected)
    for name, gradient, exact in zip(leaves, gradients, expected_gradients, strict=True):
        # Some gradients are zero, and the others near 1.
        torch.testing.assert_close(gradient, exact, rtol=1e-8, atol=1e-9, msg=name)


def test_gate_and_position_get_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both gated layers run the accelerated attention,
    and their gates and positions get gradients.
    """
    calls: list[int] = []
    original = accelerated.attend
    monkeypatch.setattr(accelerated, "attend", lambda *a: calls.append(1) or original(*a))
    model = _model()
    with accelerate(model):
        model(_images()).square().sum().backward()
    assert len(calls) == 2
    layer = model.get_submodule("blocks.0.attn")
    for parameter in (layer.gating_param, layer.pos_proj.weight, layer.qk.weight):
        assert float(parameter.grad.abs().min()) > 0
    # The softmax is invariant to a bias that all keys share.
    assert torch.equal(layer.pos_proj.bias.grad, torch.zeros(3, dtype=torch.float64))


def test_removal_restores_the_model() -> None:
    model = _model()
    output = model(_images())
    before = snapshot(model)
    classes = [type(m) for m in model.modules()]
    handle = accelerate(model)
    assert snapshot(model) == before
    handle.remove()
    handle.remove()
    with pytest.raises(KeyError), accelerate(model):
        raise KeyError
    assert [type(m) for m in model.modules()] == classes
    assert snapshot(model) == before
    assert torch.equal(model(_images()), output)


def test_hooks_still_see_the_layers_and_weights_still_load() -> None:
    model, twin = _model(), _model()
    runs: list[str] = []
    for name in (
        "blocks.0.attn",
        "blocks.0.attn.qk",
        "blocks.0.attn.v",
        "blocks.0.attn.proj",
        "blocks.2.attn.qkv",
    ):
        for network in (model, twin):
            network.get_submodule(name).register_forward_hook(
                lambda *_, name=name: runs.append(name)
            )
    expected = model(_images())
    plain_runs = sorted(runs)
    runs.clear()
    with torch.no_grad():
        # A weight that differs at first shows that the state is loaded into the layers that run.
        twin.get_parameter("blocks.0.attn.v.weight").zero_()
    with accelerate(twin):
        twin.load_state_dict(model.state_dict())
        assert_same(twin(_images()), expected)
        model.load_state_dict(twin.state_dict())
    assert sorted(runs) == plain_runs


def test_copies_stay_accelerated_and_work() -> None:
    model = _model()
    with accelerate(model):
        expected = model(_images())
        # A model is copied for the average of its weights, and pickled for other processes, while
        # it is accelerated.
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(duplicate(_images()), expected)


def test_attention_maps_are_those_of_timm() -> None:
    plain, model = _model(), _model()
    plain(_images())
    with accelerate(model):
        model(_images())
        tokens = random(2, 16, 36)
        for name in ("blocks.0.attn", "blocks.2.attn"):
            maps = model.get_submodule(name).get_attention_map(tokens, return_map=True)
            plain_maps = plain.get_submodule(name).get_attention_map(tokens, return_map=True)
            for actual, expected in zip(maps, plain_maps, strict=True):
                assert_same(actual, expected)


def test_attention_dropout_trains_as_before() -> None:
    # Dropout acts on N x N weights, which the fast path never computes.
    model = _model(attn_drop_rate=0.5).train()
    torch.manual_seed(3)
    expected = model(_images())
    with accelerate(model):
        torch.manual_seed(3)
        assert torch.equal(model(_images()), expected)
        model.eval()
        evaluated = model(_images())
    assert_same(evaluated, model(_images()))


def test_half_precision_and_autocast() -> None:
    model = _model().float()
    x = _images().float()
    with default_dtype(torch.float32):
        with accelerate(model), torch.autocast("cpu", dtype=torch.bfloat16):
            lowered = model(x)
        assert relative_error(lowered, model(x)) < 0.05  # six eps of bfloat16
    with accelerate(model.bfloat16()):
        assert model(x.bfloat16()).dtype == torch.bfloat16


# The changes that a subclass makes to the forward would be lost.
class _Subclass(convit.GPSA):
    pass


def test_models_that_cannot_be_accelerated_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"no ConViT attention in ResNet: accelerate\(\) is for timm's convit_",
    ):
        accelerate(timm.create_model("resnet18", channels=(8, 8, 8, 8)))
    model = _model()
    with (
        accelerate(model),
        pytest.raises(ValueError, match=r"'blocks\.0\.attn' is accelerated already"),
    ):
        accelerate(model)
    model.set_submodule("blocks.1.attn", _Subclass(36, 3).double())
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"'blocks\.1\.attn' is a _Subclass, a subclass which may"):
        accelerate(model)
    assert [type(m) for m in model.modules()] == before


def test_tokens_without_a_square_grid_are_refused() -> None:
    layer = convit.GPSA(12, 3)
    with (
        accelerate(layer),
        pytest.raises(ValueError, match="square grid of tokens, got 15 tokens"),
    ):
        layer(torch.zeros(1, 15, 12))
