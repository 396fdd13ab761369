"""Recorders leave each kind of model unchanged: while attached,
after forwards that end or fail, and when removed.
"""

from typing import Any

import pytest
import timm
import torch

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace, global_state

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
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "embed_dim": 8,
        "depths": (2,),
        "num_heads": (2,),
    },
}


def test_a_trace_detects_hooks() -> None:
    model = timm.create_model("test_vit")
    before = Trace(model)
    assert before == Trace(model)
    with tcnn_probe.record(model):
        assert before != Trace(model)
    assert before == Trace(model)
    model.norm.weight.register_hook(lambda gradient: None)
    assert before != Trace(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_recording_leaves_the_model_unchanged(name: str) -> None:
    model = timm.create_model(name, num_classes=5, **MODELS[name]).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        before = Trace(model)
        with tcnn_probe.record(model, probes=tcnn_probe.PROBES, images=2):
            assert [*model.state_dict()] == [*before.state]
            assert global_state() == before.torch, "global hooks are for the time of a forward"
            assert torch.equal(model(images), expected)
            # None of these models accepts two channels.
            with pytest.raises((RuntimeError, AssertionError)):
                model(images[:, :2])
            assert global_state() == before.torch
        assert before == Trace(model)
