"""Attention as a stream: every one of a forward, by name, as brute force has it; and nothing kept or left behind."""

import gc

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention import stream
from tcnn_probe.attention.rebuild import discrepancy
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.contracts.helpers import Trace, clean, images, vit


class Several(nn.Module):
    """Attends twice in one call, and takes a softmax that weighs nothing in a module named after attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(2, 12, 4, 4), nn.ModuleList([Twice()])
        self.gate = SoftmaxAttention()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).mT
        return self.gate(self.blocks[0](tokens))


class Twice(nn.Module):
    num_heads = 3

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            q = (3 * x).unflatten(-1, (3, 4)).transpose(1, 2)
            x = ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)
        return x


class SoftmaxAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.softmax(-1)


def test_every_attention_is_shown_as_the_model_has_it() -> None:
    torch.manual_seed(0)
    for model in (vit().double(), Several().eval().double()):
        x, before, seen = images().double(), Trace(model), dict[str, Tensor]()
        expected = {whole.layer: whole.weights for whole in attention_of(model, x) if whole.weights.ndim == 4}
        output = model(x)
        with tcnn_probe.attention_stream(
            model, lambda call, s=seen: s.update({call.name: call.weights(slice(None))})
        ) as s:
            assert torch.equal(model(x), output)
        assert before == Trace(model)
        assert clean()
        assert list(s.layers) == list(expected)
        for layer, weights in expected.items():
            assert s.layers[layer] is model.get_submodule(layer.split("#")[0])
            # In float64, where logits up to 1e3 are known to some 1e-13.
            np.testing.assert_allclose(seen[layer][:, 0].detach(), weights, rtol=0, atol=1e-10)
    assert list(expected) == ["blocks.0", "blocks.0#1"]
    assert s.unsupported == {"gate": "a softmax that weighs no values in a matrix product"}


def test_listeners_see_what_has_weighed_values_and_choose_layers() -> None:
    class Count(tcnn_probe.attention.stream.AttentionListener):
        def __init__(self) -> None:
            self.kept: list[list[str]] = []
            self.failed = 0

        def attends(self, call: tcnn_probe.AttentionCall) -> str:
            return call.name

        def ends(self, kept: list[str], output: Tensor) -> None:
            assert output.shape == (3, 35, 12)
            self.kept.append(list(kept))

        def fails(self) -> None:
            self.failed += 1

    model, count = Several().eval(), Count()
    stream = tcnn_probe.attention.stream.AttentionStream(model, count, layers=["blocks.0", "gate"])
    model(images())
    with pytest.raises(RuntimeError):
        model(images()[:, :1])
    stream.close()
    model(images())
    assert count.kept == [["blocks.0", "blocks.0#1"]]
    assert count.failed == 1
    assert not stream.attached


def test_an_error_of_the_callback_names_the_layer_and_leaves_nothing() -> None:
    model = vit()
    before = Trace(model)
    with pytest.raises(ZeroDivisionError) as caught, tcnn_probe.attention_stream(model, lambda call: 1 / 0):
        model(images())
    assert "'blocks.0.attn'" in caught.value.__notes__[0]
    assert before == Trace(model)
    assert clean()


def test_nothing_of_a_forward_is_kept() -> None:
    model = vit()
    with torch.no_grad(), tcnn_probe.attention_stream(model, lambda call: call):
        model(images())
        gc.collect()
        assert not any(type(x) is tcnn_probe.AttentionCall for x in gc.get_objects())


def test_each_layer_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[nn.Module] = []
    monkeypatch.setattr(
        stream, "discrepancy", lambda seen, module: (checked.append(module), discrepancy(seen, module))[1]
    )
    model = vit()
    with tcnn_probe.attention_stream(model, lambda call: None):
        for _ in range(3):
            model(images())
    assert checked == [block.attn for block in model.blocks]
