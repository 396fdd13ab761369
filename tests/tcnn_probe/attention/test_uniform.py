"""What even attention would have, against loops over every query and key in float64."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

import tcnn_probe
from tcnn_model import GPSA, reparameterize
from tcnn_probe.attention import uniform as even
from tcnn_probe.attention.call import AttentionCall, ProductLogits
from tcnn_probe.attention.layout import Layout, Tokens
from tests.tcnn_probe.attention.bruteforce import distance, entropy, grid
from tests.tcnn_probe.attention.test_gated_statistics import GEOMETRIES
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.oracle import gpsa_statistics


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_of_a_layer_whose_attention_is_even(geometry: str) -> None:
    """Gates at 1 and no locality: the oracle's own distance and entropy are those of even attention."""
    layer = GPSA(5, 3, **GEOMETRIES[geometry], gating=60.0)
    x = torch.randn(2, 5, 7, 11)
    with torch.no_grad():
        layer.raw_locality.fill_(-40.0)
    found = even.uniform_gated_attention(layer.gated_attention(x))
    expected = gpsa_statistics(layer, x)
    for name, of_heads in (("uniform_entropy", "entropy"), ("uniform_distance", "attention_distance")):
        assert found[name].shape == (2,)
        torch.testing.assert_close(found[name][:, None].expand(2, layer.heads), expected[of_heads])


def test_of_padding_that_is_wider_behind() -> None:
    """Four queries 2 pixels apart on 7 x 11, from the pixel that is the kernel's centre."""
    layer = GPSA(5, 3, (4, 3), padding="same", stride=2)
    found = even.uniform_gated_attention(layer.gated_attention(torch.randn(1, 5, 7, 11)))
    axes = [(7, 4, (4 - 1) * 2 + 4 - 7), (11, 6, (6 - 1) * 2 + 3 - 11)]
    queries, keys = [], []
    for length, count, padding in axes:
        before = padding // 2
        extent = 4 if length == 7 else 3
        queries.append([2 * n + (extent - 1) // 2 - before for n in range(count)])
        keys.append(range(-before, length + padding - before))
    far = [math.hypot(b - j, a - i) for b in queries[0] for a in queries[1] for j in keys[0] for i in keys[1]]
    assert float(found["uniform_distance"]) == pytest.approx(np.mean(far), abs=1e-12)
    assert float(found["uniform_entropy"]) == pytest.approx(math.log(len(keys[0]) * len(keys[1])), abs=1e-12)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one grid": ({"height": 5, "width": 7}, {"height": 5, "width": 7}),
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
    source = ProductLogits(
        torch.randn(6, 2, queries.count, 3),
        torch.randn(6, 2, keys.count, 3),
        1.0,
        torch.rand(queries.count, keys.count) > 0.4 if masked else None,
    )
    found = even.uniform_softmax_attention(AttentionCall(nn.Identity(), 3, 2, source, Layout(queries, keys)))
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
    assert even.uniform_distance(y, y, x, x) == pytest.approx(total / (rows * columns) ** 2, rel=1e-12)


def recorded(model: nn.Module, *sizes: tuple[int, ...], **options: Any) -> Any:
    with tcnn_probe.record(model.eval(), **options) as recorder, torch.no_grad():
        for size in sizes:
            model(torch.randn(size))
        recorder.mark(epoch=0)
    return recorder.dataset.isel(epoch=0).load()


def test_recorded_beside_what_it_is_the_scale_of() -> None:
    cnn = timm.create_model("resnet18", in_chans=1, num_classes=2)
    ds = recorded(reparameterize(cnn, input_size=(1, 80, 112)), (1, 1, 80, 112))
    assert ds.uniform_entropy.dims == ds.uniform_distance.dims == ("layer",)
    np.testing.assert_allclose(ds.uniform_entropy, np.log((5 + 2) * (7 + 2)), rtol=1e-12)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(80, 112), depth=1, embed_dim=6, num_heads=3)
    ds = recorded(vit, (2, 3, 80, 112))
    assert float(ds.uniform_entropy.squeeze()) == pytest.approx(np.log(36), rel=1e-12)
    y, x = np.arange(5), np.arange(7)
    assert float(ds.uniform_distance.squeeze()) == pytest.approx(even.uniform_distance(y, y, x, x), rel=1e-12)


def test_mean_over_images_of_different_sizes() -> None:
    ds = recorded(Chain(), (1, 2, 5, 11), (3, 2, 7, 5))
    expected = (math.log(7 * 13) + 3 * math.log(9 * 7)) / 4
    assert float(ds.uniform_entropy.sel(layer="near")) == pytest.approx(expected, rel=1e-12)


def test_no_distance_where_no_grid_is_known() -> None:
    class Tangled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    ds = recorded(Tangled(), (2, 3, 13, 5))
    assert float(ds.uniform_entropy.squeeze()) == pytest.approx(math.log(13), rel=1e-12)
    assert ds.uniform_distance.isnull().all()
    assert "no grid found" in json.loads(ds.attrs["missing"])["uniform_distance"][""]


def test_a_store_begun_without_them_goes_on_without_them(tmp_path: Path) -> None:
    model, x, new = Chain(), torch.randn(1, 2, 5, 7), ("uniform_entropy", "uniform_distance")
    known = tcnn_probe.PROBES["gpsa"]
    assert known.measure is not None
    measure = known.measure
    old = tcnn_probe.Probe(
        "gpsa",
        {name: about for name, about in known.variables.items() if name not in new},
        known.module_type,
        group="",
        facts=known.facts,
        state=known.state,
        measure=lambda call: {name: value for name, value in measure(call).items() if name not in new},
    )
    with torch.no_grad(), tcnn_probe.record(model, tmp_path / "run.zarr", probes=old) as recorder:
        model(x)
        recorder.mark(epoch=0)
    with torch.no_grad(), tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        model(x)
        with pytest.warns(RuntimeWarning, match=r"began without them: \['uniform_distance', 'uniform_entropy'\]"):
            recorder.mark(epoch=1)
    ds = recorder.dataset
    assert ds.sizes["epoch"] == 2
    assert not set(new) & set(ds)
    np.testing.assert_array_equal(ds.entropy[0], ds.entropy[1])


def test_a_store_without_another_number_is_still_refused(tmp_path: Path) -> None:
    model, known = Chain(), tcnn_probe.PROBES["gpsa"]
    less = {name: about for name, about in known.variables.items() if name != "content_entropy"}
    measure = known.measure
    assert measure is not None
    old = tcnn_probe.Probe(
        "gpsa",
        less,
        known.module_type,
        group="",
        facts=known.facts,
        state=known.state,
        measure=lambda call: {name: value for name, value in measure(call).items() if name in less},
    )
    for probes, told in ((old, None), (None, "variable 'content_entropy': absent there")):
        with torch.no_grad(), tcnn_probe.record(model, tmp_path / "run.zarr", probes=probes) as recorder:
            model(torch.randn(1, 2, 5, 7))
            if told is None:
                recorder.mark(epoch=0)
            else:
                with pytest.raises(tcnn_probe.StoreError, match=told):
                    recorder.mark(epoch=0 + 1)
