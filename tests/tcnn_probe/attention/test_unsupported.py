"""Layers without attention between tokens are listed with a reason,
and layers beside them are recorded.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import xarray as xr
from timm.models import byoanet, byobnet
from torch import Tensor, distributed, nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import recorded

# Models are the smallest of each family that keep the layer in question.
TINY = {"img_size": (32, 48), "embed_dim": 24, "depth": 2, "num_heads": 3}
DAVIT = {"depths": (1, 1), "embed_dims": (32, 64), "num_heads": (2, 4)}

# Model: options, size, classes of listed layers with a part of the reason, and classes of recorded
# layers.
CASES: dict[str, tuple[dict[str, Any], tuple[int, int], dict[str, str], dict[str, int]]] = {
    "xcit_nano_12_p8_224": (
        TINY,
        (32, 48),
        {"XCA": "cross-covariance"},
        {"ClassAttn": 2},
    ),
    "edgenext_xx_small": (
        {},
        (64, 96),
        {"CrossCovarianceAttn": "cross-covariance"},
        {},
    ),
    "davit_tiny": (
        DAVIT,
        (64, 96),
        {"ChannelAttention": "between channels"},
        {"WindowAttention": 2},
    ),
    "mobilevitv2_050": (
        {},
        (64, 96),
        {"LinearSelfAttention": "one context vector"},
        {},
    ),
    "poolformer_s12": ({}, (64, 96), {"Pooling": "average pooling"}, {}),
    "efficientformer_l1": (
        {"embed_dims": (8, 12, 16, 24), "depths": (1,) * 4},
        (224, 224),
        {"Pooling": "average pooling"},
        {"Attention": 1},
    ),
    "efficientvit_b0": ({}, (64, 96), {"LiteMLA": "ReLU kernel"}, {}),
    "coat_tiny": (
        {"img_size": (64, 96), "embed_dims": (16,) * 4},
        (64, 96),
        {"FactorAttnConvRelPosEnc": "of the keys alone"},
        {},
    ),
    "lambda_resnet26t": ({}, (64, 96), {"LambdaLayer": "summarised"}, {}),
    "skresnet18": ({}, (64, 96), {"SelectiveKernelAttn": "between branches"}, {}),
    "resnest14d": ({}, (64, 96), {"SplitAttn": "between branches"}, {}),
    "gcresnet50t": ({}, (64, 96), {"GlobalContext": "one global context vector"}, {}),
    "swiftformer_xs": (
        {},
        (64, 96),
        {"EfficientAdditiveAttention": "one global query"},
        {},
    ),
    "efficientvim_m1": ({}, (128, 192), {"HSMSSD": "state-space"}, {}),
    "csatv2": (
        {},
        (128, 192),
        {"SpatialAttention": "between the images"},
        {"Attention": 4},
    ),
    "bat_resnext26ts": (
        {},
        (256, 256),
        dict.fromkeys(("BatNonLocalAttn", "BilinearAttnTransform"), "no softmax"),
        {},
    ),
    "vit_dwee_patch16_reg1_gap_256": (
        TINY,
        (32, 48),
        {"DiffAttention": "A1 - lambda"},
        {},
    ),
    "vit_dpwee_patch16_reg1_gap_256": (
        TINY,
        (32, 48),
        {"DiffParallelScalingBlock": "A1 - lambda"},
        {},
    ),
    # A CNN without attention has an empty list.
    "resnet18": ({}, (64, 96), {}, {}),
}


CONFIGS = byobnet.model_cfgs | byoanet.model_cfgs


def narrow(name: str, **options: Any) -> nn.Module:
    return byobnet.ByobNet(replace(CONFIGS[name], width_factor=0.5), **options)


@pytest.mark.study(but=["xcit_nano_12_p8_224", "edgenext_xx_small", "lambda_resnet26t", "resnet18"])
@pytest.mark.parametrize("name", CASES)
def test_unsupported_layers_have_reasons(name: str) -> None:
    options, size, listed, recorded = CASES[name]
    # Layers are named by class, as timm moves modules between files.
    make = narrow if name in CONFIGS else timm.create_model
    model = make(name, num_classes=5, **options).eval()
    modules = dict(model.named_modules())

    def classes(layers: object) -> list[str]:
        return [type(modules[layer.split("#")[0]]).__name__ for layer in layers]

    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(torch.randn(2, 3, *size))
        unsupported = recorder.unsupported
        layers = recorder.layers
        if recorded:
            recorder.mark(epoch=0)
            assert recorder.dataset.entropy.notnull().any("head").all()
        else:
            with pytest.raises(RuntimeError, match="nothing to mark: no attention was seen"):
                recorder.mark(epoch=0)

    assert {kind: classes(layers).count(kind) for kind in classes(layers)} == recorded
    expected = [layer for layer, module in modules.items() if type(module).__name__ in listed]
    # The order is that of the model, for users who look for the first missing layer.
    assert list(unsupported) == expected, "all of them, in the model's order"
    for layer, reason in unsupported.items():
        assert listed[classes([layer])[0]] in reason
    # No layer whose name says attention may be ignored silently.
    for layer, module in modules.items():
        if re.search("Attn|Attention", type(module).__name__):
            assert any(path.split("#")[0].startswith(layer) for path in (*unsupported, *layers)), (
                layer
            )


@pytest.mark.parametrize("fused", [True, False])
def test_differential_attention_is_listed_fused_or_not(fused: bool) -> None:
    """Its two softmaxes must not count as two layers of half the width,
    nor as a softmax that weighs no values.
    """
    model = timm.create_model("vit_dwee_patch16_reg1_gap_256", **TINY).eval()
    # The two implementations call different functions.
    for block in model.blocks:
        block.attn.fused_attn = fused
    with pytest.raises(ValueError, match="A1 - lambda A2 of two softmaxes"):
        tcnn_probe.attention_maps(model, torch.randn(2, 3, 32, 48))
    with pytest.raises(ValueError, match="A1 - lambda A2 of two softmaxes"):
        tcnn_probe.ablate(model, "blocks.0.attn")


class Gate(nn.Module):
    """Layer on features (B, 4, 15) with a softmax."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x)


