"""Orders of heads, correlations of ranks,
and the verdict of ``pretrained_heads.py``, against plain computations.
"""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from PIL import Image
from scipy.stats import spearmanr

from common.head_ladder import (
    attention_deviation,
    choose,
    correlation,
    lost_shares,
    trained_convolutions,
    within_blocks,
)
from common.output import InputError
from common.pretrained import load_network, load_photographs
from pretrained_heads import report

LAYERS, HEADS, IMAGES = 5, 7, 11


def array(values: np.ndarray) -> xr.DataArray:
    dims = ("layer", "head", "image")[: values.ndim]
    return xr.DataArray(values, {"layer": [f"b{i}" for i in range(len(values))]}, dims)


def test_correlations_are_spearmans() -> None:
    draw = np.random.default_rng(0)
    shares = array(draw.normal(size=(LAYERS, HEADS)))
    upper, lower = (array(draw.uniform(1, 2, (LAYERS, HEADS, IMAGES))) for _ in "ab")
    shares[1, 2] = np.nan
    ratio = upper.mean("image") / lower.mean("image")
    rho = correlation(shares, upper, lower, resamples=200)
    known = np.isfinite(shares.values)
    expected = spearmanr(shares.values[known], ratio.values[known]).statistic
    assert rho.value == pytest.approx(expected, abs=1e-12)
    assert rho.heads == LAYERS * HEADS - 1
    assert rho.low < rho.value < rho.high
    # Costs that a monotonic function of the shares gives in each block, and between blocks the
    # reverse.
    costs = shares.fillna(0) - 100 * array(np.arange(LAYERS)[:, None] + np.zeros(HEADS))
    shares = shares.fillna(0) + 100 * array(np.arange(LAYERS)[:, None] + np.zeros(HEADS))
    costs = costs.expand_dims(image=IMAGES)
    assert correlation(shares, costs, resamples=9).value < -0.5
    inside = correlation(shares, costs, ranks=within_blocks, resamples=9)
    assert inside.value == pytest.approx(1)


def heads() -> xr.Dataset:
    draw = np.random.default_rng(1)
    names = ("offset", "position", "key_content", "query_key_content")
    parts = {f"{name}_information": draw.uniform(0, 1, (LAYERS, HEADS)) for name in names}
    recording = xr.Dataset({name: array(values) for name, values in parts.items()})
    recording["selectivity"] = sum(recording.data_vars.values())
    recording["uniform_entropy"] = ("layer", np.full(LAYERS, 4.0))
    return lost_shares(recording).assign(deviation=array(draw.uniform(size=(LAYERS, HEADS))))


def test_orders_take_the_heads_with_least_to_lose() -> None:
    ds = heads()
    content = ds.key_content + ds.query_key_content
    static = content / ds.selectivity
    np.testing.assert_allclose(ds.lost.sel(mode="static"), static)
    lost = 1 - ds.offset / ds.selectivity
    np.testing.assert_allclose(ds.lost.sel(mode="convolutional"), lost)
    chosen = choose(ds, "static", "shares", 0.2, 0)
    assert chosen.sum() == 7
    assert static.values[chosen.values].max() < static.values[~chosen.values].min()
    deviating = choose(ds, "static", "deviation", 0.2, 0)
    smallest = np.sort(ds.deviation.values.ravel())[:7]
    np.testing.assert_array_equal(np.sort(ds.deviation.values[deviating.values]), smallest)
    draws = [
        choose(ds, "static", order, 0.2, seed)
        for order in ("random", "same layers")
        for seed in (0, 1)
    ]
    assert [int(x.sum()) for x in draws] == [7] * 4
    for control in draws[2:]:
        np.testing.assert_array_equal(control.sum("head"), chosen.sum("head"))
    assert (draws[0] != draws[1]).any()
    assert (draws[2] != draws[3]).any()


