"""Tables of heads, and random heads."""

import numpy as np
import pytest
import torch
import xarray as xr

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import images, vit


def selection() -> xr.DataArray:
    selected = np.zeros((2, 3, 7), dtype=bool)
    selected[0] = True
    selected[1, 0, [2, 5]] = selected[1, 1, :3] = True
    coords = {"epoch": [0, 4], "layer": ["a", "b", "c"], "head": range(7)}
    return xr.DataArray(selected, coords, ("epoch", "layer", "head"))


def test_random_heads_are_as_many_in_each_layer() -> None:
    among = xr.DataArray(
        np.arange(7) < np.array([[7], [5], [2]]),
        {"layer": ["a", "b", "c"], "head": range(7)},
        ("layer", "head"),
    )
    heads = selection()
    drawn = np.stack([tcnn_probe.random_heads(heads, seed, among=among) for seed in range(400)])
    assert (drawn.sum(-1) == [2, 3, 0]).all()
    assert not (drawn & ~among.values).any()
    # Each head of layer a is drawn in 2 of 7 cases: 5 standard errors are 0.11.
    np.testing.assert_allclose(drawn[:, 0].mean(0), 2 / 7, atol=0.115)
    np.testing.assert_array_equal(tcnn_probe.random_heads(heads, 1, among=among), drawn[1])
    with pytest.raises(ValueError, match="at least 3 heads to draw from in 'b', got 2"):
        tcnn_probe.random_heads(selection(), 0, among=among.where(among["head"] < 2, False))
    with pytest.raises(TypeError, match="boolean DataArray for like"):
        tcnn_probe.random_heads(selection().astype(int), 0)


def test_a_row_for_each_head() -> None:
    model = vit()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for epoch in range(2):
            model(images(9, seed=epoch))
            recorder.mark(epoch=epoch)
    ds = recorder.dataset
    table = tcnn_probe.head_table(ds)
    assert len(table) == 2 * 3
    row = table.loc["blocks.1.attn", 2]
    last = ds.isel(epoch=-1).sel(layer="blocks.1.attn", head=2)
    assert row.entropy == float(last.entropy)
    assert row.head_type == str(
        tcnn_probe.head_types(ds)[-1].sel(layer="blocks.1.attn", head=2).values
    )
    first = tcnn_probe.head_table(ds, epoch=0).loc["blocks.1.attn", 2]
    assert first.entropy == float(ds.entropy[0].sel(layer="blocks.1.attn", head=2))
    ds = ds.assign(entropy=ds.entropy.where(ds["head"] < 2))
    fewer = tcnn_probe.head_table(ds[["entropy"]])
    assert len(fewer) == 4
    with pytest.raises(ValueError, match="variables over layer and head"):
        tcnn_probe.head_table(ds[["uniform_entropy"]])