GATES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "a gate, as those of mixtures of experts": (lambda x: x * x.softmax(-1), ()),
    # There are a softmax and a product, but the softmax does not weigh values.
    "a product of other matrices": (lambda x: x.mul(x.softmax(-1)).mT @ x, ()),
    "a product of what was gated": (lambda x: (x * x.softmax(-1)) @ x.mT, ()),
    "a product of the softmax": (lambda x: x.softmax(-1) @ x.mT, ("2",)),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_a_softmax_that_weighs_no_values_is_ignored(gate: str) -> None:
    way, layers = GATES[gate]
    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(2), Gate(way)).eval()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(torch.randn(2, 3, 24, 40))
        # Only the last one is a weighted sum of values, and therefore attention.
        assert recorder.layers == layers
        assert layers or "not multiplied with values" in recorder.unsupported["2"]
        # A layer that is not recorded lacks no variables, either.
        assert {layer for reasons in recorder.missing.values() for layer in reasons} == {*layers}


class Attention(nn.Module):
    attends = True

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) if self.attends else x


class Switched(nn.Module):
    """A layer that attends, and another that never attends and is not always called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 8, 8)
        self.first = Attention()
        self.last = Attention()
        # Like an expert or an auxiliary head, it is not called in every forward.
        self.last.attends, self.all = False, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x).flatten(2).mT)
        return self.last(x) if self.all else x


def test_reasons_are_stored_at_every_mark(tmp_path: Path) -> None:
    """This holds also for a resumed run that does not call the layer."""
    model = Switched().eval()
    x = torch.randn(2, 3, 24, 40)
    # The second run does not call the last layer.
    for epoch, model.all in enumerate((True, False)):
        with (
            tcnn_probe.record(model, tmp_path / "run.zarr") as recorder,
            torch.no_grad(),
        ):
            model(x)
            recorder.mark(epoch=epoch)
        stored = xr.open_zarr(tmp_path / "run.zarr").attrs
        assert json.loads(stored["unsupported"]) == {
            "last": "no softmax between tokens was seen while it ran"
        }


def test_a_layer_that_attends_later_is_recorded() -> None:
    model = Switched().eval()
    x = torch.randn(2, 3, 24, 40)
    model.all = True
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(x)
        assert list(recorder.unsupported) == ["last"]
        # A layer that did not attend at first is not refused for ever.
        model.last.attends = True
        model(x)
        assert recorder.unsupported == {}
        recorder.mark(epoch=0)
    assert json.loads(recorder.dataset.attrs["unsupported"]) == {}
    # The second layer attended in one of two forwards.
    assert recorder.dataset.images.values.tolist() == [[4, 2]]


class Channels(nn.Module):
    """XCiT's attention between the channels of each head,
    as vit-pytorch writes it; heads are wider than tokens.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.LayerNorm(24)
        self.to_qkv = nn.Linear(24, 3 * 5 * 7, bias=False)
        self.temperature = nn.Parameter(torch.ones(5, 1, 1))
        self.attend = nn.Softmax(-1)
        self.to_out = nn.Linear(5 * 7, 24)

    def forward(self, x: Tensor) -> Tensor:
        # (B, N, 3 * heads * d) to (3, B, heads, d, N)
        qkv = self.to_qkv(self.norm(x)).flatten(1, -2).unflatten(-1, (3, 5, 7))
        q, k, v = qkv.permute(2, 0, 3, 4, 1)
        q, k = (F.normalize(t, dim=-1) * self.temperature.exp() for t in (q, k))
        if self.how == "fused":
            out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:
            logits = torch.einsum("bhin,bhjn->bhij", q, k) if self.how == "einsum" else q @ k.mT
            attention = self.attend(logits)
            out = attention @ v
            if self.how == "einsum":
                out = torch.einsum("bhij,bhjn->bhin", attention, v)
        return x + self.to_out(out.flatten(1, 2).mT).view(x.shape)


