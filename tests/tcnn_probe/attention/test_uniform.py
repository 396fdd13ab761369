"""What uniform attention would have, against loops over every query and key in float64."""

import json
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

import tcnn_probe
from tcnn_model import GPSA, reparameterize
from tcnn_probe.attention import uniform
from tcnn_probe.attention.call import AttentionCall, ProductLogits
from tcnn_probe.attention.layout import Layout, Tokens
from tests.tcnn_probe.attention.bruteforce import distance, entropy, grid
from tests.tcnn_probe.attention.test_gated_statistics import GEOMETRIES
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.oracle import gpsa_statistics

pytestmark = pytest.mark.numerical


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_of_a_layer_whose_attention_is_uniform(geometry: str) -> None:
    """Gates at 1 and no locality: the oracle's own distance and entropy are those of uniform attention."""
    layer = GPSA(5, 3, **GEOMETRIES[geometry], gating=60.0).double()
    x = torch.randn(2, 5, 7, 11, dtype=torch.float64)
    with torch.no_grad():
        layer.raw_locality.fill_(-40.0)
    found = uniform.uniform_gated_attention(layer.gated_attention(x))
    expected = gpsa_statistics(layer, x)
    for name, of_heads in (("uniform_entropy", "entropy"), ("uniform_distance", "attention_distance")):
        assert found[name].shape == (2,)
        torch.testing.assert_close(found[name][:, None].expand(2, layer.heads), expected[of_heads], rtol=1e-9, atol=0)


def test_of_padding_that_is_wider_behind() -> None:
    """Queries 2 pixels apart on 7 x 11, from the pixel that is the kernel's centre; padding "same" of 3 x 2 pixels."""
    layer = GPSA(5, 3, (4, 3), padding="same", stride=2)
    found = uniform.uniform_gated_attention(layer.gated_attention(torch.randn(1, 5, 7, 11)))
    asking = [(y, x) for y in range(0, 8, 2) for x in range(0, 12, 2)]  # 1 pixel before, and the centre is the 2nd
    looked_at = [(y, x) for y in range(-1, 7 + 2) for x in range(-1, 11 + 1)]
    far = [math.dist(query, key) for query in asking for key in looked_at]
    assert float(found["uniform_distance"]) == pytest.approx(np.mean(far), abs=1e-12)
    assert float(found["uniform_entropy"]) == pytest.approx(math.log(len(looked_at)), abs=1e-12)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "class and register tokens": ({"prefix": 3, "height": 5, "width": 7}, {"prefix": 3, "height": 5, "width": 7}),
    "coarser keys": (
        {"prefix": 1, "height": 6, "width": 10},
        {"prefix": 1, "height": 3, "width": 5, "spacing": (2.0, 2.0), "origin": (0.5, 0.5)},
    ),
    "coarser queries": ({"height": 3, "width": 2, "spacing": (3.0, 5.0)}, {"height": 7, "width": 11}),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_softmax_attention(layout: str, masked: bool) -> None:
    queries, keys = (Tokens(**{"prefix": 0, **about}) for about in LAYOUTS[layout])
    q, k = (torch.randn(6, 2, tokens.count, 3) for tokens in (queries, keys))
    source = ProductLogits(q, k, 1.0, torch.rand(queries.count, keys.count) > 0.4 if masked else None)
    found = uniform.uniform_softmax_attention(AttentionCall(nn.Identity(), 3, 2, source, Layout(queries, keys)))
    alike = np.full((queries.count, keys.count), 1 / keys.count)
    places = [grid(**about) for about in LAYOUTS[layout]]
    expected = {"uniform_entropy": entropy(alike).mean(), "uniform_distance": distance(alike, *places)}
    for name, value in expected.items():
        assert found[name].shape == (3,)
        np.testing.assert_allclose(found[name], value, rtol=1e-12)


def test_of_many_tokens() -> None:
    """66,000 tokens: 4 * 10^9 pairs, which are not made."""
    rows, columns = 233, 283
    total = 0.0
    for down in range(rows):
        for right in range(columns):
            pairs = (rows - down) * (2 if down else 1) * (columns - right) * (2 if right else 1)
            total += pairs * math.hypot(down, right)
    y, x = np.arange(rows), np.arange(columns)
    assert uniform.uniform_distance(y, y, x, x) == pytest.approx(total / (rows * columns) ** 2, rel=1e-12)


def recorded(model: nn.Module, *sizes: tuple[int, ...]) -> Any:
    with tcnn_probe.record(model.eval()) as recorder, torch.no_grad():
        for size in sizes:
            model(torch.randn(size))
        recorder.mark(epoch=0)
    return recorder.dataset.isel(epoch=0).load()


def test_recorded_beside_what_it_is_the_scale_of() -> None:
    """Of a converted CNN and of a ViT; where no grid is known there is no distance."""
    cnn = timm.create_model("test_resnet", in_chans=1, num_classes=2)
    ds = recorded(reparameterize(cnn, input_size=(1, 40, 56), stride="keep"), (1, 1, 40, 56))
    assert ds.uniform_entropy.dims == ds.uniform_distance.dims == ("layer",)
    assert ds.uniform_distance.notnull().all()
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(80, 112), depth=1, embed_dim=6, num_heads=3)
    ds = recorded(vit, (2, 3, 80, 112))
    assert float(ds.uniform_entropy.squeeze()) == pytest.approx(np.log(36), rel=1e-12)
    y, x = np.arange(5), np.arange(7)
    assert float(ds.uniform_distance.squeeze()) == pytest.approx(uniform.uniform_distance(y, y, x, x), rel=1e-12)

    class Tangled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    ds = recorded(Tangled(), (2, 3, 13, 5))
    assert float(ds.uniform_entropy.squeeze()) == pytest.approx(math.log(13), rel=1e-12)
    assert ds.uniform_distance.isnull().all()
    assert "no grid found" in json.loads(ds.attrs["missing"])["uniform_distance"][""]


def test_mean_over_images_of_different_sizes() -> None:
    ds = recorded(Chain(), (1, 2, 5, 11), (3, 2, 7, 5))
    expected = (math.log(7 * 13) + 3 * math.log(9 * 7)) / 4
    assert float(ds.uniform_entropy.sel(layer="near")) == pytest.approx(expected, rel=1e-12)
