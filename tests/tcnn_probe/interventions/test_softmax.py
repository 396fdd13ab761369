"""Softmax attention of any kind: zeroed,
averaged and replaced heads equal a computation by hand in float64.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.layers.halo_attn import HaloAttn
from timm.models.cait import TalkingHeadAttn
from torch import Tensor, nn

import tcnn_model
import tcnn_probe
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.contracts.helpers import vit
from tests.tcnn_probe.interventions.softmax_models import (
    MODELS,
    first,
    heads_of,
    input_and_output,
    wide,
)

pytestmark = pytest.mark.numerical

# Names of models, with whether timm fuses their attention.
BUILT = [*((name, True) for name in MODELS), ("vit", False), ("swin", False)]


def without(model: nn.Module, layer: str, projection: str, heads: list[int]) -> nn.Module:
    """Return a copy in float64 whose projection ignores the channels of heads,
    as if they were zeroed.
    """
    twin = wide(copy.deepcopy(model))
    linear = twin.get_submodule(f"{layer}.{projection}")
    with torch.no_grad():
        columns = linear.weight.unflatten(1, (heads_of(twin, layer), -1))  # type: ignore[operator, union-attr]
        # The projection adds up the heads, so that a head is zeroed by zeros in its columns.
        columns[:, heads] = 0
    return twin


@pytest.mark.study(but=["vit-True", "cait-True", "pool-True", "swin-False"])
@torch.no_grad()
@pytest.mark.parametrize(("name", "fused"), BUILT, indirect=["fused"])
@pytest.mark.filterwarnings("ignore:no head is selected")
def test_zeroed_heads_equal_a_projection_without_them(name: str, fused: bool) -> None:
    """Zeroing all heads leaves only the bias; a recorder sees attention before the edit."""
    make, shape, layer, projection = MODELS[name]
    model = make()
    x = torch.randn(2, *shape)
    count = heads_of(model, layer)
    plain = model(x)
    recordings = []
    # Heads are none, the last one, and all, so that an index that is off by one shows.
    for heads in ([], [count - 1], [*range(count)]):
        expected = without(model, layer, projection, heads)(x.double())
        with (
            tcnn_probe.ablate(model, {layer: heads}) as ablation,
            tcnn_probe.record(model, layers=layer) as recorder,
        ):
            output = model(x)
            recorder.mark(epoch=0)
        assert ablation.heads == ({layer: tuple(heads)} if heads else {})
        # The model runs in float32, the computation by hand in float64.
        torch.testing.assert_close(
            output.double(),
            expected,
            rtol=1e-3,
            atol=1e-3 * float(expected.abs().max()),
        )
        # A head that was not zeroed would pass otherwise.
        assert not heads or (plain - output).abs().max() > 1e-3 * expected.abs().max()
        recordings.append(recorder.dataset)
    # The recorder sees attention before the edit.
    assert recordings[0].equals(recordings[1])
    assert recordings[0].equals(recordings[2])
    bias = model.get_submodule(f"{layer}.{projection}").bias
    # In these models the bias is that of a norm, or along another axis.
    if name not in ("levit", "coatnet"):
        with tcnn_probe.ablate(model, layer):
            output = input_and_output(model, model.get_submodule(layer), x)[1]
        assert torch.equal(output, bias.expand_as(output))  # type: ignore[operator, union-attr]


def by_hand_talking(layer: TalkingHeadAttn, tokens: Tensor, zeroed: list[int]) -> Tensor:
    """Compute talking heads (arXiv:2003.02436) in float64."""
    wide = copy.deepcopy(layer).double()
    q, k, v = wide.qkv(tokens.double()).unflatten(-1, (3, wide.num_heads, -1)).unbind(2)
    logits = torch.einsum("bqhd,bkhd->bqkh", q, k) * wide.scale
    # Logits are mixed before the softmax and weights after it; a head is an output of the softmax.
    weights = wide.proj_l(logits).softmax(2)
    weights[..., zeroed] = 0
    return wide.proj(torch.einsum("bqkh,bkhd->bqhd", wide.proj_w(weights), v).flatten(2))


@torch.no_grad()
def test_talking_heads_are_zeroed_before_they_are_mixed() -> None:
    model = MODELS["cait"][0]()
    x = torch.randn(2, *MODELS["cait"][1])
    layer = model.get_submodule("blocks.1.attn")
    assert isinstance(layer, TalkingHeadAttn)
    with tcnn_probe.ablate(model, {"blocks.1.attn": [0, 2]}):
        tokens, output = input_and_output(model, layer, x)
    # The model runs in float32, the computation by hand in float64.
    torch.testing.assert_close(
        output.double(), by_hand_talking(layer, tokens, [0, 2]), rtol=1e-3, atol=1e-3
    )


@torch.no_grad()
def test_heads_of_layers_with_windows() -> None:
    """HaloNet's heads have adjacent output channels, and an image has six windows."""
    torch.manual_seed(0)
    model = (
        # 8 x 12 cells in blocks of 4 are six windows, so that two images have twelve.
        nn.Sequential(HaloAttn(12, num_heads=3, dim_head=4, block_size=4, halo_size=1))
        .double()
        .eval()
    )
    x = torch.randn(2, 12, 8, 12).double()
    plain = model(x)
    with tcnn_probe.ablate(model, {"0": [0, 2]}):
        torch.testing.assert_close(
            model(x),
            plain * torch.tensor([0, 1, 0]).repeat_interleave(4)[:, None, None],
        )
    # Shuffling without a seed keeps the order, so that the output must not change.
    with tcnn_probe.ablate(model, "0", "shuffled", images=x, seed=None):
        torch.testing.assert_close(model(x), plain)


