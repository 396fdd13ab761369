"""Health probes compared with slow computations in float64,
for models of three libraries and gated layers.

Shares of sinks, diversity of queries, similarity of heads, histograms of entropies and largest
logits are compared for every family of models in tests/tcnn_probe/attention, with the other numbers
of heads. Values, outputs and tokens are compared here.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import tcnn_probe
from tcnn_model import GPSA
from tcnn_probe.attention import softmax
from tcnn_probe.attention.attention import Attention
from tcnn_probe.probes.layer_health import OUTLIER, TOKEN_KINDS
from tests.extras import need
from tests.tcnn_probe.attention.bruteforce import health
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.networks import scatter

pytestmark = pytest.mark.numerical

# Five images in batches of 2 and 3: the mean of the batch means is not the mean over images.
IMAGES = 5
HEALTH = [*tcnn_probe.DEFAULT, "health"]


@dataclass
class Call:
    """Queries, keys and values of a layer, (B, heads, N, d),
    and the tokens that entered its block, (B, N, C).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tokens: Tensor


def projected(layer: nn.Module, x: Tensor, heads: int) -> tuple[Tensor, ...]:
    # Libraries with a joint projection lay it out as (B, N, 3, heads, d), as timm and torchvision
    # do.
    qkv = layer(x).unflatten(-1, (3, heads, -1))
    return tuple(qkv.permute(2, 0, 3, 1, 4))


def of_timm(block: nn.Module, x: Tensor) -> Call:
    attention = block.attn
    normalised = block.norm1(x)
    return Call(*projected(attention.qkv, normalised, attention.num_heads), x)


def of_torchvision(block: nn.Module, x: Tensor) -> Call:
    # torchvision normalizes inside the block, so the tokens are those before the norm.
    attention = block.self_attention
    normalised = block.ln_1(x)
    projection = nn.functional.linear(normalised, attention.in_proj_weight, attention.in_proj_bias)
    parts = projection.unflatten(-1, (3, attention.num_heads, -1))
    return Call(*parts.permute(2, 0, 3, 1, 4), x)


def of_transformers(block: nn.Module, x: Tensor) -> Call:
    attention = block.attention
    normalised = block.norm1(x)
    parts = [
        layer(normalised).unflatten(-1, (-1, attention.head_dim))
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    return Call(*(part.transpose(1, 2) for part in parts), x)


@dataclass
class Case:
    """A small model on 3 x 5 patches.

    Args:
        make: Function that makes the model.
        blocks: Name of the model's blocks, without their number.
        layer: Name of the attention in a block.
        call: Function that computes a block's queries, keys and values.
        prefix: Kinds of the tokens before the patches.
    """

    make: Callable[[], nn.Module]
    blocks: str
    layer: str
    call: Callable[[nn.Module, Tensor], Call]
    prefix: tuple[str, ...]


def dinov2() -> nn.Module:
    transformers = need("transformers")
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=21,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=20,  # the positions are resized to the images' grid
        patch_size=4,
        num_register_tokens=2,
        attn_implementation="sdpa",
    )
    return transformers.Dinov2WithRegistersModel(config)


class SquareImages(VisionTransformer):
    """torchvision's ViT on 9 patches and a class token, as it accepts only square images."""


CASES = {
    "timm": Case(
        lambda: timm.create_model(
            "vit_tiny_patch16_224",
            img_size=(12, 20),
            patch_size=4,
            # Heads have seven channels, as a power of two could hide a wrong scale or stride.
            embed_dim=21,
            depth=2,
            num_heads=3,
            reg_tokens=2,
        ),
        "blocks.",
        "attn",
        of_timm,
        ("class", "register", "register"),
    ),
    "torchvision": Case(
        lambda: SquareImages(12, 4, 2, 3, 21, 13),
        "encoder.layers.encoder_layer_",
        "self_attention",
        of_torchvision,
        ("class",),
    ),
    "transformers": Case(
        dinov2,
        "encoder.layer.",
        "attention",
        of_transformers,
        ("class", "register", "register"),
    ),
}


