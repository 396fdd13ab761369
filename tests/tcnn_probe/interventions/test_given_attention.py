"""Attention taken from other images: its results by hand in float64,
and what it must leave unchanged.
"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

import tcnn_model
import tcnn_probe
from tcnn_model import GPSA
from tcnn_probe.images import as_images
from tcnn_probe.interventions.references import AttentionReference
from tests.tcnn_model.equations import gpsa_attention_reference
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.contracts.helpers import vit
from tests.tcnn_probe.interventions.ablations import chain_images
from tests.tcnn_probe.interventions.softmax_models import MODELS, wide
from tests.tcnn_probe.networks import Chain, scatter

pytestmark = pytest.mark.numerical

# Errors are those of nested sums of at most 60 terms each, with logits of up to 30.
ROUNDINGS = 64 * torch.finfo(torch.float64).eps
HEADS = [0, 2]
REFERENCE_IMAGES = 3


class LayerCall:
    """Arguments and output of a layer in a forward of its model."""

    def __init__(self, model: nn.Module, layer: nn.Module, x: Tensor) -> None:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
            self.args = args
            self.kwargs = kwargs
            self.output = output[0] if isinstance(output, tuple) else output

        with layer.register_forward_hook(keep, with_kwargs=True):
            model(x)


def exchange_heads(attention: Tensor, sources: Tensor, mode: str) -> Tensor:
    """Replace the attention of HEADS, axis -3 of attention (images, ...),
    by that of the sources.
    """
    exchanged = attention.clone()
    for image in range(len(attention)):
        source = sources.mean(0) if mode == "static" else sources[image % len(sources)]
        exchanged[image, ..., HEADS, :, :] = source[..., HEADS, :, :]
    return exchanged


def of_softmax(layer: Any, call: LayerCall) -> tuple[Tensor, Tensor]:
    """Return attention (rows, heads, N, N) and values (rows, heads, N, d) of a layer of ViT,
    Swin, BEiT or torch.
    """
    tokens = call.args[0]
    heads = layer.num_heads
    if isinstance(layer, nn.MultiheadAttention):
        qkv = tokens @ layer.in_proj_weight.T + layer.in_proj_bias
    else:
        beit = getattr(layer, "q_bias", None) is not None
        # BEiT's keys have no bias.
        bias = torch.cat([layer.q_bias, 0 * layer.q_bias, layer.v_bias]) if beit else layer.qkv.bias
        qkv = tokens @ layer.qkv.weight.T + bias
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if (table := getattr(layer, "relative_position_bias_table", None)) is not None:
        logits = logits + table[layer.relative_position_index.view(*logits.shape[-2:])].permute(
            2, 0, 1
        )
    if (
        isinstance(layer, WindowAttention)
        and (mask := (*call.args[1:], call.kwargs.get("mask"))[0]) is not None
    ):
        logits = (logits.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
    return logits.softmax(-1), v


def close(
    actual: Tensor,
    weights: Tensor,
    values: Tensor,
    projection: nn.Module,
    share: float = ROUNDINGS,
) -> None:
    """Assert that a layer's output is projection(weights @ values),
    up to a share of the terms of that sum.
    """
    weight = projection.weight.flatten(1)
    bias = projection.bias
    gathered = (weights @ values).transpose(1, 2).flatten(2)
    output = gathered @ weight.T + bias  # type: ignore[operator]
    terms = (weights @ values.abs()).transpose(1, 2).flatten(2)
    size = terms @ weight.abs().T + bias.abs()  # type: ignore[operator, union-attr]
    errors = (actual - output).abs() / size
    assert (errors <= share).all(), errors.max()


def gated_layer() -> SimpleNamespace:
    """Return a GPSA layer in float64, images and references, the whole attention of both, the
    values of the images, and the layer's weight as a projection.
    """
    torch.manual_seed(0)
    layer = scatter(GPSA(4, 6, (2, 3), (2, 1), (1, 1), dtype=torch.float64), seed=3)
    nn.init.normal_(layer.value)
    x = torch.randn(4, 4, 5, 7).double()
    references = torch.randn(REFERENCE_IMAGES, 4, 5, 7).double()
    values = nn.functional.pad(x, (1, 1, 1, 1)).flatten(2).mT @ layer.value.T
    taps = nn.Linear(1, 1)
    taps.weight = nn.Parameter(layer.weight.permute(0, 2, 3, 1).flatten(1))
    taps.bias = layer.bias  # type: ignore[assignment]
    return SimpleNamespace(
        layer=layer,
        images=x,
        references=references,
        attention=gpsa_attention_reference(layer, x).detach(),
        of_references=gpsa_attention_reference(layer, references).detach(),
        values=values[:, None].expand(-1, 6, -1, -1),
        taps=taps,
    )


@torch.no_grad()
@pytest.mark.parametrize("mode", ["static", "shuffled"])
@pytest.mark.parametrize(
    ("name", "fused"),
    [(n, True) for n in ("vit", "beit", "swin", "torch")] + [("swin", False)],
    indirect=["fused"],
)
def test_softmax_attention_by_hand(name: str, mode: Any, fused: bool) -> None:
    """Each window gets the attention of its own reference,
    with bias and mask, in batches of any size.
    """
    make, shape, path, projection = MODELS[name]
    model = wide(make())
    layer = model.get_submodule(path)
    x = torch.randn(4, *shape).double()
    # There are three references for four images, so that the fourth image gets the attention of the
    # first reference.
    references = torch.randn(REFERENCE_IMAGES, *shape).double()
    reference_attention, _ = of_softmax(layer, LayerCall(model, layer, references))
    attention, values = of_softmax(layer, LayerCall(model, layer, x))
    plain = model(x)
    seed = None
    with tcnn_probe.ablate(
        model, {path: HEADS}, mode, images=[references[:1], references[1:]], seed=seed
    ):
        output = LayerCall(model, layer, x).output
        assert not torch.allclose(model(x), plain)
    by_image = exchange_heads(
        attention.unflatten(0, (4, -1)),
        reference_attention.unflatten(0, (REFERENCE_IMAGES, -1)),
        mode,
    )
    close(output, by_image.flatten(0, 1), values, layer.get_submodule(projection))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["static", "shuffled"])
def test_gated_attention_by_hand(mode: Any) -> None:
    """The whole attention of Eq. (7) is exchanged;
    gates and positions are the same for all images.
    """
    gated = gated_layer()
    weights = exchange_heads(gated.attention, gated.of_references, mode)
    images = [gated.references[:1], gated.references[1:]]
    with tcnn_probe.ablate(gated.layer, {"": HEADS}, mode, images=images, seed=None):
        output = gated.layer(gated.images).flatten(2).mT
    close(output, weights, gated.values, gated.taps)


@pytest.mark.study(but=["cait", "pool"])
@torch.no_grad()
@pytest.mark.parametrize("name", ["cait", "convit", "levit", "coatnet", "tokens first", "pool"])
@pytest.mark.filterwarnings("ignore:.*among images=")
@pytest.mark.filterwarnings("ignore:no head is selected")
def test_its_own_attention_changes_nothing(name: str) -> None:
    """Attention is shuffled by the identity, or static over one image;
    a recorder sees attention before the edit.
    """
    make, shape, layer, _ = MODELS[name]
    model = wide(make())
    x = torch.randn(3, *shape).double()
    plain = model(x)
    recordings = []
    for heads in ({}, None):
        with (
            tcnn_probe.ablate(model, heads, "shuffled", images=[x[:2], x[2:]], seed=None),
            tcnn_probe.record(model) as recorder,
        ):
            # In float64, attention that was rebuilt weighs the values in another order of
            # operations.
            torch.testing.assert_close(
                model(x), plain, rtol=0, atol=1e-11 * float(plain.abs().max())
            )
            recorder.mark(epoch=0)
        recordings.append(torch.from_numpy(recorder.dataset.entropy.values))
    torch.testing.assert_close(*recordings, equal_nan=True)
    with tcnn_probe.ablate(model, {layer: 0}, "static", images=x[1:2]):
        torch.testing.assert_close(
            model(x[1:2]), plain[1:2], rtol=0, atol=1e-11 * float(plain.abs().max())
        )


@torch.no_grad()
@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("name", ["gpsa", "convit"])
def test_given_attention_respects_the_gates_of_other_ablations(
    name: str, accelerated: bool
) -> None:
    """A gate of 1 leaves no content to be exchanged;
    a gate of 0 leaves only the reference's content.
    """
    make, shape, path, _ = MODELS["convit"]
    model, x = (
        (Chain().double(), chain_images().double()) if name == "gpsa" else (wide(make()), None)
    )
    x = torch.randn(3, *shape).double() if x is None else x
    handle = tcnn_model.accelerate(model) if accelerated and name == "convit" else None
    heads = {path if name == "convit" else "near": [0, 2]}
    twin = copy.deepcopy(model)
    gating = next(
        p for n, p in twin.named_parameters() if n in (f"{path}.gating_param", "near.gating")
    )
    for mode, forced in (("positional", torch.inf), ("content", -torch.inf)):
        gating[[0, 2]] = forced
        with tcnn_probe.ablate(twin, heads, "static", images=x.flip(3)):
            expected = twin(x)
        with (
            tcnn_probe.ablate(model, heads, "static", images=x.flip(3)),
            tcnn_probe.ablate(model, heads, mode),
        ):  # type: ignore[arg-type]
            torch.testing.assert_close(model(x), expected)
        with tcnn_probe.ablate(model, heads, mode):  # type: ignore[arg-type]
            assert torch.allclose(model(x), expected) == (mode == "positional")
    if handle is not None:
        handle.remove()


def test_shuffling_is_a_random_cycle_through_the_references() -> None:
    """The cycle depends on the seed, and is the same for every batch."""
    orders = set()
    for seed in range(4):
        reference = AttentionReference(shuffled=True, seed=seed)
        for batch in ([0.0], [1.0, 2.0, 3.0]):  # each image has two windows
            reference.begin(len(batch))
            reference.add(
                0,
                [0, 2],
                torch.tensor(batch).repeat_interleave(2)[:, None, None, None].expand(-1, 3, 5, 7),
                "",
            )
        reference.finish(None)
        attention = SimpleNamespace(number=0, rows=2 * 6, queries=5, content_keys=7)
        weights = reference.attention_for(attention, [2], "")  # type: ignore[arg-type]
        assert weights.shape == (6, 2, 1, 5, 7)
        order = weights.mean((1, 2, 3, 4)).long().tolist()
        assert order[4:] == order[:2]
        assert sorted(order[:4]) == [0, 1, 2, 3]
        assert all(source != place for place, source in enumerate(order[:4]))
        orders.add(tuple(order))
    # Two seeds may draw the same one of six cycles, but four seeds hardly do.
    assert len(orders) > 1


def test_gradients_flow_through_the_values_only() -> None:
    """The reference attention is a constant,
    so that queries and keys of exchanged heads get no gradients.
    """
    model = vit().double()
    x = vit_images(4).double()
    references = vit_images(REFERENCE_IMAGES, seed=1).double()
    layer: Any = model.blocks[1].attn
    reference_attention, _ = of_softmax(layer, LayerCall(model, layer, references))
    call = LayerCall(model, layer, x)
    tokens = call.args[0].detach().requires_grad_()
    call.args = (tokens,)
    weights, values = of_softmax(layer, call)
    layer.proj(
        (exchange_heads(weights, reference_attention.detach(), "static") @ values)
        .transpose(1, 2)
        .flatten(2)
    ).pow(2).sum().backward()
    expected = [tokens.grad, layer.qkv.weight.grad]
    model.zero_grad()
    tokens.grad = None
    with tcnn_probe.ablate(model, {"blocks.1.attn": HEADS}, "static", images=references):
        layer(tokens).pow(2).sum().backward()
    torch.testing.assert_close([tokens.grad, layer.qkv.weight.grad], expected)
    # Rows are ordered by queries, keys and values, then by heads, then by channels.
    assert layer.qkv.weight.grad.unflatten(0, (3, 3, 4))[:2, HEADS].abs().max() == 0


@torch.no_grad()
def test_any_form_of_images() -> None:
    make, _, layer, _ = MODELS["vit"]
    model = make()
    pictures = [Image.new("RGB", (40, 24), color) for color in ("red", "blue")]
    references = as_images(pictures, model)
    x = torch.randn(3, 3, 24, 40)
    outputs = []
    for form in (
        references,
        [*references],
        [references[:1], references[1:]],
        iter([(references, torch.arange(2))]),
        pictures,
    ):
        with tcnn_probe.ablate(model, layer, "static", images=form):
            outputs.append(model(x))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


class Twice(nn.Module):
    """Model that calls a layer twice, as models whose blocks share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = GPSA(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["static", "shuffled"])
