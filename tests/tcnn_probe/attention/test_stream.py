"""Attention as a stream: all attention of a forward,
by name, equals brute force, and nothing is left behind.
"""

import gc
import sys
import weakref
from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import tcnn_model
import tcnn_probe
from tcnn_model import GPSA
from tcnn_model.gpsa import layer as layer_module
from tcnn_probe.attention import reconstruction
from tcnn_probe.attention.gated import GATED_LAYERS
from tcnn_probe.attention.reconstruction import discrepancy
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.contracts.helpers import Trace, clean, images, recorded, vit
from tests.tcnn_probe.oracle import gpsa_attention


class Several(nn.Module):
    """Model that attends twice in one call, and whose module named after attention only gates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 12, 4, 4)
        self.blocks = nn.ModuleList([Twice()])
        self.gate = WeighsNothingAttention()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).mT
        return self.gate(self.blocks[0](tokens))


class Twice(nn.Module):
    num_heads = 3

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            # Queries are three times as large, so that attention is not uniform.
            q = (3 * x).unflatten(-1, (3, 4)).transpose(1, 2)
            x = ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)
        return x


class WeighsNothingAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        # The product of the softmax and the input is gating: there is no sum over keys.
        return x * x.softmax(-1)


def test_every_attention_equals_the_models() -> None:
    torch.manual_seed(0)
    for model in (vit().double(), Several().eval().double()):
        x = images().double()
        before = Trace(model)
        maps = dict[str, Tensor]()
        # The gate's softmax has three axes, but is not attention.
        expected = {
            reference.layer: reference.weights
            for reference in attention_of(model, x)
            if reference.weights.ndim == 4
        }
        output = model(x)
        with tcnn_probe.attention_stream(
            # Weights are read during the call, as nothing is kept after the forward.
            model,
            lambda call, s=maps: s.update({call.name: call.weights(slice(None))}),
        ) as s:
            assert torch.equal(model(x), output)
        assert before == Trace(model)
        assert clean()
        assert list(s.layers) == list(expected)
        for layer, weights in expected.items():
            # The second attention of a module has the module's name and a number.
            assert s.layers[layer] is model.get_submodule(layer.split("#")[0])
            # In float64, logits up to 1e3 have errors of about 1e-13.
            np.testing.assert_allclose(maps[layer][:, 0].detach(), weights, rtol=0, atol=1e-10)
    assert list(expected) == ["blocks.0", "blocks.0#1"]
    assert s.unsupported == {"gate": "a softmax that is not multiplied with values"}


def test_listeners_see_the_model_output_and_choose_layers() -> None:
    class Count(tcnn_probe.attention.listener.AttentionListener):
        def __init__(self) -> None:
            self.kept: list[list[str]] = []
            self.failed = 0

        def ends(self, layers: Collection[str], output: Tensor) -> None:
            # The output is the model's, 35 tokens of 12 channels, not that of the last layer.
            assert output.shape == (3, 35, 12)
            self.kept.append(list(layers))

        def fails(self) -> None:
            self.failed += 1

    model = Several().eval()
    count = Count()
    stream = tcnn_probe.attention.stream.AttentionStream(model, count, layers=["blocks.0", "gate"])
    stream.attach()
    model(images())
    with pytest.raises(RuntimeError):
        # One channel instead of two makes the forward fail, which must end the stream's records of
        # it.
        model(images()[:, :1])
    stream.close()
    model(images())
    assert count.kept == [["blocks.0", "blocks.0#1"]]
    assert count.failed == 1
    assert not stream.attached


def test_an_error_in_the_callback_names_the_layer_and_leaves_nothing_behind() -> None:
    model = vit()
    before = Trace(model)
    with (
        pytest.raises(ZeroDivisionError) as caught,
        tcnn_probe.attention_stream(model, lambda call: 1 / 0),
    ):
        model(images())
    assert "'blocks.0.attn'" in caught.value.__notes__[0]
    assert before == Trace(model)
    assert clean()


def test_nothing_of_a_forward_is_kept() -> None:
    model = vit()
    seen: list[weakref.ref[tcnn_probe.Attention]] = []
    with (
        torch.no_grad(),
        tcnn_probe.attention_stream(model, lambda call: seen.append(weakref.ref(call))),
    ):
        model(images())
        # Objects with reference cycles are freed only by the collector.
        gc.collect()
        assert [call() for call in seen] == [None, None]


def test_each_layer_is_checked_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[nn.Module] = []
    # Calls are counted where they are made; the check computes attention a second time, too slow
    # for every forward.
    monkeypatch.setattr(
        reconstruction,
        "discrepancy",
        lambda attention, module: (
            checked.append(module),
            discrepancy(attention, module),
        )[1],
    )
    model = vit()
    with tcnn_probe.attention_stream(model, lambda call: None):
        for _ in range(3):
            model(images())
    assert checked == [block.attn for block in model.blocks]


def whole_attention(layer: nn.Module, x: Tensor) -> Tensor:
    """Return A = (1 - g) C + g P, for ConViT by timm's own method."""
    return gpsa_attention(layer, x) if isinstance(layer, GPSA) else layer.get_attention(x).detach()