def by_hand(layer: Attention, tokens: Tensor) -> Tensor:
    """Compute the outputs of heads of a timm layer, (B, N, heads, d), in float64."""
    wide = copy.deepcopy(layer).double()
    q, k, v = wide.qkv(tokens.double()).unflatten(-1, (3, wide.num_heads, -1)).unbind(2)
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@torch.no_grad()
@pytest.mark.parametrize("over", ["queries", "images"])
def test_means_over_queries_or_images(over: str, fused: bool) -> None:
    model = vit()
    x = vit_images()
    references = vit_images(5, seed=1)
    # There are five references for two images, so that no axis of their mean fits by accident.
    layer = model.blocks[0].attn
    heads = by_hand(layer, input_and_output(model, layer, x)[0])[:, :, [0, 2]]
    terms = by_hand(layer, input_and_output(model, layer, references)[0])[:, :, [0, 2]]
    mean = heads.mean(1, keepdim=True) if over == "queries" else terms.mean(0, keepdim=True)
    batches = (
        None
        if over == "queries"
        else [(references[:3], torch.zeros(3)), (references[3:], torch.zeros(2))]
    )
    with tcnn_probe.ablate(model, {"blocks.0.attn": [0, 2]}, "mean", images=batches):
        tokens, output = input_and_output(model, layer, x)
    expected = by_hand(layer, tokens)
    expected[:, :, [0, 2]] = mean
    expected = copy.deepcopy(layer.proj).double()(expected.flatten(2))
    # The model is in float32, the reference in float64, and there is one block between them.
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["swin", "cait", "torch", "tokens first", "convit", "levit"])
def test_means_of_layers_with_windows_and_others(name: str) -> None:
    """A layer with every head averaged outputs its mean over images,
    or over the queries of a window.
    """
    make, shape, layer, _ = MODELS[name]
    model = make()
    references = torch.randn(3, *shape)
    attention = model.get_submodule(layer)

    def output(x: Tensor) -> Tensor:
        result = input_and_output(model, attention, x)[1]
        return result.transpose(0, 1) if name == "tokens first" else result

    plain = output(references)
    # The windows of the images follow one another along the first axis.
    mean = plain.unflatten(0, (3, -1)).mean(0)
    with tcnn_probe.ablate(model, layer, "mean", images=references):
        result = output(torch.randn(2, *shape))
    torch.testing.assert_close(result, mean.repeat(2, *[1] * (mean.ndim - 1)), rtol=1e-3, atol=1e-3)
    # These layers attend within a window or sequence; others pool or have a class token.
    if name in ("swin", "torch", "tokens first"):
        with tcnn_probe.ablate(model, layer, "mean"):
            torch.testing.assert_close(
                output(references),
                plain.mean(1, keepdim=True).expand_as(plain),
                rtol=1e-3,
                atol=1e-3,
            )


@torch.no_grad()
# They call their layers with other arguments, and get tensors or tuples.
@pytest.mark.parametrize("name", ["vit", "swin", "cait", "beit", "levit", "torch"])
def test_heads_replaced_by_those_of_another_model(name: str) -> None:
    """The output is the sum of two projections, of the heads of each model."""
    make, shape, layer, projection = MODELS[name]
    model = wide(make())
    x = torch.randn(2, *shape, dtype=torch.float64)
    source = copy.deepcopy(model)
    for parameter in source.get_submodule(layer).parameters():
        # The parameters differ enough for a head of the wrong model to show.
        parameter.mul_(1.3).add_(0.1)
    count = heads_of(model, layer)
    heads = [count - 1]
    rest = [*range(count - 1)]
    twins = [
        without(model, layer, projection, heads),
        without(source, layer, projection, rest),
    ]
    twins.append(without(source, layer, projection, [*heads, *rest]))

    # This adds the source's output with these heads alone, less its bias, which is its output
    # without any head.
    def add(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        extra = [first(twin.get_submodule(layer)(*args, **kwargs)) for twin in twins[1:]]
        total = first(output) + extra[0] - extra[1]
        return (total, *output[1:]) if isinstance(output, tuple) else total

    with twins[0].get_submodule(layer).register_forward_hook(add, with_kwargs=True):
        expected = twins[0](x)
    # Replaced heads are differences of two outputs, which lose the digits that these have in
    # common: half of float64's.
    limit = 1e-6 * float(model(x).abs().max())
    with tcnn_probe.ablate(model, {layer: heads}, "replaced", source=source):
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=limit)