def test_a_layer_called_twice_in_a_forward_is_refused(mode: Any) -> None:
    """The second call must not get the attention of the first one."""
    model = Twice().eval()
    with pytest.raises(
        ValueError,
        match="'layer' is called several times for the same images: it is not known which",
    ):
        tcnn_probe.ablate(model, mode=mode, images=chain_images())
    assert not model.layer._forward_hooks


@torch.no_grad()
def test_bad_arguments_are_refused() -> None:
    model = Chain()
    x = chain_images()
    with pytest.raises(ValueError, match="mode='static' needs images="):
        tcnn_probe.ablate(model, mode="static")
    with pytest.raises(
        ValueError,
        match="images= is for mode='mean' or 'convolutional' or 'static' or 'salient'",
    ):
        tcnn_probe.ablate(model, images=x)
    with pytest.raises(
        ValueError, match="queries='patches' is not for mode='mean', which edits all"
    ):
        tcnn_probe.ablate(model, mode="mean", images=x, queries="patches")
    with pytest.raises(ValueError, match="expected queries='patches' or None, got 'class'"):
        tcnn_probe.ablate(model, queries="class")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected images, got none"):
        tcnn_probe.ablate(model, mode="static", images=[])
    with pytest.raises(TypeError, match="an integer from 0 for seed"):
        tcnn_probe.ablate(model, mode="shuffled", images=x, seed=0.5)  # type: ignore[arg-type]
    with tcnn_probe.ablate(model, mode="shuffled", images=x):
        with pytest.raises(ValueError, match=r"size of images=, \(2, 7, 11\); got \(2, 11, 7\)"):
            model(x.mT)
        with pytest.raises(
            ValueError,
            match="'near' has 1 x 77 queries and 77 keys, and now 3 x 66 queries",
        ):
            model.near(x[..., :6, :])
        model(x)


