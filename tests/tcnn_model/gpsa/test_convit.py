"""timm's ConViT, accelerated: the same model to everyone but the clock, and the old one again afterwards."""

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
from tests.tcnn_model.helpers import assert_same, default_dtype, random, relative_error, seeded, snapshot

pytestmark = pytest.mark.numerical


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


def _model(**options: Any) -> nn.Module:
    """Three blocks, two of them gated, 4 x 4 tokens, whose attention is neither uniform nor Gaussian."""
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 3, "local_up_to_layer": 2}
    model = timm.create_model("convit_tiny", num_classes=5, **small | options).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name:
                parameter += 0.5 * torch.randn(parameter.shape, generator=seeded(1), dtype=torch.float64)
        for module in model.modules():
            if isinstance(module, convit.GPSA):
                module.pos_proj.weight[0, 2] = 0.1  # attention that grows with the distance: no Gaussian
    return model


def _images(batch: int = 2) -> Tensor:
    return random(batch, 3, 32, 32)


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True}, {"local_up_to_layer": 3}, {"local_up_to_layer": 0}])
def test_same_output_and_gradients(options: dict[str, Any]) -> None:
    if options.get("local_up_to_layer") == 0:
        model = timm.create_model("convit_tiny", num_classes=5, img_size=32, depth=2, local_up_to_layer=0).double()
    else:
        model = _model(**options)
    x = _images().requires_grad_()
    names = [name for name, _ in model.named_parameters()]
    outputs = [model(x)]
    gradients = [torch.autograd.grad(outputs[0].square().sum(), [x, *model.parameters()], materialize_grads=True)]
    with accelerate(model):
        outputs.append(model(x))
        gradients.append(
            torch.autograd.grad(outputs[1].square().sum(), [x, *model.parameters()], materialize_grads=True)
        )
    assert_same(outputs[1], outputs[0])
    for name, theirs, ours in zip(["x", *names], *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=name)  # some are zero, those here near 1


def test_gate_and_position_get_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is our attention that runs."""
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
    assert torch.equal(layer.pos_proj.bias.grad, torch.zeros(3, dtype=torch.float64))


def test_nothing_of_it_remains() -> None:
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
    model, other = _model(), _model()
    seen: list[str] = []
    for name in ("blocks.0.attn", "blocks.0.attn.qk", "blocks.0.attn.v", "blocks.0.attn.proj", "blocks.2.attn.qkv"):
        for each in (model, other):
            each.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    expected = model(_images())
    plain, seen[:] = sorted(seen), []
    with torch.no_grad():
        other.get_parameter("blocks.0.attn.v.weight").zero_()
    with accelerate(other):
        other.load_state_dict(model.state_dict())
        assert_same(other(_images()), expected)
        model.load_state_dict(other.state_dict())
    assert sorted(seen) == plain


def test_copies_stay_accelerated_and_work() -> None:
    model = _model()
    with accelerate(model):
        expected = model(_images())
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(duplicate(_images()), expected)


def test_attention_maps_are_still_to_be_had() -> None:
    plain, model = _model(), _model()
    plain(_images())
    with accelerate(model):
        model(_images())
        tokens = random(2, 16, 36)
        for name in ("blocks.0.attn", "blocks.2.attn"):
            ours, theirs = (m.get_submodule(name).get_attention_map(tokens, return_map=True) for m in (model, plain))
            for actual, expected in zip(ours, theirs, strict=True):
                assert_same(actual, expected)


def test_attention_dropout_trains_as_before() -> None:
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


class _Subclass(convit.GPSA):
    pass


def test_what_cannot_be_accelerated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no ConViT attention in ResNet: accelerate\(\) is for timm's convit_"):
        accelerate(timm.create_model("resnet18"))
    model = _model()
    with accelerate(model), pytest.raises(ValueError, match=r"'blocks\.0\.attn' is accelerated already"):
        accelerate(model)
    model.set_submodule("blocks.1.attn", _Subclass(36, 3).double())
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"'blocks\.1\.attn' is a _Subclass, a subclass which may"):
        accelerate(model)
    assert [type(m) for m in model.modules()] == before


def test_tokens_that_are_no_square_are_refused() -> None:
    layer = convit.GPSA(12, 3)
    with accelerate(layer), pytest.raises(ValueError, match="square grid of tokens, got 15 tokens"):
        layer(torch.zeros(1, 15, 12))