def gated_models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return T-CNNs on maps below and above the size from
    which no N x N weights are formed, and timm's ConViT.
    """
    torch.manual_seed(0)
    tcnn = tcnn_model.reparameterize(
        # With timm's default, zero-initialised norms would hide the converted layers behind their
        # shortcuts.
        timm.create_model(
            "resnet10t", num_classes=3, channels=(8, 16, 32, 48), zero_init_last=False
        )
    ).eval()
    convit = timm.create_model(
        "convit_tiny",
        img_size=80,
        depth=3,
        local_up_to_layer=2,
        embed_dim=24,
        num_heads=4,
        num_classes=3,
    ).eval()
    with torch.no_grad():
        for name, parameter in tcnn.named_parameters():
            if name.endswith((".query", ".key")):
                parameter.mul_(20)  # initial content attention is uniform
            if name.endswith((".gating", ".raw_locality", ".center")):
                # Initially, all heads share one gate and locality, so that exchanged heads would
                # not show.
                parameter.add_(torch.rand_like(parameter) - 0.5)
        for name, parameter in convit.named_parameters():
            if "qk.weight" in name or "gating_param" in name:
                parameter.normal_(std=0.5)
    return {
        "64 pixels": (tcnn, torch.randn(2, 3, 64, 96)),
        # At 224 pixels a layer's map is too large for N x N weights, so that the other path runs.
        "224 pixels": (tcnn, torch.randn(1, 3, 224, 224)),
        "convit": (convit, torch.randn(2, 3, 80, 80)),
    }


@pytest.mark.parametrize("case", ["64 pixels", "224 pixels", "convit"])
def test_gated_attention_is_shown_whole_and_once(case: str) -> None:
    model, x = gated_models()[case]
    model, x = model.double(), x.double()
    expected = dict[str, Tensor]()
    handles = []
    gated = {name: m for name, m in model.named_modules() if isinstance(m, GATED_LAYERS)}
    for name, layer in gated.items():
        keep = partial(
            lambda name, layer, args, _: expected.update({name: whole_attention(layer, args[0])}),
            name,
        )
        handles.append(layer.register_forward_hook(keep))
    with torch.no_grad():
        output = model(x)
        for handle in handles:
            handle.remove()
        before = Trace(model)
        calls = list[tuple[str, Tensor]]()
        with tcnn_probe.attention_stream(
            model, lambda a: calls.append((a.name, a.weights()))
        ) as stream:
            assert torch.equal(model(x), output)
        assert before == Trace(model)
    assert clean()
    softmax_layers = ["blocks.2.attn"] if case == "convit" else []
    assert [name for name, _ in calls] == [*gated, *softmax_layers] == list(stream.layers)
    assert not stream.unsupported
    for name, weights in calls[: len(gated)]:
        # Logits are some hundred in float64: 1e-10 is far above rounding and below any mistake.
        np.testing.assert_allclose(weights[:, 0], expected[name], rtol=0, atol=1e-10)
        # Uniform attention would be right for any parameters, so the model must not have it.
        assert (expected[name].std() > 1e-3 * expected[name].mean()).all()


@pytest.mark.parametrize("case", ["64 pixels", "convit"])
def test_edits_in_a_callback_equal_ablations(case: str) -> None:
    """Edits are zero, mean and given attention,
    for softmax attention in the same model, too, and with gradients.
    """
    model, x = gated_models()[case]
    model, x = model.double(), x.double()
    heads = {layer: [0, 2] for layer in layers_of(model)}
    for mode in ("zero", "mean"):

        def answer(attention: tcnn_probe.Attention, mode: Any = mode) -> tcnn_probe.HeadEdit | None:
            return None if attention.queries == 1 else tcnn_probe.HeadEdit([0, 2], mode)

        gradients = []
        for edited in (
            lambda: tcnn_probe.attention_stream(model, answer),
            lambda mode=mode: tcnn_probe.ablate(model, heads, mode),
        ):
            model.zero_grad()
            with edited():
                model(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        # The two ways add up the same terms in different order, in float64.
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def layers_of(model: nn.Module) -> list[str]:
    with (
        torch.no_grad(),
        tcnn_probe.attention_stream(model, lambda attention: None) as stream,
    ):
        model(torch.randn(1, 3, 80, 80, dtype=torch.float64))
    return list(stream.layers)


@pytest.mark.parametrize("case", ["64 pixels", "convit"])
def test_edits_combine_with_ablations_and_recorders(case: str) -> None:
    """Ablated heads and gates stay ablated;
    a recorder outside or inside sees attention before the edits.
    """
    model, x = gated_models()[case]
    model, x = model.double(), x.double()
    # The first layer is edited, so that all later layers are affected.
    layer = layers_of(model)[0]

    def answer(attention: tcnn_probe.Attention) -> tcnn_probe.HeadEdit | None:
        return tcnn_probe.HeadEdit([1]) if attention.name == layer else None

    def stream() -> Any:
        return tcnn_probe.attention_stream(model, answer)

    with torch.no_grad():
        plain = model(x)
        # One ablation edits heads and the other gates, which compose by different rules.
        for heads, mode in (({layer: [0]}, "zero"), (layer, "positional")):
            with (
                tcnn_probe.ablate(model, heads, mode),
                tcnn_probe.ablate(model, {layer: [1]}),
            ):
                expected = model(x)
            with tcnn_probe.ablate(model, heads, mode), stream():
                torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12)
        with tcnn_probe.record(model) as recorder, stream():
            # An edit without effect would pass the comparison below.
            assert not torch.allclose(model(x), plain)
            recorder.mark(epoch=0)
        around = recorder.dataset.entropy.load()
        with stream():
            recorder = recorded(model, x)
        # Both recorders see the first layer before its edit and later layers after it, so that all
        # statistics agree.
        np.testing.assert_allclose(around, recorder.dataset.entropy, rtol=1e-9)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        *((case, "stream ablation") for case in ("64 pixels", "convit", "apart", "multihead")),
        ("convit", "ablation stream"),
        *(("fused", kinds) for kinds in ("stream stream", "stream ablation", "ablation stream")),
    ],
)
def test_the_last_that_names_a_head_edits_it(case: str, kinds: str) -> None:
    """Streams and ablations nest in any order;
    a third stream observes the attention before all edits.
    """
    torch.manual_seed(0)
    softmax_models = {
        "fused": (vit(), images()),
        "apart": (Several().eval(), images()),
        "multihead": (
            nn.TransformerEncoderLayer(12, 3, 17, batch_first=True).eval(),
            torch.randn(2, 5, 12),
        ),
    }
    model, x = (softmax_models if case in softmax_models else gated_models())[case]
    model, x = model.double(), x.double()
    names = {"fused": "blocks.0.attn", "apart": "blocks.0", "multihead": "self_attn"}
    layer = names.get(case) or layers_of(model)[0]
    shown: list[Tensor] = []

    def look(attention: tcnn_probe.Attention) -> None:
        if attention.name == layer:
            shown.append(attention.weights())

    def editing(kind: str, heads: list[int], mode: Any) -> Any:
        if kind == "ablation":
            return tcnn_probe.ablate(model, {layer: heads}, mode)
        edit = tcnn_probe.HeadEdit(heads, mode)
        return tcnn_probe.attention_stream(
            model, lambda attention: edit if attention.name == layer else None
        )

    outer, inner = kinds.split()
    with torch.no_grad():
        with editing("ablation", [0], "zero"), editing("ablation", [1], "mean"):
            expected = model(x)
        with tcnn_probe.attention_stream(model, look):
            assert not torch.allclose(model(x), expected)
        with (
            editing(outer, [0, 1], "zero"),
            # Head 1 is named twice, with different modes: the inner one decides.
            editing(inner, [1], "mean"),
            tcnn_probe.attention_stream(model, look),
        ):
            torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12)
    plain, edited = shown
    # An inner stream must be shown the model's attention, not the result of outer edits.
    torch.testing.assert_close(edited, plain, rtol=1e-12, atol=0)


@torch.no_grad()
def test_an_edited_gated_layer_runs_once_and_an_unedited_one_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A depthwise layer on a large map forms no outputs of single heads,
    unless a hook needs them.
    """
    torch.manual_seed(0)
    # A map of this size counts as large.
    monkeypatch.setattr(layer_module, "_WEIGHTED_FROM", 8 * 13 * 17)
    layer = GPSA(8, 8, 3, padding=1, groups=8)
    model, x = nn.Sequential(layer), torch.randn(2, 8, 13, 17)
    assert layer._weights_first(x)
    plain = model(x)
    with tcnn_probe.attention_stream(model, lambda attention: None) as stream:
        assert torch.equal(model(x), plain)
    assert list(stream.layers) == ["0"]
    runs: list[int] = []
    handle = layer.head_queries.register_forward_hook(lambda *call: runs.append(1))
    with tcnn_probe.attention_stream(
        model, lambda attention: tcnn_probe.HeadEdit(range(attention.heads))
    ):
        assert layer.bias is not None
        assert torch.equal(model(x), layer.bias[:, None, None].expand_as(plain))
    handle.remove()
    assert len(runs) == 1
    assert torch.equal(model(x), plain)