class Crossed(nn.Module):
    """Attention between channels, in two shapes of tokens, and then between tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        self.on_grid, self.in_sequence = Channels(how), Channels(how)
        self.tokens = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.on_grid(self.patches(x).movedim(1, -1))
        x = self.in_sequence(x.flatten(1, 2))
        return self.tokens(x, x, x)[0]


@pytest.mark.parametrize("size", [(12, 44), (4, 28)])  # 33 and 7 tokens
@pytest.mark.parametrize("how", ["product", "einsum", "fused"])
def test_attention_between_channels_of_wide_heads(how: str, size: tuple[int, int]) -> None:
    """Heads have 7 channels, which can be as many as there are tokens."""
    model = Crossed(how).eval()
    recorder = recorded(model, torch.randn(2, 3, *size))
    assert recorder.layers == ("tokens",)
    reasons = dict.fromkeys(("on_grid", "in_sequence"), "attention between channels")
    assert recorder.unsupported.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in recorder.unsupported[name]


class ChannelsOfTheImage(nn.Module):
    """Attention between the channels of a map (DANet), in the module that gets the image, and then
    between its cells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 7, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2)
        energy = torch.bmm(x, x.permute(0, 2, 1))
        energy = energy.amax(-1, keepdim=True).expand_as(energy) - energy
        x = x + torch.bmm(energy.softmax(-1), x)
        return (x.mT @ x).softmax(-1) @ x.mT


@pytest.mark.parametrize("size", [(12, 44), (4, 28)])
def test_attention_between_channels_of_the_image(size: tuple[int, int]) -> None:
    recorder = recorded(ChannelsOfTheImage().eval(), torch.randn(2, 3, *size))
    assert recorder.unsupported == {"": "attention between channels, not between tokens"}
    assert recorder.layers == ("#1",)
    assert recorder.dataset.attention_distance.notnull().all()