def test_warns_if_an_image_gets_its_own_attention() -> None:
    """Warn once per ablation, but not for new images,
    nor if the references' own order is requested.
    """
    model = vit()
    references = torch.randn(5, 2, 20, 28)
    new_images = torch.randn(3, 2, 20, 28)
    with torch.no_grad():
        with tcnn_probe.ablate(model, mode="static", images=references):
            model(new_images)
            with pytest.warns(RuntimeWarning, match="1 of 4 images .* are among images="):
                # The last reference comes with three new images.
                model(torch.cat([new_images, references[4:]]))
            model(references)
        with tcnn_probe.ablate(model, mode="shuffled", images=references):
            model(references)  # each image gets the attention of another
        with (
            tcnn_probe.ablate(model, mode="shuffled", images=references[:1]),
            pytest.warns(RuntimeWarning, match="1 of 2 images .* their own attention"),
        ):
            model(references[:2])
        with tcnn_probe.ablate(model, mode="shuffled", images=references, seed=None):
            model(references)


@torch.no_grad()
def test_drawings_on_a_plain_ground_are_told_apart() -> None:
    model = vit()
    strokes = torch.zeros(2, 2, 20, 28)
    # They differ in a few pixels alone.
    strokes[0, :, 3, 4:6], strokes[1, :, 11, 5:9] = 1, 1
    with tcnn_probe.ablate(model, mode="static", images=strokes[:1]):
        model(strokes[1:])
