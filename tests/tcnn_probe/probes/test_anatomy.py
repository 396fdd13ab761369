"""The anatomy of heads whose parts are known, and of models by brute force."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import tcnn_probe
from tcnn_model import GPSA
from tcnn_probe.heads.static_pattern import offsets_of_pairs
from tests.tcnn_probe.attention.bruteforce import attention_of, entropy, grid
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.attention.test_content_information import images
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.heads.test_anatomy import PARTS, nearest_convolution
from tests.tcnn_probe.networks import scatter

pytestmark = pytest.mark.numerical

# Entropies of up to log 100 nat in float32, and what iterative scaling leaves.
TOLERANCE = 2e-5
OFFSET, POSITION, KEY, MATCHING = PARTS
PREFIX = "prefix_information"


def numbers(model: nn.Module, *batches: Tensor) -> xr.Dataset:
    return recorded(model.eval(), *batches).dataset.isel(epoch=0).load()


def set_(model: nn.Module, change: Callable[[str, Tensor], Any]) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            change(name, parameter)
    return model


def vit(**options: Any) -> nn.Module:
    sizes = {"img_size": (40, 56), "patch_size": 8, "embed_dim": 12, "num_heads": 3, "depth": 2}
    return sharpen(timm.models.VisionTransformer(**sizes | options), 3)


def swin() -> nn.Module:
    options = {"window_size": (2, 3), "depths": (2,), "num_heads": (3,)}
    name = "swin_tiny_patch4_window7_224"
    return timm.create_model(name, img_size=(32, 60), embed_dim=12, **options)


def gpsa() -> nn.Module:
    layer = scatter(GPSA(3, 4, 3, padding=1))
    with torch.no_grad():
        layer.gating.fill_(40)  # a gate of 1 in float32
    return nn.Sequential(layer)


def convit() -> nn.Module:
    options = {"depth": 2, "local_up_to_layer": 2, "embed_dim": 12, "num_heads": 4}
    model = timm.create_model("convit_tiny", img_size=80, **options)

    def change(name: str, parameter: Tensor) -> None:
        if "gating_param" in name:
            parameter.fill_(40)
        elif "pos_proj.weight" in name:
            parameter.mul_(0.3)

    return set_(model, change)


def without_queries(model: nn.Module, *, bias: float = 0) -> nn.Module:
    """Set queries to a constant; of zero for a bias of zero."""

    def change(name: str, parameter: Tensor) -> None:
        if "bias_table" in name:
            parameter.mul_(60)  # far above its initial 0.02
        if name.endswith("qkv.weight"):
            parameter[: len(parameter) // 3] = 0
        if name.endswith("qkv.bias"):
            parameter[: len(parameter) // 3] = bias

    return set_(model, change)


def rotary() -> nn.Module:
    """Return a transformer whose tokens are constant
    and whose positions are rotations of queries and keys.
    """
    model = timm.models.Eva(
        img_size=(40, 56), patch_size=8, embed_dim=24, depth=1, num_heads=3,
        class_token=False, use_abs_pos_emb=False, use_rot_pos_emb=True, qkv_fused=True,
    )  # fmt: skip
    return blind(sharpen(model, 3))


def blind(model: nn.Module) -> nn.Module:
    """Set the patch embedding to zero, so that images make no difference."""
    return set_(model, lambda name, p: p.zero_() if "patch_embed.proj.w" in name else 0)


IMAGE = images(5, 3, 40, 56)


@pytest.mark.parametrize(
    ("model", "x", "zero", "least"),
    [
        (gpsa, images(5, 3, 7, 11), (POSITION, KEY, MATCHING), 0.5),
        (convit, images(5, 3, 80, 80), (POSITION, KEY, MATCHING), 0.1),
        (
            lambda: without_queries(swin()),
            images(5, 3, 32, 60),
            (POSITION, KEY, MATCHING),
            0.05,
        ),
        (lambda: without_queries(vit()), IMAGE, PARTS, -1),
        (lambda: blind(vit()), IMAGE, (KEY, MATCHING), 0.5),
        (rotary, IMAGE, (POSITION, KEY, MATCHING), 0.1),
        (
            lambda: without_queries(vit(pos_embed="none"), bias=3),
            IMAGE,
            (MATCHING,),
            0.1,
        ),
    ],
    ids=[
        "gpsa",
        "convit",
        "relative bias",
        "uniform",
        "absolute positions",
        "rotary",
        "same keys for all queries",
    ],
)
def test_heads_with_known_parts(
    model: Callable[[], nn.Module], x: Tensor, zero: tuple[str, ...], least: float
) -> None:
    """The other parts are all of the selectivity."""
    torch.manual_seed(0)
    ds = numbers(model(), *x.split([2, 3]))
    for name in zero:
        assert abs(ds[name]).max() < TOLERANCE, name
    total = sum(ds[name] for name in PARTS)
    np.testing.assert_allclose(total, ds.selectivity, atol=1e-12)
    assert (ds.selectivity.max("head") > least).all()
    if least < 0:
        assert abs(ds.selectivity).max() < TOLERANCE


class Random(nn.Module):
    """Attention that is independent for each image, query and key, on (B, 3, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        values = x.flatten(2).mT[:, None]
        count = values.shape[2]
        generator = torch.Generator().manual_seed(int(x[0, 0, 0, 0].abs() * 1e6))
        logits = torch.randn(len(x), 1, count, count, generator=generator)
        return scaled_dot_product_attention(0 * values, values, values, attn_mask=logits)


def test_random_attention_is_matching() -> None:
    """Key content is not quite 0, as the mean of 143 random rows differs between images."""
    ds = numbers(nn.Sequential(Random()), *images(200, 3, 11, 13).split(20))
    assert ds.selectivity.item() > 0.4
    assert ds[MATCHING].item() == pytest.approx(ds.selectivity.item(), abs=0.02)
    for name in (OFFSET, POSITION, KEY):
        assert abs(ds[name].item()) < 0.01


def anatomy(weights: np.ndarray, places: tuple[Any, Any], seen: np.ndarray) -> Any:
    """Return the parts by brute force from (B, windows, heads, queries, keys),
    each in loops over its definition.
    """
    count, windows, heads, queries, _ = weights.shape
    places = tuple(
        np.array([place or (np.nan, np.nan) for place in side], dtype=float) for side in places
    )
    index = np.tile(offsets_of_pairs(*places)[0], (windows, 1))
    log_keys = np.log(seen.sum(-1)).mean()
    parts = []
    for head in range(heads):
        a = weights[:, :, head]  # (B, windows, queries, keys)
        mean = a.mean(0)
        content = np.mean([entropy(mean).mean() - entropy(b).mean() for b in a])
        key = entropy(mean.mean(1)).mean() - entropy(a.mean(2)).mean()
        rows, is_seen = (
            mean.reshape(windows * queries, -1),
            seen.reshape(len(index), -1),
        )
        convolution = nearest_convolution(rows, index, is_seen)
        content, key = (x * count / (count - 1) for x in (content, key))
        position = convolution - entropy(mean).mean() - content / count
        # Every query sees all tokens off the grid, so that the even attention is known in closed
        # form.
        shares = mean.mean((0, 1))[np.isnan(places[1]).any(-1)]
        on_grid, keys = 1 - shares.sum(), a.shape[-1]
        prefix = sum(share * np.log(share * keys) for share in shares)
        prefix += on_grid * np.log(on_grid * keys / (keys - len(shares)))
        parts.append([log_keys - convolution, position, key, content - key, prefix])
    return dict(zip([*PARTS, PREFIX], np.array(parts).T, strict=True))


def shifted(windows: int) -> np.ndarray:
    """Return which keys of 2 x 3 windows are visible on a grid
    of 8 x 15 that is rolled by (1, 1).
    """
    # Rows and columns before the roll: a window at the seam holds cells of opposite sides of the
    # image.
    y, x = np.indices((8, 15)) + 1
    region = (y >= 8) * 2 + (x >= 15)
    cut = region.reshape(4, 2, 5, 3).transpose(0, 2, 1, 3).reshape(windows, 6)
    return cut[:, :, None] == cut[:, None]


class Grouped(nn.Module):
    """Attention between patches of 8 x 8 pixels, in which three heads share the keys of a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 6 * 4, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query = 3 * self.stem(x).unflatten(1, (6, 4)).flatten(3).mT
        key = query[:, :2]
        return scaled_dot_product_attention(query, key, key, enable_gqa=True)


@pytest.mark.study(but=["swin", "grouped"])
@pytest.mark.parametrize("name", ["vit", "swin", "grouped"])
def test_equals_brute_force(name: str) -> None:
    """Registers, shifted windows that hide keys,
    grouped queries, and images of which two batches are odd.
    """
    size = (32, 60) if name == "swin" else (24, 40)
    make = {
        "vit": lambda: vit(img_size=size, reg_tokens=2, depth=1),
        "swin": lambda: sharpen(swin(), 3),
    }
    model = make.get(name, Grouped)().double()
    x = images(5, 3, *size)
    recordings = []
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        with mock.patch("tcnn_probe.attention.patterns.QUERIES", 1 << 20):
            recordings.append(numbers(model, *x.double().split([1, 1, 3])))
    for number, reference in enumerate(attention_of(model, x)):
        weights = reference.weights.unflatten(0, (5, -1)).numpy()
        windows, queries = weights.shape[1], weights.shape[3]
        if name == "swin":
            places = grid(2, 3), grid(2, 3)
        else:
            prefix = 3 if name == "vit" else 0
            keys = grid(3, 5, prefix=prefix)
            weights = weights[..., prefix:, :]
            places = keys[prefix:], keys
        seen = np.ones((windows, len(places[0]), queries), dtype=bool)
        if name == "swin" and number:
            seen = shifted(windows)
            assert weights.max((0, 2))[~seen].max() < 1e-12
        expected = anatomy(weights, places, seen)
        assert min(expected[part].max() for part in PARTS) > 0.01
        assert (expected[PREFIX].max() > 0.01) == (name == "vit")
        # The first, third and fifth image are the even ones.
        even, odd = (anatomy(weights[half::2], places, seen) for half in (0, 1))
        expected |= {f"{part}_halves": even[part] - odd[part] for part in expected}
        for ds in recordings:
            row = ds.sel(layer=reference.layer)
            for part, values in expected.items():
                np.testing.assert_allclose(row[part], values, atol=1e-6, err_msg=part)


def test_halves_of_three_images_are_not_compared() -> None:
    recorder = recorded(vit(img_size=(16, 40), depth=1), images(3, 3, 16, 40))
    for part in (*PARTS, PREFIX):
        assert recorder.dataset[f"{part}_halves"].isnull().all()
        assert "fewer than four" in recorder.missing[f"{part}_halves"]["blocks.0.attn"]


class Masked(nn.Module):
    """Attention between 5 x 7 patches, with a mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2, 2)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).mT[:, None]
        return scaled_dot_product_attention(tokens, tokens, tokens, self.mask)


