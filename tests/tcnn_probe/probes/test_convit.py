"""timm's own ConViT layers, against brute force in float64 from what timm computes."""

import copy
import math

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from timm.models.convit import GPSA
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_model.helpers import default_dtype
from tests.tcnn_probe.networks import inputs_of
from tests.tcnn_probe.oracle import summarise

LAYERS = ["blocks.0.attn", "blocks.1.attn"]


@torch.no_grad()
def convit(side: int = 5) -> nn.Module:
    """Two GPSA blocks of 9 heads on side x side tokens and one block with a class token; scattered weights."""
    options = {"depth": 3, "local_up_to_layer": 2, "embed_dim": 6, "num_heads": 9, "num_classes": 3}
    torch.manual_seed(0)
    model = timm.create_model("convit_tiny", img_size=16 * side, **options).eval()
    for name in LAYERS:
        layer = model.get_submodule(name)
        layer.qk.weight.normal_(std=0.5)
        layer.pos_proj.weight.add_(0.5 * torch.randn_like(layer.pos_proj.weight))
        layer.pos_proj.weight[:, 2] = -torch.logspace(-1.3, 1, 9)[torch.randperm(9)]
        layer.pos_proj.bias.normal_()
        layer.gating_param.copy_(torch.linspace(-3, 3, 9)[torch.randperm(9)])
    return model


def images(side: int = 5) -> Tensor:
    return torch.randn(5, 3, 16 * side, 16 * side, generator=torch.Generator().manual_seed(1))


def record_epoch(model: nn.Module, x: Tensor) -> xr.Dataset:
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for batch in x.split([2, 3]):
            model(batch)
        recorder.mark(epoch=0)
    return recorder.dataset.load()


def offsets(side: int) -> tuple[Tensor, Tensor]:
    """Of key from query, (N, N) along y and along x, for tokens row-major on a square."""
    index = torch.arange(side * side)
    row, column = (index // side).double(), (index % side).double()
    return row[None] - row[:, None], column[None] - column[:, None]


@torch.no_grad()
def brute_force(layer: GPSA, x: Tensor) -> dict[str, Tensor]:
    layer, x = copy.deepcopy(layer).double(), x.double()
    dy, dx = offsets(math.isqrt(x.shape[1]))
    weight = layer.pos_proj.weight[:, :, None, None]
    positional = torch.softmax(weight[:, 0] * dx + weight[:, 1] * dy + weight[:, 2] * (dy**2 + dx**2), -1)
    query, key = (x @ w.T for w in layer.qk.weight.chunk(2))
    query, key = (t.unflatten(-1, (9, 6)).transpose(1, 2) for t in (query, key))
    content = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(6), -1)
    with default_dtype(torch.float64):
        layer.rel_indices = layer.get_rel_indices(x.shape[1])
    return summarise(layer.get_attention(x), content, positional, torch.sqrt(dy**2 + dx**2))


@pytest.mark.parametrize("side", [5, 7])
def test_measures_equal_brute_force_on_each_layers_own_input(side: int) -> None:
    model, x = convit(side), images(side)
    ds = record_epoch(model, x)
    assert ds.layer.values.tolist() == [*LAYERS, "blocks.2.attn"]  # the last one is softmax attention
    assert ds.images.values.tolist() == [[5, 5, 5]]
    for name, seen in inputs_of(model, LAYERS, x).items():
        for variable, expected in brute_force(model.get_submodule(name), seen).items():
            got = ds[variable].sel(layer=name, epoch=0)
            np.testing.assert_allclose(got, expected.mean(0), rtol=1e-5, atol=1e-5, err_msg=variable)


def test_attention_is_neither_uniform_nor_the_same_in_all_layers() -> None:
    ds = record_epoch(convit(), images()).sel(layer=LAYERS)
    assert (ds.content_entropy < 0.9 * math.log(25)).all()
    assert ds.positional_entropy.min() < 0.8
    assert ds.positional_entropy.max() > 2.0
    assert (np.abs(ds.entropy.diff("layer")) > 1e-3).all()


def test_gates() -> None:
    model = convit()
    ds = record_epoch(model, images())
    for name in LAYERS:
        expected = 1 / (1 + np.exp(-model.get_submodule(name).gating_param.detach().double().numpy()))
        np.testing.assert_allclose(ds.gate.sel(layer=name, epoch=0), expected, rtol=1e-6)


@torch.no_grad()
def test_alpha_and_center_rebuild_the_layers_own_positional_attention() -> None:
    model, x = convit(), images()
    ds = record_epoch(model, x)
    dy, dx = (offset.numpy()[None] for offset in offsets(5))
    for name in LAYERS:
        row = ds.sel(layer=name, epoch=0)
        alpha, y, x = (row[v].values[:, None, None] for v in ("locality_strength", "center_y", "center_x"))
        rebuilt = torch.softmax(torch.from_numpy(-alpha * ((dy - y) ** 2 + (dx - x) ** 2)), -1)
        layer = copy.deepcopy(model.get_submodule(name)).double()
        with default_dtype(torch.float64):
            indices = layer.get_rel_indices(25)
        own = layer.pos_proj(indices).permute(0, 3, 1, 2).softmax(-1)[0]
        torch.testing.assert_close(rebuilt, own, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row.attention_span, 1 / row.locality_strength)


def test_initial_heads_lie_on_a_kernel_column_by_column() -> None:
    torch.manual_seed(0)
    model = timm.create_model("convit_tiny", img_size=80, depth=1, embed_dim=6, num_heads=9, num_classes=3).eval()
    row = record_epoch(model, images()).isel(epoch=0, layer=0)
    assert row.center_y.values.tolist() == [-1, 0, 1] * 3
    assert row.center_x.values.tolist() == [-1, -1, -1, 0, 0, 0, 1, 1, 1]
    assert row.locality_strength.values.tolist() == [1] * 9


def test_bfloat16_model() -> None:
    model, x = convit().bfloat16(), images().bfloat16()
    with default_dtype(torch.bfloat16):
        ds, seen = record_epoch(model, x), inputs_of(model, LAYERS, x)
    for name in LAYERS:
        for variable, expected in brute_force(model.get_submodule(name), seen[name]).items():
            got = ds[variable].sel(layer=name, epoch=0)
            np.testing.assert_allclose(got, expected.mean(0), rtol=0.02, atol=0.02, err_msg=variable)


def test_hooks_inside_the_layer_fire_as_often_as_without_recording() -> None:
    model, x, fired = convit(), images(), []
    for part in ("qk", "v", "pos_proj"):
        model.blocks[0].attn.get_submodule(part).register_forward_hook(lambda *args, part=part: fired.append(part))
    model(x)
    expected = list(fired)
    fired.clear()
    with tcnn_probe.record(model):
        model(x)
    assert fired == expected


def test_layer_is_left_as_it_was() -> None:
    model, x = convit(), images()
    output, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    buffers, attributes = dict(model.named_buffers()), {name: set(vars(m)) for name, m in model.named_modules()}
    with tcnn_probe.record(model):
        assert torch.equal(model(x), output)
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}
    assert all(value is buffers[name] for name, value in model.named_buffers())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
