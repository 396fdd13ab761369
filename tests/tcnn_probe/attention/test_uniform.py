"""Statistics of uniform attention against all pairs in float64;
families test those of softmax attention.
"""

import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

from tcnn_model import GPSA
from tcnn_probe.attention.gated import gated_attention_of
from tcnn_probe.attention.layout import Layout, Tokens
from tests.tcnn_probe.attention.test_gated_statistics import GEOMETRIES
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.oracle import gpsa_statistics

pytestmark = pytest.mark.numerical


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_layer_with_uniform_attention(geometry: str) -> None:
    """The gates are 1 and there is no locality,
    so the oracle's distance and entropy are those of uniform attention.
    """
    # A gate of 1 - e^-60 leaves positional attention alone, and a locality near zero makes it
    # uniform.
    layer = GPSA(5, 3, **GEOMETRIES[geometry], gating=60.0).double()
    x = torch.randn(2, 5, 7, 11).double()
    with torch.no_grad():
        # softplus(-200) is almost zero, so that positional attention is uniform.
        layer.raw_locality.fill_(-40.0)
    uniform = gated_attention_of(layer, x).uniform_scales()
    expected = gpsa_statistics(layer, x)
    for name, of_heads in (
        ("uniform_entropy", "entropy"),
        # These scales are of images, and the same for all heads.
        ("uniform_distance", "attention_distance"),
    ):
        assert uniform[name].shape == (2,)
        torch.testing.assert_close(
            uniform[name][:, None].expand(2, layer.heads),
            expected[of_heads],
            rtol=1e-9,
            atol=0,
        )


def test_asymmetric_padding() -> None:
    """Padding "same" adds 3 x 2 pixels; queries are 2 pixels apart on 7 x 11,
    starting at the kernel's centre.
    """
    layer = GPSA(5, 3, (4, 3), padding="same", stride=2)
    # Of 3 x 2 pixels of padding, 1 is before and 2 are behind along y, and 1 on either side along
    # x.
    uniform = gated_attention_of(layer, torch.randn(1, 5, 7, 11)).uniform_scales()
    queries = [(y, x) for y in range(0, 8, 2) for x in range(0, 12, 2)]
    keys = [(y, x) for y in range(-1, 7 + 2) for x in range(-1, 11 + 1)]
    far = [math.dist(query, key) for query in queries for key in keys]
    assert float(uniform["uniform_distance"]) == pytest.approx(np.mean(far), abs=1e-12)
    assert float(uniform["uniform_entropy"]) == pytest.approx(math.log(len(keys)), abs=1e-12)


def test_many_tokens() -> None:
    """66,000 tokens have 4 * 10^9 pairs, which must not be formed."""
    # The sides are primes, and give 65,939 tokens. The sum is over offsets, weighted by their
    # number of pairs.
    rows, columns = 233, 283
    down = np.arange(rows)[:, None]
    right = np.arange(columns)
    pairs = (rows - down) * (1 + (down > 0)) * (columns - right) * (1 + (right > 0))
    expected = (pairs * np.sqrt(down**2 + right**2)).sum() / (rows * columns) ** 2
    tokens = Tokens(0, rows, columns)
    assert Layout(tokens, tokens).uniform_distance == pytest.approx(expected, rel=1e-12)


def test_mean_over_images_of_different_sizes() -> None:
    with pytest.warns(RuntimeWarning, match="images of several sizes"):
        recorder = recorded(Chain(), torch.randn(1, 2, 5, 11), torch.randn(3, 2, 7, 5))
    # There is one image of 7 x 13 keys and three of 9 x 7, with a padding of 1.
    expected = (math.log(7 * 13) + 3 * math.log(9 * 7)) / 4
    assert float(recorder.dataset.uniform_entropy.sel(layer="near").item()) == pytest.approx(
        expected, rel=1e-12
    )


def swin() -> nn.Module:
    options = {"depths": (2, 1), "num_heads": (2, 2), "embed_dim": 8, "window_size": 3}
    size = {"img_size": (48, 72), "patch_size": 4}
    return timm.create_model("swin_tiny_patch4_window7_224", **options, **size)


def test_regions_of_shifted_windows_are_those_of_the_mask() -> None:
    """7 x 10 cells are padded, in windows of 3 x 3."""
    size = 28, 40
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=size,
        depths=(2,),
        num_heads=(2,),
        embed_dim=8,
        window_size=3,
    ).eval()
    seen = model.layers[0].blocks[1].attn_mask.numpy() > -100
    far = np.array([[math.dist(a, b) for b in np.ndindex(3, 3)] for a in np.ndindex(3, 3)])
    expected = {
        "uniform_entropy": np.log(seen.sum(-1)).mean(),
        "uniform_distance": ((far * seen).sum(-1) / seen.sum(-1)).mean(),
    }
    for fused in (False, True):
        for block in model.layers[0].blocks:
            block.attn.fused_attn = fused
        recorder = recorded(model, torch.randn(2, 3, *size))
        ds = recorder.dataset.sel(layer="layers.0.blocks.1.attn")
        for name, value in expected.items():
            assert ds[name].item() == pytest.approx(value, rel=1e-12)


def test_a_single_window_that_is_rolled_has_no_distances() -> None:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=(20, 12),  # 5 x 3 cells, in one window of 7 x 5
        depths=(2,),
        num_heads=(2,),
        embed_dim=8,
        window_size=(7, 5),
        always_partition=True,
    ).eval()
    recorder = recorded(model, torch.randn(2, 3, 20, 12))
    layer = "layers.0.blocks.1.attn"
    seen = model.layers[0].blocks[1].attn_mask.numpy() > -100
    entropy = recorder.dataset.uniform_entropy.sel(layer=layer).item()
    assert entropy == pytest.approx(np.log(seen.sum(-1)).mean(), rel=1e-12)
    assert recorder.missing["uniform_distance"][layer].startswith("the tokens are not in the order")


def vit(patch: int) -> nn.Module:
    options = {"depth": 1, "embed_dim": 12, "num_heads": 3, "patch_size": patch}
    size = {"img_size": (48, 72), "dynamic_img_size": True, "dynamic_img_pad": True}
    return timm.create_model("vit_tiny_patch16_224", **options, **size)


@pytest.mark.parametrize(
    ("make", "channels", "sides"),
    [
        (lambda: vit(8), 3, [8]),
        # Patches of 10 pixels are padded: 5 x 8 of them do not divide the image into squares.
        (lambda: vit(10), 3, [None]),
        # 12 x 18 patches in windows, and 6 x 9 after they are merged.
        (swin, 3, [4, 4, 8]),
        # On the pixels themselves, between 6 x 8 queries further apart.
        (lambda: nn.Sequential(GPSA(2, 5, 3, padding=1, stride=(8, 9))), 2, [1]),
    ],
    ids=["patches", "padded", "windows", "pixels"],
)
def test_side_of_a_cell(make: Any, channels: int, sides: list[float | None]) -> None:
    recorder = recorded(make().eval(), torch.randn(3, channels, 48, 72))
    got = recorder.dataset.cell_pixels.values[0]
    np.testing.assert_array_equal(got, np.array(sides, dtype=float))
    missing = [*recorder.missing.get("cell_pixels", {})]
    assert len(missing) == sides.count(None)
    # A variable of videos is not recorded of images.
    assert "frame_distance" not in recorder.dataset