def test_masks_that_differ_between_images_are_named() -> None:
    """A mask that all images share counts the keys that it leaves."""
    mask = torch.rand(1, 1, 35, 35, generator=torch.Generator().manual_seed(0)) > 0.3
    x = images(4, 3, 10, 14)
    for shared in (mask, torch.where(mask, 0, -100.0)):
        recorder = recorded(Masked(shared).eval(), x)
        assert not recorder.missing
        ds = recorder.dataset
        expected = mask.sum(-1).double().log().mean() - ds.entropy.item()
        assert ds.selectivity.item() == pytest.approx(expected.item(), abs=1e-5)
    other = mask.repeat(4, 1, 1, 1)
    other[1] = mask.flip(-1)[0]
    recorder = recorded(Masked(other).eval(), x)
    for name in ("selectivity", *PARTS):
        assert recorder.missing[name][""].startswith("masks hide other keys")
    assert recorder.dataset.content_information.item() > 0


class Unfused(nn.Module):
    """Attention of three heads between 5 x 7 patches,
    with a function of their logits; and an oracle of selectivity.
    """

    num_heads = 3

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.change = nn.Conv2d(3, 12, 2, 2), change

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.stem(x).flatten(2).mT.unflatten(-1, (3, 4)).transpose(1, 2)
        return self.change(tokens @ tokens.mT).softmax(-1), tokens

    def forward(self, x: Tensor) -> Tensor:
        attention, tokens = self.attention(x)
        return attention @ tokens


