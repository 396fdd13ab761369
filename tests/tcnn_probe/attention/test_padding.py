"""Padded images are measured as if each were alone,
and padding changes no number, however it is hidden.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tests.extras import need
from tests.tcnn_probe.attention.bruteforce import attention_of, entropy, information, mask_of

pytestmark = pytest.mark.numerical

WIDTH, HEADS = 21, 3
LENGTHS = (13, 7, 3)
SIZES = ((3, 5), (5, 2), (2, 3))  # of grids of images
PROBES = [*tcnn_probe.DEFAULT, "health", "segments"]


class Padded(nn.Module):
    """A block of attention over the patches of images, of which a mask shows the real ones.

    Args:
        how: Function (query, key, value, visible) -> output, where ``visible`` is (B, 1, N, N) or
            (B, 1, 1, N).
        hides: Whether padded tokens see and are seen by "all" keys but their own, "none", or only
            real "keys".
        prefix: Number of class tokens.
    """

    num_heads = HEADS

    def __init__(self, how: Callable[..., Tensor], hides: str, prefix: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.hides = hides
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.num_prefix_tokens = prefix
        self.cls_token = nn.Parameter(torch.randn(1, prefix, WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, 5)
        self.double().eval()
        with torch.no_grad():
            self.qkv.weight *= 4

    def forward(self, images: Tensor, is_real: Tensor | None = None) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        visible = None
        if is_real is not None:
            is_real = F.pad(is_real.flatten(1), (self.num_prefix_tokens, 0), value=True)
            visible = is_real[:, None, None]
            if self.hides != "keys":
                visible = visible & is_real[:, None, :, None]
            if self.hides == "all but themselves":
                visible = visible | torch.eye(x.shape[1], dtype=torch.bool)
        x = self.how(q, k, v, visible).transpose(1, 2).flatten(2)
        return self.proj(x)[:, 0]


def fused(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def fused_adding(number: float, bias: float = 0.0) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        mask = torch.full_like(visible, bias, dtype=q.dtype).masked_fill(~visible, number)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def unfused(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if visible is not None:
        logits = logits.where(visible, torch.finfo(q.dtype).min)
    return logits.softmax(-1) @ v


def adding(number: float) -> Callable[..., Tensor]:
    """Attention that adds a number to the logits of hidden keys, as transformers does."""

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        logits = q @ k.mT / q.shape[-1] ** 0.5 + (1.0 - visible.to(q.dtype)) * number
        return F.softmax(logits, -1) @ v

    return attend


def subtracting(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    logits = q @ k.mT
    logits -= 300 * (~visible).to(q.dtype)
    return torch.softmax(logits / q.shape[-1] ** 0.5, -1) @ v


def filling(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    logits = (q @ k.mT).flatten(0, 1)
    hidden = ~visible.repeat_interleave(HEADS, 1).expand(-1, -1, *logits.shape[1:])
    logits.masked_fill_(hidden.flatten(0, 1), -100)
    return (logits.unflatten(0, (-1, HEADS)) / q.shape[-1] ** 0.5).softmax(-1) @ v


def epoch(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, xr.DataArray]:
    """Return all variables of a recording of one forward."""
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        tcnn_probe.record(model, probes=PROBES, **options) as recorder,
    ):
        warnings.simplefilter("ignore")
        model(*inputs)
        recorder.mark(epoch=0)
    variables: dict[str, xr.DataArray] = {}
    for node in recorder.tree.subtree:
        variables |= {name: x.isel(epoch=0) for name, x in node.data_vars.items()}
    assert variables["nonfinite_images"].sum() == 0
    return variables


def check_alone(
    padded: dict[str, xr.DataArray],
    alone: Sequence[dict[str, xr.DataArray]],
    tolerance: float = 1e-9,
) -> None:
    """Assert that every variable of padded images is the mean,
    or the largest, of those of the images alone.
    """
    names = alone[0].keys() - {"images", "nonfinite_images", "sink_kind"}
    # These compare images, so that a single one has none.
    names -= {name for name in names if "information" in name or "selectivity" in name}
    names -= {"translation_equivariance"}
    assert names >= {"entropy", "sink", "query_diversity", "uniform_entropy"}
    for name in names:
        values = np.stack([image[name].values for image in alone])
        largest = name in ("max_logit", "token_norm_max")
        expected = values.max(0) if largest else values.mean(0)
        np.testing.assert_allclose(
            padded[name].values, expected, tolerance, tolerance, err_msg=name
        )


def images_alone() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 3, 4 * h, 4 * w, generator=generator).double() for h, w in SIZES]


def padded_to(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the images among noise on a grid of this size, and which of its cells are real."""
    generator = torch.Generator().manual_seed(2)
    batch = torch.randn(3, 3, 4 * height, 4 * width, generator=generator).double()
    is_real = torch.zeros(3, height, width, dtype=torch.bool)
    for i, (image, (h, w)) in enumerate(zip(images_alone(), SIZES, strict=True)):
        batch[i, :, : 4 * h, : 4 * w] = image
        is_real[i, :h, :w] = True
    return batch, is_real