def test_deviations_are_over_images() -> None:
    network = load_network("", None, False, small=True)
    images = load_photographs(None, 5, network)
    layer = network.features.vit.blocks[0].attn
    layer.fused_attn = False
    maps = []
    layer.attn_drop.register_forward_hook(lambda *args: maps.append(args[2].double()))
    with torch.no_grad():
        for image in images:
            network.features(image[None])
    expected = torch.cat(maps).std(0, correction=0).mean((1, 2))
    deviation = attention_deviation(network.features, images)
    np.testing.assert_allclose(deviation[0], expected, rtol=1e-6)


def test_half_of_the_heads_are_trained_to_give_the_features_back() -> None:
    network = load_network("", None, False, small=True)
    images = load_photographs(None, 16, network)
    ds = xr.Dataset(
        {
            "lost": xr.DataArray(
                np.random.default_rng(0).uniform(size=(1, 2, 3)),
                {
                    "mode": ["convolutional"],
                    "layer": ["vit.blocks.0.attn", "vit.blocks.1.attn"],
                    "head": range(3),
                },
                ("mode", "layer", "head"),
            )
        }
    )
    ds["deviation"] = -ds.lost.isel(mode=0, drop=True)
    before = {k: v.clone() for k, v in network.features.state_dict().items()}
    change = trained_convolutions(
        network, ds, images[:8], images[12:], images[12:], steps=30, lr=3e-4
    ).change.mean("image")
    assert (change.sel(trained=True) < change.sel(trained=False)).all()
    after = network.features.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_photographs_of_two_calls_differ(tmp_path: Path) -> None:
    for number in range(9):
        folder = tmp_path / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (70, 64), (20 * number, 0, 0)).save(folder / f"{number}.png")
    network = load_network("", None, False, small=True)
    first = load_photographs(str(tmp_path), 4, network)
    others = load_photographs(str(tmp_path), 5, network, besides=4)
    reds = {float(image[0].mean()) for image in [*first, *others]}
    assert len(reds) == 9
    with pytest.raises(InputError, match="at least 10 photographs, found 9"):
        load_photographs(str(tmp_path), 6, network, besides=4)


def test_other_models_are_refused() -> None:
    with pytest.raises(InputError, match="expected a vision transformer of timm"):
        load_network("resnet18", None, False, small=False)
    assert timm.is_model("vit_small_patch14_dinov2")  # the default


@pytest.mark.parametrize("sign", [1, -1])
def test_the_verdict_follows_the_costs(sign: int, capsys: pytest.CaptureFixture[str]) -> None:
    ds, draw = heads(), np.random.default_rng(2)
    content = ds.key_content + ds.query_key_content
    static = 2 + sign * content / ds.selectivity
    costs = {
        "uniform": static + 1,
        "convolutional": static,
        "static": static,
        "salient": static * (2 - sign * ds.key_content / content),
        "zero": xr.ones_like(static),
    }
    noise = 1 + 0.01 * xr.DataArray(draw.normal(size=IMAGES), dims="image")
    exact = xr.concat([x * noise for x in costs.values()], "mode", coords="minimal")
    exact = exact.assign_coords(mode=list(costs))
    change = xr.DataArray(
        draw.uniform(1, 1.1, (5, 4, 2, 2, IMAGES)),
        {
            "mode": list(costs),
            "order": ["shares", "deviation", "random", "same layers"],
            "seed": [0, 1],
            "fraction": [1 / 4, 1 / 2],
        },
        ("mode", "order", "seed", "fraction", "image"),
    )
    change.loc[{"order": "shares"}] -= 0.5 * sign
    curves = xr.Dataset({"change": change})
    passed = report(ds, xr.Dataset({"exact": exact, "first_order": exact}), curves)
    assert passed == (sign > 0)
    printed = capsys.readouterr().out
    assert ("parts predict costs" in printed) == (sign > 0)
    assert ("shares order heads" in printed) == (sign > 0)