def test_an_edited_multihead_attention_is_shown_once() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(12, 3, 17, batch_first=True).eval()
    with tcnn_probe.attention_stream(model, lambda attention: tcnn_probe.HeadEdit([1])):
        recorder = recorded(model, torch.randn(2, 5, 12))
    # The softmax of the edit's own computation must not be recorded as a second attention.
    assert recorder.layers == ("self_attn",)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (tcnn_probe.HeadEdit([0, 7]), "distinct heads below 3 of 'blocks.0.attn'"),
        # Each edit is refused for its own reason: head out of range, repeated, wrong mode, or wrong
        # shape.
        (tcnn_probe.HeadEdit([1, 1]), "distinct heads"),
        (tcnn_probe.HeadEdit([1], "men"), "give='zero' or 'mean'"),  # type: ignore[arg-type]
        (
            tcnn_probe.HeadEdit([0, 1], attention=torch.ones(1, 1, 1, 36, 36)),
            "expected attention of shape",
        ),
    ],
)
def test_invalid_edits_are_refused(edit: tcnn_probe.HeadEdit, message: str) -> None:
    model = vit()
    before = Trace(model)
    with (
        pytest.raises(ValueError, match=message),
        tcnn_probe.attention_stream(model, lambda attention: edit),
    ):
        model(images())
    assert before == Trace(model)
    assert clean()


