"""Softmax attention of any kind: what zeroing, averaging and replacing heads gives, by hand and in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention, set_fused_attn
from timm.models.cait import TalkingHeadAttn
from timm.models.convit import GPSA
from torch import Tensor, nn

import tcnn_model
import tcnn_probe
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.contracts.helpers import vit

SMALL = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
WINDOWS = {"img_size": (16, 24), "patch_size": 4, "window_size": 2, "embed_dim": 12, "depths": (2,), "num_heads": (3,)}
LEVIT = {"img_size": 64, "embed_dim": (24, 32, 40), "depth": (1, 1, 1), "num_heads": (3, 5, 2), "key_dim": 4}
MAXVIT = {"img_size": (64, 96), "embed_dim": (32, 64), "depths": (1, 1), "num_classes": 5}
COATNET = {"img_size": 64, "embed_dim": (32, 32, 32, 64), "depths": (1, 1, 1, 1), "num_classes": 5}


class Torch(nn.Module):
    """Torch's own multi-head attention, images first or tokens first, with heads of 5 channels."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 15)
        self.attn = nn.MultiheadAttention(15, 3, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x if self.batch_first else x.transpose(0, 1))
        out, _ = self.attn(tokens, tokens, tokens, need_weights=False)
        return out if self.batch_first else out.transpose(0, 1)


def sharp(model: nn.Module) -> nn.Module:
    """Attention that differs between heads, biases that are not zero, and branches that count."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gamma", "gamma_1", "gamma_2")):
                parameter.uniform_(0.5, 1)
            elif parameter.ndim > 1 and not name.startswith(("stem", "patch_embed")):
                parameter.normal_(std=1.5 * max(1, parameter[0].numel()) ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def build(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: sharp(timm.create_model(name, **options))


def pooled() -> nn.Module:
    return sharp(timm.create_model("patchconvnet_s20", embed_dim=24, depth=1, num_classes=5))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "vit": (build("vit_tiny_patch16_224", **SMALL), (3, 24, 40), "blocks.1.attn", "proj"),
    "swin": (build("swin_tiny_patch4_window7_224", **WINDOWS), (3, 16, 24), "layers.0.blocks.1.attn", "proj"),
    "class attention": (build("cait_xxs24_224", **SMALL), (3, 24, 40), "blocks_token_only.0.attn", "proj"),
    "convit, gated": (build("convit_tiny", **SMALL | {"img_size": 32}), (3, 32, 32), "blocks.1.attn", "proj"),
    "convit, plain": (
        build("convit_tiny", **SMALL | {"img_size": 32, "depth": 1, "local_up_to_layer": 0}),
        (3, 32, 32),
        "blocks.0.attn",
        "proj",
    ),
    "beit": (build("beit_base_patch16_224", **SMALL), (3, 24, 40), "blocks.0.attn", "proj"),
    "eva": (build("eva02_tiny_patch14_224", **SMALL), (3, 24, 40), "blocks.1.attn", "proj"),
    "levit": (build("levit_128s", **LEVIT), (3, 64, 64), "stages.1.blocks.0.attn", "proj.ln.linear"),
    "levit, fewer queries": (
        build("levit_128s", **LEVIT),
        (3, 64, 64),
        "stages.1.downsample.attn_downsample",
        "proj.ln.linear",
    ),
    "maxvit": (build("maxvit_rmlp_pico_rw_256", **MAXVIT), (3, 64, 96), "stages.1.blocks.0.attn_grid.attn", "proj"),
    "coatnet": (build("coatnet_pico_rw_224", **COATNET), (3, 64, 64), "stages.3.blocks.0.attn", "proj"),
    "torch": (lambda: sharp(Torch()), (7, 4), "attn", "out_proj"),
    "torch, tokens first": (lambda: sharp(Torch(batch_first=False)), (7, 4), "attn", "out_proj"),
    "pool": (pooled, (3, 48, 64), "pool.block.attn", "proj"),
}
FUSED = [True, False]


@pytest.fixture(params=FUSED, ids=["fused", "plain"])
def fused(request: pytest.FixtureRequest) -> Any:
    set_fused_attn(request.param)
    yield request.param
    set_fused_attn(True)


def wide(model: nn.Module) -> nn.Module:
    """In float64, also ConViT's offsets, which older versions of timm make in float32."""
    for layer in model.double().modules():
        if isinstance(layer, GPSA):
            layer.rel_indices, offsets = None, layer.get_rel_indices
            layer.get_rel_indices = lambda count, offsets=offsets: offsets(count).double()
    return model


