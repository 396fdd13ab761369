"""Variants of the ablations against loops in float64, and the check that ends the study."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import ablations
from common import stepwise


def test_a_token_before_the_first_block_gives_timms_model() -> None:
    torch.manual_seed(0)
    model = ablations.late_token({}, entry=0).double()
    reference = VisionTransformer(
        **ablations.SHAPE, depth=4, num_heads=3, no_embed_class=True
    ).double()
    reference.load_state_dict(model.state_dict())
    images = torch.randn(2, 1, 8, 8).double()
    torch.testing.assert_close(model(images), reference(images), rtol=1e-13, atol=0)


@pytest.mark.parametrize("class_attention", [False, True])
def test_blocks_before_the_token_see_patches_alone(class_attention: bool) -> None:
    model: Any = ablations.late_token({}, entry=3, class_attention=class_attention)
    shapes: list[list[tuple[int, ...]]] = []
    for block in [*model.blocks, *model.class_blocks]:
        block.register_forward_pre_hook(
            lambda _, inputs: shapes.append([tuple(x.shape[1:]) for x in inputs])
        )
    model(torch.randn(2, 1, 8, 8))
    last = [(16, 48), (1, 48)] if class_attention else [(17, 48)]
    assert shapes == [[(16, 48)]] * 3 + [last]


@torch.no_grad()
def test_class_mlp_matches_its_equations() -> None:
    torch.manual_seed(0)
    dim, patches = 3, 5
    block = ablations.ClassMLPBlock(dim, patches + 1).double()
    for norm in (block.norm1, block.norm2):
        norm.alpha.uniform_(0.5, 2)
        norm.beta.normal_()
    x = torch.randn(1, patches, dim).double()
    token = torch.randn(1, 1, dim).double()

    def affine(norm: Any, row: Tensor) -> Tensor:
        return norm.alpha.flatten() * row + norm.beta.flatten()

    def linear(layer: Any, row: Tensor) -> Tensor:
        return layer.weight @ row + layer.bias

    aggregated = block.aggregate.bias.expand(dim)
    # The token aggregates itself and the patches, with the same weights in every channel.
    rows = [token[0, 0], *x[0]]
    for share, row in zip(block.aggregate.weight[0], rows, strict=True):
        aggregated = aggregated + share * affine(block.norm1, row)
    after = token[0, 0] + linear(block.project, aggregated)
    hidden = linear(block.mlp[0], affine(block.norm2, after))
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    expected = after + linear(block.mlp[2], hidden)
    torch.testing.assert_close(block(x, token)[0, 0], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("groups", "pointwise"), [(1, False), (48, False), (48, True)])
def test_convolutions_run_over_the_grid_of_patches(groups: int, pointwise: bool) -> None:
    torch.manual_seed(0)
    layer: Any = ablations.convolution(groups, pointwise=pointwise).double()
    x = torch.randn(1, 48, 16).double()
    output = layer(x)
    weight, bias = layer[1].weight, layer[1].bias
    channel, row, column = 7, 0, 2

    def convolved(channel: int) -> float:
        total = bias[channel].item()
        for place, source in enumerate([channel] if groups == 48 else range(48)):
            for y in range(3):
                for z in range(3):
                    at = row + y - 1, column + z - 1
                    if min(at) >= 0 and max(at) < 4:
                        value = x[0, source, 4 * at[0] + at[1]].item()
                        total += weight[channel, place, y, z].item() * value
        return total

    expected = convolved(channel)
    if pointwise:
        mixing = layer[2].weight[channel, :, 0, 0].tolist()
        expected = layer[2].bias[channel].item() + sum(
            share * convolved(source) for source, share in enumerate(mixing)
        )
    result = output[0, channel, 4 * row + column].item()
    assert result == pytest.approx(expected, rel=1e-12)


def test_layer_norm_takes_the_place_of_affine_layers() -> None:
    build = ablations.TABLES["ResMLP"]["a matrix, and LayerNorm"]
    parts = [type(part) for part in build({}).modules()]
    # There are two in each of the four blocks, and one after the last block.
    assert parts.count(torch.nn.LayerNorm) == 9
    assert ablations.Affine not in parts


def scales(model: Any) -> list[Tensor]:
    return [layer.gamma.detach().clone() for layer in ablations.layer_scales(model)]


def test_layer_scales_start_as_their_names_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = torch.randn(96, 1, 8, 8)
    labels = torch.arange(96) % 10
    monkeypatch.setattr(stepwise, "plain_digits", lambda training: (images, labels))
    variants = ablations.TABLES["LayerScale"]
    models: dict[str, Any] = {}
    begin, end = {}, {}
    for name, build in variants.items():
        torch.manual_seed(0)
        models[name] = build(models)
        begin[name] = scales(models[name])
        stepwise.fit(models[name], epochs=1, seed=0)
        end[name] = scales(models[name])
    assert len(begin["from 0.1"]) == 8
    for name, value in (
        ("from 0.1", 0.1),
        ("from 0", 0.0),
        ("one weight a branch", 0.1),
    ):
        values = {v for gamma in begin[name] for v in gamma.tolist()}
        assert values == {torch.tensor(value).item()}
    assert not begin["no LayerScale"]
    assert [len(gamma) for gamma in begin["one weight a branch"]] == [1] * 8
    drawn = torch.cat(begin["drawn from 0 to 0.2"])
    # The probability that none of 384 uniform draws lies in the lowest twentieth is 3e-9.
    assert 0 <= drawn.min() < 0.01
    assert 0.19 < drawn.max() <= 0.2
    # The bound is five standard errors of the mean of 384 uniform draws.
    assert abs(float(drawn.mean()) - 0.1) < 5 * 0.2 / math.sqrt(12 * 384)
    # The frozen scales are those that the first variant learned; all others are trained.
    frozen = "trained before, frozen"
    for name in begin:
        source = end["from 0.1"] if name == frozen else begin[name]
        pairs = list(zip(source, end[name], strict=True))
        assert all(torch.equal(*pair) for pair in pairs) == (name in (frozen, "no LayerScale"))
    assert not torch.equal(models[frozen].head.weight, models["from 0.1"].head.weight)


def results(alone: float = 0.4, top1: float = 0.8) -> xr.DataArray:
    """Return the accuracies of all variants for three seeds, which differ by 0.01."""
    names = [name for variants in ablations.TABLES.values() for name in variants]
    values = top1 + 0.01 * np.arange(3)[:, None] + np.zeros(len(names))
    values[:, names.index(ablations.SEPARATE)] = alone
    return xr.DataArray(values, {"seed": range(3), "variant": names})


def test_variants_are_compared_seed_by_seed() -> None:
    lines = ablations.table(results()).splitlines()
    (line,) = [text for text in lines if text.startswith("  nothing")]
    # 0.4 minus 0.80, 0.81, 0.82; 4.303, the quantile of t with 2 degrees of freedom, times 0.01 /
    # sqrt(3).
    assert line.endswith("0.400   -0.410 [-0.435, -0.385] worse")
    (line,) = [text for text in lines if text.startswith("  an MLP")]
    assert "0.810   +0.000 [-" in line
    assert line.endswith("undecided")