@torch.no_grad()
def test_heads_that_do_not_add_up_are_refused() -> None:
    # A norm over all heads makes the output of each head depend on the others.
    model = vit(scale_attn_norm=True, norm_layer=nn.LayerNorm)
    x = vit_images()
    plain = model(vit_images())
    for mode, options in (
        ("replaced", {"source": copy.deepcopy(model)}),
        ("mean", {"images": x}),
    ):
        with (
            pytest.raises(ValueError, match=r"heads of 'blocks\.1\.attn' do not add up"),
            tcnn_probe.ablate(model, {"blocks.1.attn": [1]}, mode, **options),  # type: ignore[arg-type]
        ):
            model(x)
        assert torch.equal(model(x), plain)
    # The mean over queries needs no other images, and works.
    with tcnn_probe.ablate(model, {"blocks.1.attn": [1]}, "mean"):
        assert not torch.equal(model(x), plain)


@torch.no_grad()
@pytest.mark.parametrize(("mode", "gate"), [("positional", 1.0), ("content", 0.0)])
@pytest.mark.parametrize("accelerated", [True, False])
def test_gates_of_convit(mode: str, gate: float, accelerated: bool) -> None:
    make, shape, name, _ = MODELS["convit"]
    model = make()
    x = torch.randn(2, *shape)
    layer = model.get_submodule(name)
    tokens, _ = input_and_output(model, layer, x)
    wide = copy.deepcopy(layer).double()
    q, k = wide.qk(tokens.double()).unflatten(-1, (2, 3, -1)).unbind(2)
    content = (torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    positional = (
        wide.pos_proj(wide.get_rel_indices(tokens.shape[1]).double())
        .permute(0, 3, 1, 2)
        .softmax(-1)
    )
    gates = wide.gating_param.sigmoid()
    # The gate of one head in three changes.
    gates[1] = gate
    weights = (1 - gates)[:, None, None] * content + gates[:, None, None] * positional
    values = wide.v(tokens.double()).unflatten(-1, (3, -1))
    expected = wide.proj(torch.einsum("bhqk,bkhd->bqhd", weights, values).flatten(2))
    handle = tcnn_model.accelerate(model) if accelerated else None
    with (
        tcnn_probe.ablate(model, {name: 1}, mode),
        tcnn_probe.record(model) as recorder,
    ):  # type: ignore[arg-type]
        torch.testing.assert_close(
            input_and_output(model, layer, x)[1].double(),
            expected,
            rtol=1e-3,
            atol=1e-3,
        )
        recorder.mark(epoch=0)
    # Gates are recorded as ablated, and heads before the ablation.
    assert recorder.dataset.gate.sel(layer=name).values[0, 1] == gate
    if handle is not None:
        handle.remove()


class Twice(nn.Module):
    """Model with two attentions in one call,
    of 2 and 3 heads, and then a softmax that does not attend.
    """

    num_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)
        first = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        k = x.unflatten(-1, (3, 2)).transpose(1, 2)
        second = (torch.softmax(k @ k.mT, -1) @ k).transpose(1, 2).flatten(2)
        # The second attention is multiplied by ten, so that the two cannot be confused.
        return first + 10 * second + torch.softmax(x, -1)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["zero", "mean"])
# Five tokens have six channels, as 2 x 3 and 3 x 2, so that confused heads and channels would show.
def test_two_attentions_in_one_call(mode: Any) -> None:
    model = nn.Sequential(Twice())
    x = torch.randn(2, 5, 6)
    q = x.unflatten(-1, (2, 3)).transpose(1, 2)
    k = x.unflatten(-1, (3, 2)).transpose(1, 2)
    # torch's attention scales by the root of three channels, and the softmax by hand does not.
    parts = [(q @ q.mT / 3**0.5).softmax(-1) @ q, (k @ k.mT).softmax(-1) @ k]
    for part, head in zip(parts, (1, 2), strict=True):
        part[:, head] = 0 if mode == "zero" else part[:, head].mean(1, keepdim=True)
    expected = sum(
        by * part.transpose(1, 2).flatten(2) for by, part in zip((1, 10), parts, strict=True)
    )
    with (
        tcnn_probe.ablate(model, {"0": 1}, mode),
        tcnn_probe.ablate(model, {"0#1": 2}, mode) as inner,
    ):
        # The computation is in float32, with a second part that is ten times as large.
        torch.testing.assert_close(model(x), expected + x.softmax(-1), rtol=1e-4, atol=1e-4)
    assert inner.heads == {"0#1": (2,)}
    with (
        pytest.raises(RuntimeError, match="a softmax that is not multiplied with values"),
        tcnn_probe.ablate(model, "0#2", mode),
    ):
        model(x)
    with (
        pytest.raises(RuntimeError, match="'0#3' ran and computed no attention"),
        tcnn_probe.ablate(model, "0#3", mode),
    ):
        model(x)