def without(model: nn.Module, layer: str, projection: str, heads: list[int]) -> nn.Module:
    """A copy in float64 whose projection does not take these heads' channels: what zeroing them comes to."""
    twin = wide(copy.deepcopy(model))
    linear = twin.get_submodule(f"{layer}.{projection}")
    count = heads_of(twin, layer)
    with torch.no_grad():
        columns = linear.weight.unflatten(1, (count, -1))  # type: ignore[operator, union-attr]
        columns[:, heads] = 0
    return twin


def heads_of(model: nn.Module, layer: str) -> int:
    return int(model.get_submodule(layer).num_heads)  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_zeroed_heads(name: str, fused: bool) -> None:
    make, shape, layer, projection = MODELS[name]
    model, x = make(), torch.randn(2, *shape)
    count = heads_of(model, layer)
    for heads in ([count - 1], list(range(count))):
        expected = without(model, layer, projection, heads)(x.double())
        with tcnn_probe.ablate(model, {layer: heads}) as ablation:
            found = model(x)
        assert ablation.heads == {layer: tuple(heads)}
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
        assert (model(x) - found).abs().max() > 1e-3 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit", "swin", "convit, gated", "torch", "torch, tokens first", "maxvit"])
def test_every_head_zeroed_leaves_the_bias(name: str, fused: bool) -> None:
    make, shape, layer, projection = MODELS[name]
    model, x, seen = make(), torch.randn(2, *shape), []
    model.get_submodule(layer).register_forward_hook(lambda module, args, output: seen.append(output))
    with tcnn_probe.ablate(model, layer):
        model(x)
    output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    bias = model.get_submodule(f"{layer}.{projection}").bias
    assert isinstance(bias, Tensor)
    torch.testing.assert_close(output, bias.expand_as(output), rtol=0, atol=0)


@torch.no_grad()
def test_talking_heads_are_zeroed_before_they_are_mixed() -> None:
    model, x = MODELS["class attention"][0](), torch.randn(2, 3, 24, 40)
    layer = model.get_submodule("blocks.1.attn")
    assert isinstance(layer, TalkingHeadAttn)
    expected = by_hand_talking(layer, inputs_of(model, layer, x), zeroed=[0, 2])
    with tcnn_probe.ablate(model, {"blocks.1.attn": [0, 2]}):
        torch.testing.assert_close(outputs_of(model, layer, x).double(), expected, rtol=1e-4, atol=1e-4)


def by_hand_talking(layer: TalkingHeadAttn, tokens: Tensor, zeroed: list[int]) -> Tensor:
    """Talking heads (arXiv:2003.02436) in float64."""
    wide = copy.deepcopy(layer).double()
    q, k, v = wide.qkv(tokens.double()).unflatten(-1, (3, wide.num_heads, -1)).unbind(2)
    logits = torch.einsum("bqhd,bkhd->bqkh", q, k) * wide.scale
    weights = wide.proj_l(logits).softmax(2)
    weights[..., zeroed] = 0
    return wide.proj(torch.einsum("bqkh,bkhd->bqhd", wide.proj_w(weights), v).flatten(2))