def test_attention_given_to_mask_units_is_in_the_order_of_the_maps() -> None:
    """Hiera orders tokens by unit: giving its own attention back, in rows, must change nothing."""
    torch.manual_seed(0)
    # The image is not square, so that exchanged rows and columns of units would show.
    sizes = {"img_size": (64, 96), "embed_dim": 16, "num_heads": 1}
    model = timm.create_model("hiera_tiny_224", stages=(1, 1, 1, 1), **sizes)
    model = model.eval().double()
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    # Initially, all weights are so small that attention is uniform, in any order.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)

    def give_back(attention: tcnn_probe.Attention) -> tcnn_probe.HeadEdit:
        assert attention.order is not None
        heads = range(attention.heads)
        return tcnn_probe.HeadEdit(heads, attention=attention.weights())

    with torch.no_grad():
        expected = model(images)
        with tcnn_probe.attention_stream(model, give_back) as stream:
            output = model(images)
    assert len(stream.layers) == 4
    # Rounding in the softmax and four stages is below 1e-12, so that 1e-10 leaves two digits.
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_a_module_costs_few_calls_of_functions() -> None:
    """On a GPU the Python of hooks is what a followed forward costs."""
    package = str(Path(tcnn_probe.__file__).parent)
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(package)

    counts = []
    for depth in (3, 13):
        model = nn.Sequential(
            nn.Sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth))))
        )
        with torch.no_grad(), tcnn_probe.attention_stream(model, lambda attention: None):
            model(torch.ones(1, 3, 2))  # the first forward is tracked
            calls = 0
            sys.setprofile(count)
            model(torch.ones(1, 3, 2))
            sys.setprofile(None)
        counts.append(calls)
    # Two hooks, which ask whether they listen and tell the stream, the stream's note of shapes, and
    # the mode, which asks whether the function may attend; before torch 2.15 it is asked at the
    # beginning of a forward which modules are compiled.
    assert 0 < counts[1] - counts[0] <= 10 * 10