class WholeViews(nn.Module):
    """Attention between views whose tokens are their whole maps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.patches = nn.Conv2d(3, 7, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.patches(x.flatten(0, 1)).reshape(len(x), 1, x.shape[1], -1)
        if self.how == "fused":
            return F.scaled_dot_product_attention(maps, maps, maps)
        if self.how == "einsum":
            logits = torch.einsum("bhin,bhjn->bhij", maps, maps)
            return torch.einsum("bhij,bhjn->bhin", logits.softmax(-1), maps)
        return (maps @ maps.mT).softmax(-1) @ maps


@pytest.mark.parametrize("how", ["product", "einsum", "fused"])
def test_attention_between_whole_views_is_not_between_channels(how: str) -> None:
    images = torch.randn(2, 5, 3, 12, 44)
    model = WholeViews(how).eval()
    with pytest.warns(RuntimeWarning, match="5 keys: no grid found"):
        recorder = recorded(model, images)
    assert recorder.unsupported == {}
    maps = model.patches(images.flatten(0, 1)).reshape(2, 5, -1).double()
    scale = maps.shape[-1] ** -0.5 if how == "fused" else 1
    attention = (maps @ maps.mT * scale).softmax(-1)
    entropy = -attention.xlogy(attention).sum(-1).mean()
    assert recorder.dataset.entropy.item() == pytest.approx(entropy.item(), rel=1e-4)


class HeadsFirst(nn.Module):
    """Attention in (heads, images, queries, keys)."""

    def __init__(self, named: bool, fused: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.fused = fused
        if named:
            self.num_heads = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT.unflatten(2, (3, 4)).permute(2, 0, 1, 3)
        if self.fused:
            return F.scaled_dot_product_attention(x, x, x)
        return (x @ x.mT).softmax(-1) @ x


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("named", "count"), [(True, 1), (True, 2), (True, 6), (False, 5)])
def test_heads_before_images_are_not_taken_for_images(named: bool, count: int, fused: bool) -> None:
    model, x = HeadsFirst(named, fused), torch.randn(count, 3, 16, 24)
    with tcnn_probe.record(model.eval()) as recorder, torch.no_grad():
        model(x)
        with pytest.raises(RuntimeError, match="heads before the images"):
            recorder.mark(epoch=0)
        recorder.discard()


class NestedAttention(nn.Module):
    """Attention between the patches of images of several sizes, in nested tensors."""

    def __init__(self, layout: torch.layout, attend: str) -> None:
        super().__init__()
        self.layout, self.attend = layout, attend
        self.patches = nn.Conv2d(3, 8, 16, 16)
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, images: list[Tensor]) -> Tensor:
        patches = [self.patches(x[None])[0].flatten(1).mT for x in images]
        tokens = torch.nested.nested_tensor(patches, layout=self.layout)
        if self.attend == "padded":
            tokens = torch.nested.to_padded_tensor(tokens, 0.0)
        q, k, v = (layer(tokens) for layer in self.inner)
        if self.attend == "softmax":
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
@pytest.mark.parametrize(
    ("layout", "attend"),
    [
        (torch.jagged, "fused"),
        (torch.strided, "fused"),
        (torch.strided, "softmax"),
        (torch.strided, "padded"),
    ],
)
@torch.no_grad()
def test_nested_tensors_have_a_reason(layout: torch.layout, attend: str) -> None:
    torch.manual_seed(0)
    model = NestedAttention(layout, attend).eval()
    images = [torch.randn(3, 48, 80), torch.randn(3, 32, 48)]
    expected = model(images)
    with tcnn_probe.record(model, images=[0]) as recorder:
        output = model(images)
        if attend == "padded":
            assert recorder.layers == ("",)
            assert not recorder.unsupported
        else:
            assert list(recorder.unsupported) == [""]
            assert "nested tensors" in recorder.unsupported[""]
        with recorder.pause():
            model(images)
    for actual, exact in zip(output.unbind(), expected.unbind(), strict=True):
        assert torch.equal(actual, exact)


class NestedEncoder(nn.Module):
    """torch's encoder on nested tensors, which it can only run in its fast path,
    before attention that is padded.
    """

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.last = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, images: list[Tensor]) -> Tensor:
        tokens = torch.nested.nested_tensor(images)
        padded = torch.nested.to_padded_tensor(self.encoder(tokens), 0.0)
        return self.last(padded, padded, padded)[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_encoder_on_nested_tensors_runs_in_its_fast_path() -> None:
    torch.manual_seed(0)
    model = NestedEncoder().eval()
    tokens = [torch.randn(7, 8), torch.randn(5, 8)]
    # Hooks, also of others, turn off the fast path of the encoder, but not that of its attention.
    model.encoder.layers[0].register_forward_hook(lambda *_: None)
    expected = model(tokens)
    with tcnn_probe.record(model) as recorder:
        assert torch.equal(model(tokens), expected)
        recorder.mark(epoch=0)
    assert recorder.layers == ("last",)
    assert "nested" in recorder.unsupported["encoder.layers.0.self_attn"]
    with (
        pytest.raises(RuntimeError, match="computed no attention between tokens"),
        tcnn_probe.ablate(model, "encoder.layers.0.self_attn"),
    ):
        assert torch.equal(model(tokens), expected)


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
@torch.no_grad()
def test_distributed_tensors_have_a_reason() -> None:
    distributed.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
        distribute_module(model, mesh)
        images = distribute_tensor(torch.randn(2, 3, 32, 48), mesh, [Shard(0)])
        # DTensor takes ten seconds to find how the CPU's flash attention is sharded.
        with sdpa_kernel(SDPBackend.MATH):
            try:
                expected = model(images).full_tensor()
            except NotImplementedError as error:  # torch 2.8
                pytest.skip(f"torch cannot run the model on such tensors: {error}")
            with tcnn_probe.record(model) as recorder:
                assert torch.equal(model(images).full_tensor(), expected)
        reasons = recorder.unsupported.values()
        assert [reason[:33] for reason in reasons] == ["it attends in distributed tensors"] * TINY[
            "depth"
        ]
    finally:
        distributed.destroy_process_group()
