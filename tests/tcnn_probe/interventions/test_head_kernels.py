"""Kernels of heads, fitted on all queries, and layers in which they have become convolutions."""

import json
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_model
import tcnn_probe
from tcnn_probe.attention.attention import Attention
from tests.tcnn_model.conversion.convertible import FAMILIES, GRID, HEADS, transformer
from tests.tcnn_probe.contracts.helpers import recorded


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 20, 28, dtype=torch.float64)


def mean_attention(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Mean over images of the attention, (windows, heads, N_query, N_key)."""
    means: dict[str, Tensor] = {}

    def keep(attention: Attention) -> None:
        means[attention.name] = attention.weights().mean(0)

    with torch.no_grad(), tcnn_probe.attention_stream(model, keep):
        model(x)
    return means


def offsets_of_grid(tokens: int, grid: tuple[int, int]) -> list[list[Any]]:
    """The offset of each pair from its definition;
    a class or register token is itself an offset.
    """
    cells = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    return [[*range(tokens), *((v - y, u - x) for v, u in cells)] for y, x in cells]


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_kernels_give_each_offset_its_attention(tokens: int) -> None:
    special = {"class_token": False, "global_pool": "avg"} if not tokens else {}
    model = transformer(**special, reg_tokens=max(0, tokens - 1))
    x = images()
    kernels = tcnn_probe.head_kernels(model, [x[:2], x[2:]])
    assert ("prefix_kernel" in kernels) == (tokens > 0)
    pairs = offsets_of_grid(tokens, GRID)
    for layer, mean in mean_attention(model, x).items():
        for head in range(HEADS):
            ds = kernels.sel(layer=layer, head=head)
            weight = dict(ds.offset_kernel.to_series())
            mass = dict(ds.offset_mass.to_series())
            if tokens:
                weight |= dict(enumerate(ds.prefix_kernel.values))
                mass |= dict(enumerate(ds.prefix_mass.values))
            assert sum(weight.values()) == pytest.approx(1)
            of_mean, of_kernel = dict.fromkeys(weight, 0.0), dict.fromkeys(weight, 0.0)
            for row, offsets in enumerate(pairs):
                total = sum(weight[offset] for offset in offsets)
                for key, offset in enumerate(offsets):
                    of_mean[offset] += float(mean[0, head, tokens + row, key]) / 35
                    of_kernel[offset] += weight[offset] / total / 35
            # At the minimum of a convex function T has the masses of M, and only there.
            for offset in weight:
                assert of_kernel[offset] == pytest.approx(of_mean[offset], abs=1e-6)
                assert mass[offset] == pytest.approx(of_mean[offset], abs=1e-12)


def test_heads_that_are_convolutions_are_kept_exactly() -> None:
    torch.manual_seed(0)
    layer = tcnn_model.GPSA(6, 7, 3, padding=1, gating=40, locality_strength=0.4)
    tcnn = nn.Sequential(nn.Conv2d(2, 6, 1), layer).double().eval()
    x = torch.randn(4, 2, 7, 11, dtype=torch.float64)
    kernels = tcnn_probe.head_kernels(tcnn, x)
    convolved = tcnn_model.convolve(tcnn, kernels, mass=1)
    torch.testing.assert_close(convolved(x), tcnn(x), rtol=1e-6, atol=1e-6)
    # With zero queries and keys, Swin attends by its relative position bias, within regions of
    # shifted windows.
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=(24, 40),
        window_size=(3, 5),
        embed_dim=12,
        depths=(2,),
        num_heads=(3,),
        num_classes=2,
    )
    swin = swin.double().eval()
    for name, parameter in swin.named_parameters():
        if "qkv" in name:
            parameter.data[:24] = 0
        if "bias_table" in name:
            nn.init.normal_(parameter)
    x = torch.randn(2, 3, 24, 40, dtype=torch.float64)
    kernels = tcnn_probe.head_kernels(swin, x)
    pairs = offsets_of_grid(0, (3, 5))
    for name, mean in mean_attention(swin, x).items():
        for head in range(3):
            weight = kernels.offset_kernel.sel(layer=name, head=head).to_series()
            rows = np.array([[weight[offset] for offset in row] for row in pairs])
            seen = mean[:, head].numpy() > 1e-30
            expected = np.where(seen, rows, 0)
            expected /= expected.sum(-1, keepdims=True)
            np.testing.assert_allclose(mean[:, head], expected, atol=1e-6)
    convolved = tcnn_model.convolve(swin, kernels, mass=1)
    torch.testing.assert_close(convolved(x), swin(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_kernels_cost_what_the_ablation_costs(family: str) -> None:
    model = FAMILIES[family][0]()
    fitted, evaluated = torch.randn(2, 4, 3, *model.patch_embed.img_size, dtype=torch.float64)
    names = [name for name, _ in model.named_modules() if name.endswith(".attn")]
    heads = {names[0]: [0, 2], names[1]: [1]}
    kernels = tcnn_probe.head_kernels(model, fitted, heads)
    with torch.no_grad():
        actual = tcnn_model.convolve(model, kernels, mass=1)(evaluated)
        with tcnn_probe.ablate(model, heads, "convolutional", images=fitted):
            expected = model(evaluated)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert (model(evaluated) - expected).abs().max() > 1e-5


@pytest.mark.study(but=["vit", "swin with padding"])
@pytest.mark.parametrize(
    "family", ["vit", "registers and norms", "convit", "swin with padding", "grouped queries"]
)
def test_heads_beside_convolutions_are_recorded_as_before(family: str) -> None:
    model = FAMILIES[family][0]()
    x = torch.randn(4, 3, *model.patch_embed.img_size, dtype=torch.float64)
    plain = recorded(model, x)
    layers = [name for name, _ in model.named_modules() if name.endswith(".attn")]
    for layer in layers[:2]:
        kernels = tcnn_probe.head_kernels(model, x, {layer: [0, 2]})
        convolved = recorded(tcnn_model.convolve(model, kernels, mass=1), x)
        before, after = (
            recorder.dataset.isel(epoch=0).sel(layer=layer) for recorder in (plain, convolved)
        )
        assert convolved.missing == plain.missing
        assert convolved.unsupported == plain.unsupported
        # The heads that are convolutions have no content, and the offsets of before.
        content = after.selectivity - after.offset_information
        np.testing.assert_allclose(content.sel(head=[0, 2]), 0, atol=1e-5)
        offset = [ds.offset_information.sel(head=[0, 2]) for ds in (before, after)]
        xr.testing.assert_allclose(*offset, atol=0.02)
        gone = {*before.data_vars} - {*after.data_vars}
        if family == "convit" and layer == layers[0]:
            # Beside convolutions a gated layer is recorded as a whole, without the logits of its
            # parts.
            before = before.drop_vars(gone | {"max_logit"})
        else:
            assert not gone
        # All that does not hang on the other heads, such as their similarity.
        heads = model.get_submodule(layer).num_heads
        others = [head for head in range(heads) if head not in (0, 2)]
        for name in before.data_vars:
            if "similarity" in name or before[name].dtype.kind != "f":
                continue
            sides = [before[name], after[name]]
            if "head" in before[name].dims:
                sides = [values.sel(head=others) for values in sides]
            # T is fitted for all heads in as many rounds as the slowest of them takes.
            of_fit = name.startswith(("offset_information", "position_information"))
            xr.testing.assert_allclose(*sides, rtol=1e-6, atol=2e-3 if of_fit else 1e-9)


def test_only_chosen_heads_have_kernels() -> None:
    model, x = transformer(), images()
    whole = tcnn_probe.head_kernels(model, x)
    chosen = tcnn_probe.head_kernels(model, x, {"blocks.1.attn": [2]})
    assert chosen.layer.values.tolist() == ["blocks.1.attn"]
    assert chosen.offset_kernel.notnull().all(("offset_y", "offset_x")).values.tolist() == [
        [False, False, True]
    ]
    place = {"layer": "blocks.1.attn", "head": 2}
    xr.testing.assert_allclose(chosen.sel(place), whole.sel(place), atol=1e-7)
    with pytest.raises(ValueError, match="no layer of this model can do"):
        tcnn_probe.head_kernels(nn.Sequential(nn.Conv2d(3, 2, 1)), x)


@pytest.mark.study
@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "qk_norm": True}])
def test_convolved_heads_stand_in_a_recording_as_convolutions(
    options: dict[str, Any],
) -> None:
    model, x = transformer(**options), images(4)
    kernels = tcnn_probe.head_kernels(
        model, x, {"blocks.0.attn": [0, 2], "blocks.1.attn": slice(None)}
    )
    whole, cut = (
        tcnn_model.convolve(model, kernels, mass=mass, size=size)
        for mass, size in ((1, None), (1, 3))
    )
    recordings = []
    for network in (model, whole, cut):
        recorder = recorded(network, x)
        recordings.append(recorder.dataset.isel(epoch=0))
        assert recorder.unsupported == {}
    before, after, small = recordings
    first = {"layer": "blocks.0.attn"}
    convolved = first | {"head": [0, 2]}
    for ds in (after, small):
        xr.testing.assert_allclose(
            ds.selectivity.sel(convolved),
            ds.offset_information.sel(convolved).rename("selectivity"),
            atol=1e-6,
        )
        content = ds.key_content_information + ds.query_key_content_information
        assert abs(content.sel(convolved)).max() < 1e-6
        assert abs(content.sel(layer="blocks.1.attn")).max() < 1e-6
    # Beyond a kernel of 3 x 3 there is no attention, and the keys count as visible all the same.
    assert (small.attention_distance.sel(convolved) < 1.5).all()
    # Class tokens ask as before, also in heads that are convolutions for the patches.
    for ds in (after, small):
        name = "class_selectivity"
        xr.testing.assert_allclose(ds[name].sel(first), before[name].sel(first))
        # Keys beyond a kernel count as visible, also where no head of the layer attends any more.
        xr.testing.assert_allclose(ds.uniform_entropy, before.uniform_entropy)
    with pytest.raises(ValueError, match=r"are convolutions: edit heads .* before"):
        tcnn_probe.ablate(whole, "blocks.0.attn")


def test_convolved_tcnns_are_recorded() -> None:
    torch.manual_seed(0)
    layer = tcnn_model.GPSA(6, 7, 3, padding=1, gating=0.5, qk_scale=60)
    tcnn = nn.Sequential(nn.Conv2d(2, 6, 1), layer).double().eval()
    x = torch.randn(4, 2, 7, 11, dtype=torch.float64)
    kernels = tcnn_probe.head_kernels(tcnn, x, {"1": [0, 8]})
    convolved = tcnn_model.convolve(tcnn, kernels, mass=1)
    recordings = []
    for network in (tcnn, convolved):
        recorder = recorded(network, x)
        recordings.append(recorder.dataset.isel(epoch=0).sel(layer="1"))
    before, after = recordings
    others = {"head": range(1, 8)}
    for name in ("entropy", "attention_distance", "content_information"):
        np.testing.assert_allclose(before[name].sel(others), after[name].sel(others))
    content = after.content_information.sel(head=[0, 8])
    np.testing.assert_allclose(content, 0, atol=1e-9)
    for layers in ("1", None):
        with pytest.raises(ValueError, match=r"are convolutions: edit heads .* before"):
            tcnn_probe.ablate(convolved, layers)


def test_layers_without_kernels_are_named() -> None:
    # Keys are averages over blocks of patches, whose centres lie between patches.
    pvt = timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), num_classes=3).eval()
    x = torch.randn(2, 3, 64, 96)
    kernels = tcnn_probe.head_kernels(pvt, x)
    assert kernels.layer.values.tolist() == ["stages.3.blocks.0.attn"]
    reasons = json.loads(kernels.attrs["missing"])
    assert [*reasons] == [f"stages.{stage}.blocks.0.attn" for stage in range(3)]
    with pytest.raises(ValueError, match=r"has heads with kernels\n  stages.0.* no whole numbers"):
        tcnn_probe.head_kernels(pvt, x, "stages.0.blocks.0.attn")