@cache
def measured_alone(how: Callable[..., Tensor], prefix: int) -> list[dict[str, xr.DataArray]]:
    """Return the variables of each image alone, without a mask, which is what hides nothing."""
    model = Padded(how, "keys", prefix)
    return [epoch(model, image) for image in images_alone()]


KEYS, ALL, BUT_THEMSELVES = "keys", "all", "all but themselves"
# How keys are hidden: in fused attention, or in logits, by masks that hide less than infinity.
FUSED: dict[str, Callable[..., Tensor]] = {
    "fused": fused,
    "fused, -1e9": fused_adding(-1e9),
    "fused, -100": fused_adding(-100),
    # Of a bias, even one that changes no number, a mask cannot be told by zeros.
    "fused, -1e9 beside a bias": fused_adding(-1e9, bias=1e-12),
}
UNFUSED = {
    "filled with the smallest": unfused,
    "filled": filling,
    "subtracted": subtracting,
    "-100": adding(-100),
    "-1e4": adding(-1e4),
    "smallest": adding(torch.finfo(torch.float64).min),
}
CASES = [
    *((name, 1, hides) for name in ("fused", "filled", "-100") for hides in (KEYS, ALL)),
    *((name, 1, BUT_THEMSELVES) for name in (*FUSED, *UNFUSED)),
    *(("fused", 0, hides) for hides in (KEYS, ALL)),
    ("fused, -1e9", 1, KEYS),
    ("fused, -100", 1, ALL),
    ("filled with the smallest", 1, ALL),
    ("subtracted", 1, KEYS),
    ("-1e4", 1, ALL),
    ("smallest", 1, KEYS),
]