def by_hand(layer: Attention, tokens: Tensor) -> Tensor:
    """Outputs of the heads of a timm layer, (B, N, heads, d), in float64."""
    wide = copy.deepcopy(layer).double()
    q, k, v = wide.qkv(tokens.double()).unflatten(-1, (3, wide.num_heads, -1)).unbind(2)
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def inputs_of(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        model(x)
    return seen[0]


def outputs_of(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    with layer.register_forward_hook(lambda module, args, output: seen.append(output)):
        model(x)
    return seen[0]


@torch.no_grad()
def test_mean_over_queries(fused: bool) -> None:
    model, x = vit(), vit_images()
    layer = model.blocks[0].attn
    heads = by_hand(layer, inputs_of(model, layer, x))
    heads[:, :, [0, 2]] = heads[:, :, [0, 2]].mean(1, keepdim=True)
    with tcnn_probe.ablate(model, {"blocks.0.attn": [0, 2]}, "mean"):
        found = outputs_of(model, layer, x)
    expected = copy.deepcopy(layer.proj).double()(heads.flatten(2))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mean_over_queries_of_a_window() -> None:
    """Of Swin's windows each has its own; of tokens first, the tokens' axis is meant."""
    make, shape, layer, _ = MODELS["swin"]
    model, x = make(), torch.randn(2, *shape)
    attention = model.get_submodule(layer)
    with tcnn_probe.ablate(model, layer, "mean"):
        found = outputs_of(model, attention, x)
    plain = outputs_of(model, attention, x)
    torch.testing.assert_close(found, plain.mean(1, keepdim=True).expand_as(found), rtol=1e-4, atol=1e-5)
    for first in (True, False):
        model = sharp(Torch(batch_first=first))
        plain = model(x := torch.randn(2, 7, 4))
        with tcnn_probe.ablate(model, "attn", "mean"):
            torch.testing.assert_close(model(x), plain.mean(1, keepdim=True).expand_as(plain), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mean_over_images(fused: bool) -> None:
    model, x, seen = vit(), vit_images(), vit_images(5, seed=1)
    layer = model.blocks[0].attn
    terms = by_hand(layer, inputs_of(model, layer, seen))
    heads = by_hand(layer, inputs_of(model, layer, x))
    heads[:, :, [0, 2]] = terms[:, :, [0, 2]].mean(0, keepdim=True)
    expected = copy.deepcopy(layer.proj).double()(heads.flatten(2))
    loader = [(seen[:3], torch.zeros(3)), (seen[3:], torch.zeros(2))]
    with tcnn_probe.ablate(model, {"blocks.0.attn": [0, 2]}, "mean", images=loader):
        found = outputs_of(model, layer, x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["swin", "class attention", "torch", "torch, tokens first", "convit, gated", "levit"])
def test_means_over_images_of_windows_and_others(name: str) -> None:
    """With every head averaged the layer's output is its own mean over the images."""
    make, shape, layer, _ = MODELS[name]
    model, seen = make(), torch.randn(3, *shape)
    attention = model.get_submodule(layer)
    plain = first(outputs_of(model, attention, seen))
    rows = plain.transpose(0, 1) if name == "torch, tokens first" else plain
    mean = rows.unflatten(0, (3, -1)).mean(0)
    with tcnn_probe.ablate(model, layer, "mean", images=seen):
        found = first(outputs_of(model, attention, torch.randn(2, *shape)))
    found = found.transpose(0, 1) if name == "torch, tokens first" else found
    torch.testing.assert_close(found, mean.repeat(2, *[1] * (mean.ndim - 1)), rtol=1e-3, atol=1e-4)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_heads_of_another_model(name: str, fused: bool) -> None:
    """All of them are the other layer but for the biases; its own change nothing; one is by channels of the two."""
    make, shape, layer, projection = MODELS[name]
    model, x = wide(make()), torch.randn(2, *shape, dtype=torch.float64)
    source = copy.deepcopy(model)
    for parameter in source.get_submodule(layer).parameters():
        parameter.mul_(1.3).add_(0.1)
    count, plain = heads_of(model, layer), model(x)
    size = float(plain.abs().max())
    with tcnn_probe.ablate(model, layer, "replaced", source=model):
        torch.testing.assert_close(model(x), plain, rtol=1e-6, atol=1e-6 * size)
    for heads in {(count - 1,), tuple(range(count))}:
        rest = [head for head in range(count) if head not in heads]
        twins = [without(model, layer, projection, list(heads)), without(source, layer, projection, rest)]
        nothing = without(source, layer, projection, list(range(count)))
        expected = added(*twins, nothing, layer, x)
        with tcnn_probe.ablate(model, {layer: heads}, "replaced", source=source):
            found = model(x)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * size)


def added(model: nn.Module, more: nn.Module, less: nn.Module, layer: str, x: Tensor) -> Tensor:
    """The model's output where its layer gives its own plus what the second gives more than the third."""

    def add(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        extra = [first(twin.get_submodule(layer)(*args, **kwargs)) for twin in (more, less)]
        total = first(output) + extra[0] - extra[1]
        return (total, *output[1:]) if isinstance(output, tuple) else total

    with model.get_submodule(layer).register_forward_hook(add, with_kwargs=True):
        return model(x)


@torch.no_grad()
def test_heads_that_do_not_add_up_are_refused() -> None:
    model = vit(scale_attn_norm=True, norm_layer=nn.LayerNorm)
    x, plain = vit_images(), model(vit_images())
    for mode, options in (("replaced", {"source": copy.deepcopy(model)}), ("mean", {"images": x})):
        with (
            pytest.raises(ValueError, match=r"heads of 'blocks\.1\.attn' do not add up"),
            tcnn_probe.ablate(model, {"blocks.1.attn": [1]}, mode, **options),  # type: ignore[arg-type]
        ):
            model(x)
        assert torch.equal(model(x), plain)
    with tcnn_probe.ablate(model, {"blocks.1.attn": [1]}, "mean"):
        assert not torch.equal(model(x), plain)


@torch.no_grad()
@pytest.mark.parametrize(("mode", "gate"), [("positional", 1.0), ("content", 0.0)])
@pytest.mark.parametrize("accelerated", [True, False])
def test_gates_of_convit(mode: str, gate: float, accelerated: bool) -> None:
    make, shape, name, _ = MODELS["convit, gated"]
    model, x = make(), torch.randn(2, *shape)
    layer = model.get_submodule(name)
    tokens = inputs_of(model, layer, x)
    wide = copy.deepcopy(layer).double()
    q, k = wide.qk(tokens.double()).unflatten(-1, (2, 3, -1)).unbind(2)
    content = (torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    positional = wide.pos_proj(wide.get_rel_indices(tokens.shape[1]).double()).permute(0, 3, 1, 2).softmax(-1)
    gates = wide.gating_param.sigmoid()
    gates[1] = gate
    weights = (1 - gates)[:, None, None] * content + gates[:, None, None] * positional
    values = wide.v(tokens.double()).unflatten(-1, (3, -1))
    expected = wide.proj(torch.einsum("bhqk,bkhd->bqhd", weights, values).flatten(2))
    handle = tcnn_model.accelerate(model) if accelerated else None
    with tcnn_probe.ablate(model, {name: 1}, mode):  # type: ignore[arg-type]
        torch.testing.assert_close(outputs_of(model, layer, x).double(), expected, rtol=1e-4, atol=1e-5)
        with tcnn_probe.ablate(model, {name: [0, 1, 2]}):
            zeroed = outputs_of(model, layer, x)
    assert torch.equal(zeroed, layer.proj.bias.expand_as(zeroed))  # type: ignore[union-attr, operator]
    if handle is not None:
        handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("name", ["torch", "torch, tokens first", "class attention", "convit, gated", "pool"])
def test_what_a_recorder_sees_of_them(name: str, fused: bool) -> None:
    """Attention as it is before heads are edited."""
    make, shape, layer, _ = MODELS[name]
    model, x, found = make(), torch.randn(2, *shape), []
    for heads in ({}, layer):
        with tcnn_probe.ablate(model, heads), tcnn_probe.record(model, layers=layer) as recorder:
            model(x)
            recorder.mark(epoch=0)
        found.append(recorder.dataset)
    assert found[0].equals(found[1])


class Twice(nn.Module):
    """Two attentions in one call, of 2 and 3 heads, the second by a softmax; then a softmax that is none."""

    num_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)
        first = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        k = x.unflatten(-1, (3, 2)).transpose(1, 2)
        second = (torch.softmax(k @ k.mT, -1) @ k).transpose(1, 2).flatten(2)
        return first + 10 * second + torch.softmax(x, -1)


@torch.no_grad()
def test_two_attentions_in_one_call() -> None:
    model, x = nn.Sequential(Twice()), torch.randn(2, 5, 6)
    q, k = x.unflatten(-1, (2, 3)).transpose(1, 2), x.unflatten(-1, (3, 2)).transpose(1, 2)
    parts = [(y @ y.mT * scale).softmax(-1) @ y for y, scale in ((q, 3**-0.5), (k, 1))]
    parts[0][:, 1] = 0
    parts[1][:, 2] = 0
    expected = sum(by * part.transpose(1, 2).flatten(2) for by, part in zip((1, 10), parts, strict=True)) + x.softmax(
        -1
    )
    with tcnn_probe.ablate(model, {"0": 1}), tcnn_probe.ablate(model, {"0#1": 2}) as inner:
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert inner.heads == {"0#1": (2,)}
    with tcnn_probe.record(model.eval(), probes="softmax") as recorder:  # which names them alike
        model(x)
        recorder.mark(epoch=0)
    assert recorder.layers == ("0", "0#1")
    with pytest.raises(RuntimeError, match="a softmax that weighs no values"), tcnn_probe.ablate(model, "0#2"):
        model(x)
    with pytest.raises(RuntimeError, match="'0#3' ran and asked for no attention"), tcnn_probe.ablate(model, "0#3"):
        model(x)
