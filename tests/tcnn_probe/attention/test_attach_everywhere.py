"""Attaching to a model of any of timm's families, and detaching, leaves it as it was."""

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tcnn_probe

OWN = {"models"}  # our t_resnet*, which timm lists under the name of their module


def smallest() -> dict[str, str]:
    """The smallest member of each family, as docs/families.md has it; for what it does not know, the first."""
    text = (Path(__file__).parents[3] / "docs" / "families.md").read_text()
    known = dict(re.findall(r"(\w+) \((\w+)\)", text.rpartition("no convolution to reparameterize")[2]))
    for line in text.splitlines():
        if cells := re.match(r"\| (\w+) \| (\w+) \|", line):
            known.setdefault(*cells.groups())
    families = sorted(set(timm.list_modules()) - OWN)
    return {family: known.get(family) or timm.list_models(module=family)[0] for family in families}


MODELS = smallest()


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


def test_the_list_is_whole() -> None:
    assert len(MODELS) > 80
    assert {"resnet", "vision_transformer", "convit", "swin_transformer", "xcit", "byobnet"} <= MODELS.keys()


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


@pytest.mark.parametrize("family", MODELS)
def test_attach_and_detach(family: str) -> None:
    with torch.device("meta"):  # no memory, and no time for random numbers
        model = timm.create_model(MODELS[family])
    model.eval()
    before = Snapshot(model)
    recorder = tcnn_probe.record(model, probes=tcnn_probe.PROBES, images=2)
    try:
        assert [*model.state_dict()] == [*before.state]
        assert everywhere() == before.torch, "global hooks are for the time of a forward"
    finally:
        recorder.remove()
    check_same(before, Snapshot(model))


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_byobnet", "test_efficientnet", "test_mambaout"])
def test_after_forwards(name: str) -> None:
    """One that ends, and one that does not."""
    model = timm.create_model(name).eval()
    images = torch.randn(2, *model.pretrained_cfg["input_size"])
    with torch.no_grad():
        expected = model(images)
        before = Snapshot(model)
        with tcnn_probe.record(model):
            assert torch.equal(model(images), expected)
            with pytest.raises((RuntimeError, AssertionError)):
                model(images[:, :2])
            assert everywhere() == before.torch
    check_same(before, Snapshot(model))