# Each query sees its own key and about two in three of the others.
SEEN = (torch.rand(35, 35, generator=torch.Generator().manual_seed(0)) > 0.3) | torch.eye(35).bool()
# What is done to the logits, and how many keys each query then sees.
LOGITS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "mask": (lambda x: x + torch.where(SEEN, 0, -100.0), SEEN.sum(-1)),
    "mask and bias": (
        lambda x: x + torch.where(SEEN, 0, -100.0) + torch.eye(35).roll(3, 0),
        SEEN.sum(-1),
    ),
    "filled": (lambda x: x.masked_fill(~SEEN, -100.0), SEEN.sum(-1)),
    # Without a mask, however sharp, all keys are seen.
    "sink": (lambda x: x + 200 * (torch.arange(35) == 4), torch.full((35,), 35)),
    "sharp": (lambda x: 300 * x, torch.full((35,), 35)),
    "offsets": (
        lambda x: x + 200 * torch.stack([torch.eye(35).roll(i, 0) for i in range(3)]),
        torch.full((35,), 35),
    ),
}


@pytest.mark.parametrize("name", LOGITS)
def test_keys_that_a_model_masks_itself_do_not_count(name: str) -> None:
    change, seen = LOGITS[name]
    torch.manual_seed(0)
    model, x = Unfused(change).eval(), images(4, 3, 10, 14)
    ds = recorded(model, x).dataset.isel(epoch=0, layer=0)
    with torch.no_grad():
        weights = model.double().attention(x.double())[0]
    entropy = -torch.xlogy(weights, weights).sum(-1).mean((0, 2))
    expected = seen.double().log().mean() - entropy
    np.testing.assert_allclose(ds.selectivity, expected, atol=1e-5)