def median(values: np.ndarray) -> float:
    """Return the median, for an even number of values the lower of the two in the middle."""
    # torch.median also returns the lower one.
    return float(np.sort(values)[(len(values) - 1) // 2])


def softmax_rows(logits: np.ndarray) -> np.ndarray:
    # Subtracting the maximum keeps sharpened logits from overflowing.
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def sink_ratios(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the length of a sink's value by the median length of the other values, (rows, heads).

    Args:
        weights: Attention of each row and head, (rows, heads, queries, keys).
        values: Values, (rows, heads, keys, d).
    """
    ratios = np.zeros(weights.shape[:2])
    lengths = np.linalg.norm(values, axis=-1)
    for place in np.ndindex(ratios.shape):
        sink = weights[place].mean(0).argmax()
        ratios[place] = lengths[place][sink] / median(np.delete(lengths[place], sink))
    return ratios


def of_outputs(outputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the norms and ranks of outputs (B, heads, N, d).

    The rank is the participation ratio of squared singular values: 1 for a single direction, d for
    d equal ones.
    """
    squares = np.linalg.svd(outputs, compute_uv=False) ** 2
    rank = squares.sum(-1) ** 2 / (squares**2).sum(-1)
    norm = np.sqrt((outputs**2).sum(-1).mean(-1))
    return {"output_norm": norm.mean(0), "output_rank": rank.mean(0)}


def of_values_and_tokens(call: Call, kinds: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Compute the numbers of each image and head separately and average them over images."""
    arrays = (call.query, call.key, call.value, call.tokens)
    query, key, value, tokens = (x.detach().double().numpy() for x in arrays)
    weights = softmax_rows(query @ key.swapaxes(2, 3) / math.sqrt(query.shape[-1]))
    sinks = np.array(kinds)[weights.mean(2).argmax(-1)]
    # Tokens are those that enter the block; patches are separated from the other tokens.
    by_name: dict[str, list[Any]] = {}
    for of_image in tokens:
        lengths = np.linalg.norm(of_image, axis=-1)
        is_patch = np.array([kind in ("border", "inner") for kind in kinds])
        patches = lengths[is_patch]
        directions = of_image[is_patch] / patches[:, None]
        numbers = {
            "token_norm": median(patches),
            "token_norm_max": patches.max(),
            # The median includes the token's own norm, as in the probe.
            "token_outliers": np.mean(patches > OUTLIER * median(patches)),
            "token_cosine": np.mean([a @ b for a, b in permutations(directions, 2)]),
        }
        for kind, name in (("class", "class_token"), ("register", "register")):
            if kind in kinds:
                numbers[f"{name}_norm"] = lengths[[k == kind for k in kinds]].mean()
        for name, number in numbers.items():
            by_name.setdefault(name, []).append(number)
    # The largest norm is over all images; everything else is a mean.
    largest = by_name.pop("token_norm_max")
    return {
        "sink_kind": (sinks[..., None] == np.array(TOKEN_KINDS)).mean(0),
        "sink_value_norm": sink_ratios(weights, value).mean(0),
        **of_outputs(weights @ value),
        **{name: np.mean(np.array(x, float), 0) for name, x in by_name.items()},
        "token_norm_max": np.max(largest),
    }


def grid_kinds(height: int, width: int) -> tuple[str, ...]:
    return tuple(
        "border" if y in (0, height - 1) or x in (0, width - 1) else "inner"
        for y in range(height)
        for x in range(width)
    )


def block_inputs(model: nn.Module, case: Case, x: Tensor) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(f"{case.blocks}{number}").register_forward_pre_hook(
            lambda _, args, number=number: inputs.update({str(number): args[0]})
        )
        for number in range(2)
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return inputs


def check(ds: xr.Dataset, layer: str, expected: dict[str, np.ndarray], rtol: float) -> None:
    for name, value in expected.items():
        got = ds[name].sel(layer=layer)
        # The tolerance is both relative and absolute, as shares may be 0 and norms may be large.
        np.testing.assert_allclose(got, value, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:no attention_distance")
def test_values_outputs_and_tokens(name: str) -> None:
    """Numbers from uneven batches equal those in float64, with outlier tokens among the patches."""
    case = CASES[name]
    # Attention is 2.5 times as sharp, so that sinks exist.
    model = sharpen(case.make(), 2.5).double()
    height, width = (3, 3) if name == "torchvision" else (3, 5)
    x = torch.randn(IMAGES, 3, 4 * height, 4 * width).double()
    # A patch of one image is scaled so that it is an outlier among the tokens.
    x[1, :, :4, :4] *= 40
    ds = recorded(model, *x.split([2, 3]), probes=HEALTH).dataset.isel(epoch=0)
    kinds = case.prefix + grid_kinds(height, width)
    for number, tokens in block_inputs(model, case, x).items():
        block = model.get_submodule(f"{case.blocks}{number}")
        expected = of_values_and_tokens(case.call(block, tokens), kinds)
        # The rounding of the float64 model is far below 1e-9.
        check(ds, f"{case.blocks}{number}.{case.layer}", expected, 1e-9)
        # If all heads were alike, heads that are mixed up would go unnoticed.
        assert np.ptp(ds.output_rank.values) > 0.1
    assert ds.token_outliers.max() > 0
    if "register" not in kinds:
        assert np.isnan(ds.register_norm).all()


def test_windows_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks in Swin's fused attention are per window,
    but outputs are over all windows of an image.
    """
    # 4 x 6 patches in windows of 2 x 2.
    windows, keys = 6, 4
    model = SwinTransformer(
        img_size=(16, 24),
        patch_size=4,
        embed_dim=21,
        depths=(2,),
        num_heads=(3,),
        window_size=2,
    )
    model = sharpen(model, 2.5).double()
    for block in model.layers[0].blocks:
        block.attn.fused_attn = True
    x = torch.randn(IMAGES, 3, 16, 24).double()
    calls: list[tuple[Tensor, ...]] = []
    attend = nn.functional.scaled_dot_product_attention

    def keep(*parts: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        calls.append((*parts, attn_mask))
        return attend(*parts, attn_mask=attn_mask, **options)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "scaled_dot_product_attention", keep)
        model(x)
    ds = recorded(model, *x.split([2, 3]), probes="health").dataset.isel(epoch=0)
    # Only the windows of the second block are shifted over the border. timm hides keys by adding
    # -100; a learned position bias does not reach -50.
    assert [bool((mask < -50).any()) for *_, mask in calls] == [False, True]
    for number, arrays in enumerate(calls):
        query, key, value, mask = (x.detach().numpy() for x in arrays)
        # A head has 21 / 3 = 7 channels.
        logits = (query @ key.swapaxes(2, 3) / math.sqrt(7)).reshape(-1, *mask.shape[-3:])
        weights = softmax_rows(logits + mask).reshape(len(query), 3, keys, keys)
        # Ranks are of all outputs of an image; sinks are of a single window.
        outputs = (weights @ value).reshape(IMAGES, windows, 3, keys, 7)
        outputs = outputs.swapaxes(1, 2).reshape(IMAGES, 3, windows * keys, 7)
        ratios = sink_ratios(weights, value).reshape(IMAGES * windows, 3).mean(0)
        expected = {"sink_value_norm": ratios, **of_outputs(outputs)}
        check(ds, f"layers.0.blocks.{number}.attn", expected, 1e-9)


def test_class_token_behind_the_patches() -> None:
    """A class token behind the patches is no patch, and it is recognized when it is the sink."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 21, 4, stride=4)
            # The class token is far longer than the patches, so that mistaking one for the other
            # changes the numbers.
            self.cls_token = nn.Parameter(50 * torch.randn(1, 1, 21))
            self.blocks = nn.ModuleList(
                timm.models.vision_transformer.Block(21, 3, qkv_bias=True) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.patches(x).flatten(2).mT
            x = torch.cat([x, self.cls_token.expand(len(x), -1, -1)], 1)
            for block in self.blocks:
                x = block(x)
            return x

    case = Case(Last, "blocks.", "attn", of_timm, ())
    model = sharpen(Last(), 2.5, only=True).double()
    x = torch.randn(IMAGES, 3, 12, 20).double()
    ds = recorded(model, x, probes="health").dataset.isel(epoch=0)
    kinds = (*grid_kinds(3, 5), "class")
    for number, tokens in block_inputs(model, case, x).items():
        block = model.get_submodule(f"blocks.{number}")
        expected = of_values_and_tokens(of_timm(block, tokens), kinds)
        check(ds, f"blocks.{number}.attn", expected, 1e-9)
    assert (ds.class_token_norm > 3 * ds.token_norm).all()


@pytest.mark.parametrize("kind", ["gpsa", "wide gpsa", "convit"])
def test_gated_layers_by_their_content_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks of a padded GPSA layer and of ConViT come from the content part,
    outputs from the whole attention.
    """
    # The limit is more than any layer has, so that no query is left out.
    monkeypatch.setattr("tcnn_probe.attention.patterns.QUERIES", 1 << 20)
    monkeypatch.setattr(Attention, "BLOCK", 1 << 12)  # few images at a time
    if kind != "convit":
        # With a padding of one, a 5 x 7 grid has 7 x 9 keys; 37 channels are more than the 35
        # queries.
        channels = 37 if kind == "wide gpsa" else 3
        layer = scatter(GPSA(channels, 4, 3, padding=1)).double()
        model = nn.Sequential(layer).eval()
        x = torch.randn(7, channels, 5, 7)
        name = "0"
    else:
        model = sharpen(
            timm.create_model("convit_tiny", img_size=48, depth=2, local_up_to_layer=2, embed_dim=2)
        ).double()
        x = torch.randn(7, 3, 48, 48)
        name = "blocks.1.attn"
    x = x.double()
    attentions: dict[str, Any] = {}
    with (
        tcnn_probe.attention_stream(
            model, lambda a: attentions.update({a.name: (a.parts, a.x, a.module)})
        ),
        torch.no_grad(),
    ):
        model(x)
    parts, inputs, module = attentions[name]
    query = parts.query.double()
    key = parts.key.double()
    logits = (query @ key.mT * parts.scale).detach().numpy()
    weights = softmax_rows(logits)
    expected = health(weights[:, None], [True] * weights.shape[-2])
    attention = parts.dense()
    if kind != "convit":
        values = module.values(inputs).expand(-1, attention.shape[1], -1, -1)
        # Values in the padding are zero.
        padded = values.unflatten(2, (5, 7))
        padded = nn.functional.pad(padded, (0, 0, 1, 1, 1, 1)).flatten(2, 3)
    else:
        values = module.v(inputs).unflatten(2, (4, -1)).transpose(1, 2)
        padded = values
    outputs = (attention @ padded).detach().numpy()
    expected |= of_outputs(outputs)
    expected["sink_value_norm"] = sink_ratios(weights, values.detach().numpy()).mean(0)
    expected["max_logit"] = logits.max((0, 2, 3))
    ds = recorded(model, *x.split([4, 3]), probes="health").dataset.isel(epoch=0)
    check(ds, name, expected, 1e-9)
    # If all heads were equal, a wrong pairing would not change their similarity.
    assert expected["head_similarity"].min() < 0.95
    assert np.isfinite(ds.token_norm.sel(layer=name))


def test_half_precision() -> None:
    """Numbers of a bfloat16 model, summed in float32,
    are close to float64 sums of the same queries and keys.
    """
    case = CASES["timm"]
    model = sharpen(case.make()).bfloat16()
    x = torch.randn(IMAGES, 3, 12, 20).bfloat16()
    ds = recorded(model, x, probes=HEALTH).dataset.isel(epoch=0)
    kinds = case.prefix + grid_kinds(3, 5)
    tokens = block_inputs(model, case, x)["0"]
    call = case.call(model.blocks[0], tokens)
    expected = of_values_and_tokens(call, kinds)
    outputs = {name: expected.pop(name) for name in ("output_norm", "output_rank")}
    # Sums of at most 21 terms are off by an eps per term; medians and counts are exact.
    eps = torch.finfo(torch.float32).eps
    check(ds, "blocks.0.attn", expected, 4 * 21 * eps)
    # The model rounds each output by 2^-9; singular values change by at most as much as the matrix.
    check(ds, "blocks.0.attn", outputs, 8 * 2**-9)


def test_one_pass_for_both_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two probes share a pass in either order, also when max_images ends within a batch."""
    passes = []
    measure = softmax.measure_softmax
    monkeypatch.setattr(
        softmax,
        "measure_softmax",
        lambda attention: passes.append(attention.name) or measure(attention),
    )
    case = CASES["timm"]
    x = torch.randn(IMAGES, 3, 12, 20)
    model = sharpen(case.make())
    first, second = (
        recorded(model, *x.split([2, 3]), probes=probes, max_images=4)
        for probes in (HEALTH, HEALTH[::-1])
    )
    # Each pass computes the softmax again, which takes most of the probe's time.
    assert len(passes) == 2 * 2 * 2  # recordings, batches, layers
    xr.testing.assert_equal(
        first.dataset[sorted(first.dataset.data_vars)],
        second.dataset[sorted(second.dataset.data_vars)],
    )
    # max_images ends within the second batch: 2 of its 3 images count.
    only = recorded(model, x[:4], probes="health").dataset
    for name, values in only.data_vars.items():
        np.testing.assert_allclose(values, first.dataset[name], rtol=1e-5, err_msg=name)
    assert "sink" not in recorded(model, x).dataset


def test_separate_softmax_records_no_values() -> None:
    """A softmax called on its own records all numbers but those of values;
    a silent head's norm and rank are 0.
    """
    case = CASES["timm"]
    x = torch.randn(IMAGES, 3, 12, 20)
    model = sharpen(case.make())
    with torch.no_grad():
        attention = model.blocks[0].attn
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            # The values of the first head are 7 of 21 channels, after the channels of queries and
            # keys.
            parameter[2 * 21 : 2 * 21 + 7] = 0
    fused = recorded(model, x, probes="health").dataset.isel(epoch=0)
    for block in model.blocks:
        block.attn.fused_attn = False
    apart = recorded(copy.deepcopy(model), x, probes="health").dataset.isel(epoch=0)
    hidden = {"sink_value_norm", "output_norm", "output_rank"}
    assert all(np.isnan(apart[name]).all() for name in hidden)
    for name, values in apart.drop_vars(hidden).data_vars.items():
        # Fused attention rounds at other places than separate logits, softmax and product.
        np.testing.assert_allclose(values, fused[name], rtol=1e-4, err_msg=name)
    for name in hidden:
        assert fused[name][0, 0] == 0
        assert (fused[name].values.ravel()[1:] > 0).all()
    assert (fused.nonfinite_images == 0).all()


def test_largest_value_over_ranks() -> None:
    """The largest value over ranks ignores ranks without images; no value at all is NaN."""
    from tcnn_probe.recording.sums import EpochSums, Terms

    def rank(*largest: float) -> EpochSums:
        # Minus infinity stands for no value yet; the mean is not asked for.
        count = np.isfinite(largest).astype(float)
        return EpochSums(sums={"max_logit": Terms(0 * count, count, np.array(largest))})

    ranks = [rank(3, -2, -np.inf, -np.inf), EpochSums(), rank(1, 5, 7, -np.inf)]
    variables = tcnn_probe.PROBES["softmax"].variables
    together = EpochSums.together(ranks).finish(variables)["max_logit"]
    np.testing.assert_array_equal(together, [3, 5, 7, np.nan])
