"""Parameter groups and stochastic depth."""

import math

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

from tcnn_model import GPSA, parameter_groups
from tcnn_model.training.optimization import set_drop_path
from tests.tcnn_model.numerics import on_meta
from tests.tcnn_model.tiny_models import pooled_cnn, tiny_cnn, tiny_tcnn


def _setting(model: nn.Module, **arguments: float) -> dict[str, tuple[float, float]]:
    """Return (lr, weight decay) of each parameter; fail if a parameter is in two groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    settings: dict[str, tuple[float, float]] = {}
    for group in parameter_groups(model, **arguments):
        assert group["params"]
        for parameter in group["params"]:
            assert names[parameter] not in settings
            settings[names[parameter]] = (group["lr"], group["weight_decay"])
    return settings


def test_every_parameter_is_in_one_group() -> None:
    model = tiny_tcnn()
    assert set(_setting(model)) == {name for name, _ in model.named_parameters()}
    model.get_parameter("layer4.0.conv1.gating").requires_grad_(False)
    # Frozen parameters are in no group, so that no optimizer decays them.
    model.get_submodule("layer1").requires_grad_(False)
    assert set(_setting(model)) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_learning_rates_and_weight_decay_of_groups() -> None:
    settings = _setting(tiny_tcnn(), lr=3e-4, gating_lr=0.2, weight_decay=0.07)
    gates = {"layer4.0.conv1.gating", "layer4.0.conv2.gating"}
    assert {name for name, (lr, _) in settings.items() if lr != 3e-4} == gates
    assert {settings[name] for name in gates} == {(0.2, 0.0)}
    for name, (_, decay) in settings.items():
        owner, _, last = name.rpartition(".")
        norm = "bn" in owner or owner.endswith("downsample.1")
        assert decay == (
            0.07 if last in ("query", "key", "value") or (last == "weight" and not norm) else 0.0
        ), name


def test_queries_and_keys_may_have_their_own_rate() -> None:
    separate = _setting(tiny_tcnn(), lr=3e-4, weight_decay=0.07, qk_lr=5e-3)
    common = _setting(tiny_tcnn(), lr=3e-4, weight_decay=0.07)
    moved = {name for name in common if separate[name] != common[name]}
    assert moved == {f"layer4.0.conv{n}.{part}" for n in (1, 2) for part in ("query", "key")}
    assert {separate[name] for name in moved} == {(5e-3, 0.07)}
    # A CNN has no queries, so qk_lr must not change the training of the control.
    assert _setting(tiny_cnn(), qk_lr=5e-3) == _setting(tiny_cnn())


def test_a_single_layer_is_a_model() -> None:
    settings = _setting(GPSA(3, 5, 3), weight_decay=0.05)
    assert {name for name, (_, decay) in settings.items() if decay} == {
        "weight",
        "query",
        "key",
        "value",
    }
    assert settings["gating"] == (0.1, 0.0)


def test_parameters_that_the_model_exempts_are_not_decayed() -> None:
    class Exempting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(2, 3))
            self.matrix = nn.Parameter(torch.zeros(2, 3))

        def no_weight_decay(self) -> set[str]:
            return {"table"}

    assert _setting(Exempting()) == {"table": (1e-4, 0.0), "matrix": (1e-4, 0.05)}


def _rates(model: nn.Module) -> list[float]:
    rates = [module.drop_path for module in model.modules() if hasattr(module, "drop_path")]
    return [rate.drop_prob if isinstance(rate, DropPath) else 0.0 for rate in rates]


@pytest.mark.parametrize("name", ["resnet18", "resnetv2_50", "convnext_atto"])
def test_drop_path_rates_equal_timms(name: str) -> None:
    model = on_meta(name)
    expected = _rates(on_meta(name, drop_path_rate=0.3))
    assert set_drop_path(model, 0.3) == len(expected) > 0
    # timm computes its rates by a linspace in float32.
    assert _rates(model) == pytest.approx(expected, abs=1e-6)
    assert set_drop_path(model, 0.0) == len(expected)
    assert _rates(model) == [0.0] * len(expected)


def _drop_rates(model: nn.Module) -> dict[str, float]:
    """Return the drop rate of each module with a name that starts with drop_path."""
    modules = {
        n: m for n, m in model.named_modules() if n.rpartition(".")[2].startswith("drop_path")
    }
    return {name: m.drop_prob if isinstance(m, DropPath) else 0.0 for name, m in modules.items()}


CLASS_ATTENTION = {
    "cait_xxs24_224": ({"depth": 3, "embed_dim": 24}, "blocks_token_only"),
    "xcit_nano_12_p16_224": ({"depth": 3, "embed_dim": 24}, "cls_attn_blocks"),
    "patchconvnet_s60": ({"depth": 3, "embed_dim": 16}, "pool"),
    "patchconvnet_s60_multi": ({"depth": 3, "embed_dim": 16, "num_classes": 5}, "pool"),
}


@pytest.mark.parametrize("name", CLASS_ATTENTION)
def test_class_tokens_are_never_dropped(name: str) -> None:
    options, pool = CLASS_ATTENTION[name]
    model = timm.create_model(name, **options)
    # Class attention must not get a rate, uniform or rising.
    for uniform, expected in ((True, [0.2, 0.2, 0.2]), (False, [0.0, 0.1, 0.2])):
        assert set_drop_path(model, 0.2, uniform=uniform) == 3
        rates = _drop_rates(model)
        assert {rate for block, rate in rates.items() if pool in block} == {0.0}
        trunk = [block for block in rates if pool not in block]
        per_block = len(trunk) // 3
        assert [rates[block] for block in trunk] == pytest.approx(
            [p for p in expected for _ in range(per_block)]
        )


def test_pooled_image_reaches_the_classifier_even_if_all_blocks_are_dropped() -> None:
    """At a rate near 1 every block is dropped, and the model still tells images apart."""
    model = pooled_cnn(tiny_cnn().eval()).train()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        # In training mode, batch norms would mix the images.
        norm.eval()
    # A rate of 1 is refused; this rate drops every block in practice.
    assert set_drop_path(model, 1 - 1e-12, uniform=True) == 4
    images = torch.randn(2, 1, 64, 96)
    assert not torch.allclose(*model(images), atol=1e-6)


def test_drop_path_acts_in_training_only() -> None:
    model = tiny_tcnn().eval()
    assert set_drop_path(model, 0.5) == 4
    x = torch.randn(3, 1, 32, 24)
    assert torch.equal(model(x), model(x))
    model.get_submodule("layer4").train()
    assert not torch.equal(model(x), model(x))
    assert set_drop_path(nn.Sequential(nn.Conv2d(3, 5, 3)), 0.1) == 0


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_drop_path_rate_out_of_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"expected a drop path rate in \[0, 1\), got"):
        set_drop_path(tiny_cnn(), rate)
