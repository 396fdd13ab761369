"""Attaching to a model of each structure, forwards that end or fail, and detaching leave it as it was."""

from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tcnn_probe

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
MODELS: dict[str, dict[str, Any]] = {
    "test_vit": {},
    "test_byobnet": {},
    "test_convnext": {},
    "test_mambaout": {},
    "cait_xxs24_224": VIT,
    "convit_tiny": VIT | {"local_up_to_layer": 1},
    "xcit_nano_12_p8_224": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "swin_tiny_patch4_window7_224": {"img_size": 32, "embed_dim": 8, "depths": (2,), "num_heads": (2,)},
}


class Snapshot:
    """What of a model, and of torch, a recorder could leave behind; tensors and modules by their identity."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self.attributes = {name: {key: id(value) for key, value in vars(m).items()} for name, m in modules.items()}
        self.classes = {name: type(module) for name, module in modules.items()}
        self.contents = {
            (name, key): list(value.items()) if isinstance(value, dict) else sorted(map(str, value))
            for name, module in modules.items()
            for key, value in vars(module).items()
            if key.startswith("_") and isinstance(value, (dict, set))
        }
        self.training = {name: module.training for name, module in modules.items()}
        self.state = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
        self.parameters = {
            name: (id(p), p.requires_grad, p._backward_hooks, p._post_accumulate_grad_hooks, dict(vars(p)))
            for name, p in model.named_parameters()
        }
        self.torch = everywhere()


def everywhere() -> dict[str, Any]:
    """torch's global hooks and modes."""
    hooks = {name: dict(value) for name, value in vars(global_hooks).items() if name.startswith("_global_") and value}
    return {"hooks": hooks, "modes": [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]}


def check_same(before: Snapshot, after: Snapshot) -> None:
    changed = [what for what, value in vars(before).items() if value != vars(after)[what]]
    assert not changed, f"{changed} changed"


def test_a_snapshot_sees_each_kind_of_trace() -> None:
    model = timm.create_model("test_vit")
    before = Snapshot(model)
    check_same(before, Snapshot(model))
    with pytest.raises(AssertionError, match="changed"), tcnn_probe.record(model):
        check_same(before, Snapshot(model))
    check_same(before, Snapshot(model))
    model.norm.weight.register_hook(lambda gradient: None)
    with pytest.raises(AssertionError, match="parameters"):
        check_same(before, Snapshot(model))


@pytest.mark.parametrize("name", MODELS)
def test_left_as_it_was(name: str) -> None:
    model = timm.create_model(name, num_classes=5, **MODELS[name]).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        before = Snapshot(model)
        with tcnn_probe.record(model, probes=tcnn_probe.PROBES, images=2):
            assert [*model.state_dict()] == [*before.state]
            assert everywhere() == before.torch, "global hooks are for the time of a forward"
            assert torch.equal(model(images), expected)
            with pytest.raises((RuntimeError, AssertionError)):
                model(images[:, :2])
            assert everywhere() == before.torch
    check_same(before, Snapshot(model))