def test_kernels_are_those_of_the_convolutions() -> None:
    """With relative biases only, the kernel is the exponential of the bias;
    GPSA has offsets beyond the image.
    """
    layer = gpsa().eval()
    probes = [*tcnn_probe.DEFAULT, "offset-kernel"]
    recorder = recorded(layer, images(2, 3, 7, 11), probes=probes)
    ds = recorder.tree["offset-kernel"].dataset.isel(epoch=0, layer=0)
    kernel = ds.offset_kernel
    np.testing.assert_allclose(kernel.sum(("offset_y", "offset_x")), 1, atol=1e-6)
    alpha = layer[0].locality_strength.detach().numpy()[:, None, None]
    center = layer[0].center.detach().numpy()
    y, x = (ds[name].values for name in ("offset_y", "offset_x"))
    square = (y[:, None] - center[:, :1, None]) ** 2 + (x - center[:, 1:, None]) ** 2
    expected = np.exp(-alpha * (square - square.min((1, 2), keepdims=True)))
    expected /= expected.sum((1, 2), keepdims=True)
    np.testing.assert_allclose(kernel, expected, atol=1e-5)


def test_kernels_of_transformers_have_a_weight_for_each_token_off_the_grid() -> None:
    recorder = recorded(vit(reg_tokens=2), IMAGE, probes="offset-kernel")
    ds = recorder.tree["offset-kernel"].dataset
    total = ds.offset_kernel.sum(("offset_y", "offset_x"))
    total = total + ds.prefix_kernel.sum("prefix_token")
    np.testing.assert_allclose(total, 1, atol=1e-6)
    assert ds.sizes["prefix_token"] == 3
    assert ds.offset_kernel.sel(offset_y=5).isnull().all()
    assert (ds.images == 5).all()