@pytest.mark.study(but=["fused-1-keys", "filled with the smallest-1-all", "-100-1-keys"])
@pytest.mark.parametrize(("name", "prefix", "hides"), CASES)
def test_padded_images_are_measured_as_if_alone(name: str, prefix: int, hides: str) -> None:
    model = Padded((FUSED | UNFUSED)[name], hides, prefix)
    batch, is_real = padded_to(7, 11)
    padded = epoch(model, batch, is_real)
    without_mask = fused if name in FUSED else unfused
    alone = measured_alone(without_mask, prefix)
    assert "attention_distance" in alone[0]
    check_alone(padded, alone)
    weights = [
        attention_of(Padded(without_mask, hides, prefix), image)[0].weights.numpy()
        for image in images_alone()
    ]
    expected = np.mean([entropy(of_image).mean((0, 2)) for of_image in weights], 0)
    np.testing.assert_allclose(padded["entropy"][0], expected, rtol=1e-9)
    (reference,) = attention_of(model, batch, is_real)
    patches = reference.weights.numpy()[:, None, :, prefix:]
    expected = information(patches, is_real.flatten(1).numpy()[:, None])
    information_of_padded = padded["content_information"][0]
    np.testing.assert_allclose(information_of_padded, expected, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_masks_of_later_forwards_are_others() -> None:
    """The first one hides nothing."""
    model = Padded(adding(-100), "keys", 0)
    batch, is_real = padded_to(5, 7)
    with tcnn_probe.record(model) as recorder:
        for visible in (is_real | True, is_real, is_real.flip(2)):
            model(batch, visible)
            recorder.mark(epoch=len(recorder.epochs))
    entropy = recorder.dataset.uniform_entropy.values[:, 0]
    mean = is_real.sum((1, 2)).double().log().mean()
    np.testing.assert_allclose(entropy, [np.log(35), mean, mean], rtol=1e-6)


@torch.no_grad()
def test_a_summand_that_alpha_scales_is_no_mask() -> None:
    def adding_a_hundredth(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        summand = -100 * (~visible).to(q.dtype)
        return torch.add(q @ k.mT, summand, alpha=0.01).softmax(-1) @ v

    measured = epoch(Padded(adding_a_hundredth, "keys", 0), *padded_to(5, 7))
    np.testing.assert_allclose(measured["uniform_entropy"], np.log(35), rtol=1e-6)


class Encoder(nn.Module):
    """torch's encoder, which packs padded sequences on its fast path when nothing is recorded."""

    def __init__(self) -> None:
        super().__init__()
        # It packs sequences for even numbers of heads alone.
        layer = nn.TransformerEncoderLayer(22, 2, 24, batch_first=True)
        self.stem = nn.Linear(WIDTH, 22)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, is_real: Tensor) -> Tensor:
        return self.encoder(self.stem(x), src_key_padding_mask=~is_real)


def navit() -> tuple[nn.Module, Callable[..., tuple[Any, ...]]]:
    model = timm.create_model(
        "naflexvit_base_patch16_siglip", embed_dim=WIDTH, num_heads=HEADS, depth=1
    )

    def inputs(x: Tensor, is_real: Tensor) -> tuple[Any, ...]:
        places = torch.arange(x.shape[1])
        # The model reads the size of its grid off these, so those of padding are 0.
        coord = torch.stack([places // 3, places % 3], -1) * is_real[..., None]
        patches = x.repeat(1, 1, 37)[..., :768]
        return ({"patches": patches, "patch_coord": coord, "patch_valid": is_real},)

    return model, inputs


def siglip2() -> tuple[nn.Module, Callable[..., tuple[Any, ...]]]:
    transformers = need("transformers")
    config = transformers.Siglip2VisionConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_patches=64,
        patch_size=1,
        num_channels=WIDTH,
    )

    def inputs(x: Tensor, is_real: Tensor) -> tuple[Any, ...]:
        shapes = torch.stack([is_real.sum(1), torch.ones(len(x), dtype=torch.long)], 1)
        return x, is_real.long(), shapes

    return transformers.Siglip2VisionModel(config), inputs


@pytest.mark.study(but=["torch"])
@pytest.mark.parametrize(
    "make",
    [lambda: (Encoder(), lambda *x: x), navit, siglip2],
    ids=["torch", "timm", "transformers"],
)
def test_libraries_that_pad(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model = model.double().eval()
    images = [torch.randn(1, length, WIDTH).double() for length in LENGTHS]
    alone = [epoch(model, *inputs(x, torch.ones(x.shape[:2]) > 0)) for x in images]
    runs = []
    for length in (17, 131):
        x = torch.randn(3, length, WIDTH).double()
        is_real = torch.arange(length) < torch.tensor(LENGTHS)[:, None]
        for row, image in zip(x, images, strict=True):
            row[: image.shape[1]] = image[0]
        runs.append(epoch(model, *inputs(x, is_real)))
        # The libraries resize positions in float32, also in a model in float64.
        check_alone(runs[-1], alone, 1e-6)
    name = "content_information"
    np.testing.assert_allclose(runs[0][name], runs[1][name], rtol=1e-9, atol=1e-12)


def test_what_is_no_padding() -> None:
    """The last token of causal attention, queries of others' keys,
    and tokens that all see only themselves.
    """
    eye = torch.eye(5, dtype=torch.bool)
    for visible, counted in (
        (eye.cumsum(1).mT > 0, [1, 1, 1, 1, 1]),
        (eye, [1, 1, 1, 1, 1]),
        ((torch.arange(5) < 3).expand(5, 5), [1, 1, 1, 0, 0]),
        ((torch.arange(5) < 3).expand(5, 5) | eye, [1, 1, 1, 1, 1]),
        (eye & (torch.arange(5) < 1), [1, 0, 0, 0, 0]),
        (torch.block_diag(torch.ones(3, 3), torch.eye(2)) > 0, [1, 1, 1, 0, 0]),
    ):
        mask = mask_of(np.where(visible, 0.0, -np.inf)[None, None, None])
        assert mask.queries[0, 0].tolist() == [bool(x) for x in counted]
        seen: list[Tensor] = []

        class Masked(nn.Module):
            def forward(self, x: Tensor, visible: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x, attn_mask=visible)

        def look(attention: Any, seen: list[Tensor] = seen) -> None:
            seen.append(attention.visibility.queries.clone())

        model = Masked()
        with tcnn_probe.attention_stream(model, look):
            model(torch.randn(2, HEADS, 5, 7), visible)
        assert seen[0].tolist() == 2 * [[[bool(x) for x in counted]]]
