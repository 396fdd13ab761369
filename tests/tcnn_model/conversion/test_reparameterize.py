"""Effects of a conversion other than the model's function:
copies, modes, dtypes, shared weights, checkpoints.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tcnn_model import GPSA, gpsa_layers, reparameterize
from tests.tcnn_model.families import build
from tests.tcnn_model.numerics import (
    SHARP,
    assert_same,
    random,
    relative_error,
    saved_and_loaded,
    snapshot,
)

CONVERTED = ["layer4.0.conv2", "layer4.1.conv2"]


@pytest.fixture
def cnn() -> nn.Module:
    return build("resnet50d")


def test_input_model_is_untouched(cnn: nn.Module) -> None:
    # A careless copy would lose a hook, or a mode that differs within the model.
    cnn.get_submodule("layer4.1").train()
    cnn.get_submodule("layer2").register_forward_hook(lambda *_: None)
    before = snapshot(cnn)
    values = copy.deepcopy(cnn.state_dict())
    tcnn = reparameterize(cnn)
    assert snapshot(cnn) == before
    assert all(torch.equal(value, values[name]) for name, value in cnn.state_dict().items())
    # They share neither memory nor modules, so that training the T-CNN leaves the CNN alone.
    assert not {p.data_ptr() for p in cnn.parameters()} & {p.data_ptr() for p in tcnn.parameters()}
    assert not {id(m) for m in cnn.modules()} & {id(m) for m in tcnn.modules()}
    assert list(gpsa_layers(tcnn)) == CONVERTED


def test_the_users_hooks_do_not_see_the_rehearsal(cnn: nn.Module) -> None:
    cnn.get_submodule("layer2").register_forward_hook(lambda *_: pytest.fail("seen"))
    assert list(gpsa_layers(reparameterize(cnn))) == CONVERTED


def test_conversion_in_place_replaces_only_what_it_must(cnn: nn.Module) -> None:
    parameters = dict(cnn.named_parameters())
    modules = dict(cnn.named_modules())
    result = reparameterize(cnn, inplace=True)
    assert result is cnn
    assert list(gpsa_layers(cnn)) == CONVERTED
    for name, parameter in parameters.items():
        assert cnn.get_parameter(name) is parameter
    # The shortcut of resnet50d pools with the stride, so its pool is replaced, too.
    replaced = {*CONVERTED, "layer4.0.downsample.0"}
    assert {
        name for name, module in modules.items() if cnn.get_submodule(name) is not module
    } == replaced


def test_mode_dtype_and_trainability_carry_over(cnn: nn.Module) -> None:
    cnn.to(torch.bfloat16).train()
    cnn.get_submodule("layer4.1").eval()
    cnn.get_submodule("layer4.1.conv2").weight.requires_grad_(False)
    tcnn = reparameterize(cnn)
    modes = {name: module.training for name, module in cnn.named_modules()}
    assert {
        name: module.training for name, module in tcnn.named_modules() if name in modes
    } == modes
    assert {p.dtype for p in tcnn.parameters()} == {torch.bfloat16}
    assert [name for name, p in tcnn.named_parameters() if not p.requires_grad] == [
        "layer4.1.conv2.weight"
    ]


def test_arguments_reach_every_layer(cnn: nn.Module) -> None:
    tcnn = reparameterize(cnn, locality_strength=2.0, gating=-0.5, qk_dim=7, qk_scale=0)
    for layer in gpsa_layers(tcnn).values():
        assert torch.allclose(layer.locality_strength, torch.full((9,), 2.0))
        assert torch.equal(layer.gating, torch.full((9,), -0.5))
        assert layer.qk_dim == 7
        assert not layer.query.any()
    defaults = gpsa_layers(reparameterize(cnn))["layer4.0.conv2"]
    assert torch.allclose(defaults.locality_strength, torch.ones(9))
    # The standard deviation of n random weights has a relative error of 1 / sqrt(2 n).
    assert float(defaults.query.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(defaults.gating, torch.ones(9))
    assert defaults.stride == (1, 1)
    assert defaults.padding == (1, 1)
    assert defaults.bias is None


def test_checkpoint_of_the_cnn_fills_the_tcnn(cnn: nn.Module) -> None:
    tcnn = reparameterize(cnn)
    # These weights differ from those that the conversion copied.
    nn.init.normal_(cnn.get_submodule("layer4.1.conv2").weight)
    result = tcnn.load_state_dict(cnn.state_dict(), strict=False)
    assert result.unexpected_keys == []
    added = ("query", "key", "value", "raw_locality", "center", "gating")
    assert result.missing_keys == [
        f"{name}.{parameter}" for name in CONVERTED for parameter in added
    ]
    for name in CONVERTED:
        assert torch.equal(tcnn.get_submodule(name).weight, cnn.get_submodule(name).weight)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
@torch.no_grad()
def test_result_can_be_copied_and_saved(
    cnn: nn.Module, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    tcnn = reparameterize(cnn)
    x = random(1, 3, 64, 96, dtype=torch.float32)
    assert_same(duplicate(tcnn)(x), tcnn(x))


@torch.no_grad()
def test_result_in_half_precision(cnn: nn.Module) -> None:
    """Rounding stays within 30 eps of float16 after fifteen layers."""
    x = random(1, 3, 64, 96, dtype=torch.float32)
    tcnn = reparameterize(cnn, **SHARP)
    expected = tcnn(x)
    for narrow in (tcnn.half(), reparameterize(cnn.half(), **SHARP)):
        assert relative_error(narrow(x.half()), expected) < 0.03


@torch.no_grad()
def test_a_second_conversion_adds_layers(cnn: nn.Module) -> None:
    cnn.double()
    once = reparameterize(cnn, stride="keep", **SHARP)
    twice = reparameterize(once, layers="layer3", stride="keep", **SHARP)
    assert list(gpsa_layers(twice)) == ["layer3.0.conv2", "layer3.1.conv2", *CONVERTED]
    x = random(1, 3, 64, 96)
    assert_same(twice(x), cnn(x))


class _Shared(nn.Module):
    """Convolution under two names, and another convolution with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = self.first
        self.third = nn.Conv2d(3, 3, 3, padding=1)
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


def test_shared_modules_and_weights_stay_shared() -> None:
    model = _Shared().double()
    result: Any = reparameterize(model, **SHARP)
    assert isinstance(result.first, GPSA)
    assert result.first is result.second
    assert isinstance(result.third, GPSA)
    assert result.third.weight is result.first.weight
    assert result.third.weight is not model.third.weight
    x = random(1, 3, 11, 13)
    assert_same(result(x), model(x))


def test_a_model_that_is_a_convolution_is_converted() -> None:
    conv = nn.Conv2d(3, 5, 3, padding=1, dtype=torch.float64)
    x = random(1, 3, 7, 11)
    result = reparameterize(conv, **SHARP)
    assert isinstance(result, GPSA)
    assert_same(result(x), conv(x))
