"""Layers between patches of known types, and loops over pairs of patches."""

import math
from itertools import product

import numpy as np
import pytest
import timm
import torch
from timm.models.mlp_mixer import Affine, MixerBlock, MlpMixer, ResBlock
from torch import nn

import tcnn_probe
from tcnn_probe.heads import cross_patch, translation_equivariance
from tests.tcnn_probe.attention.bruteforce import equivariance
from tests.tcnn_probe.contracts.helpers import recorded

H, W = 5, 7
PLACES = list(product(range(H), range(W)))
PAIRS = (H * W) ** 2
OFFSETS = (2 * H - 1) * (2 * W - 1)
DEVIATION = math.sqrt(2 * (OFFSETS - 1) / ((PAIRS - OFFSETS) * (PAIRS - 1)))
"""Standard deviation of 1 - W / T of random numbers:
chi-squares of n - g and n - 1 degrees, W a part of T.
"""


def mlp_model(block: type[nn.Module] = ResBlock) -> MlpMixer:
    torch.manual_seed(0)
    about = {"norm_layer": Affine, "mlp_ratio": 4} if block is ResBlock else {}
    return MlpMixer(
        3,
        img_size=(16 * H, 16 * W),
        num_blocks=3,
        embed_dim=4,
        block_layer=block,
        **about,
    )


def toeplitz() -> torch.Tensor:
    """Return the matrix of a 3 x 3 convolution with weights of both signs."""
    # The kernel is neither symmetric nor positive, and its last weight is near zero as defined by
    # ResMLP's figures.
    kernel = {(-1, -1): 1.0, (-1, 0): -2, (0, 0): 4, (0, 1): -1, (1, 1): 0.01}
    return torch.tensor([[kernel.get((v - y, u - x), 0.0) for v, u in PLACES] for y, x in PLACES])


@torch.no_grad()
def known() -> MlpMixer:
    model = mlp_model()
    generator = torch.Generator().manual_seed(1)
    matrices = (
        torch.eye(H * W),
        toeplitz(),
        torch.randn(H * W, H * W, generator=generator),
    )
    for block, matrix in zip(model.blocks, matrices, strict=True):
        block.linear_tokens.weight.copy_(matrix)
    return model


def test_statistics_of_known_matrices() -> None:
    identity, convolution, random = (cross_patch(known()).isel(layer=n, head=0) for n in range(3))
    assert identity.attention_distance == 0
    assert identity.entropy == 0
    for layer in (identity, convolution):
        assert layer.translation_equivariance.item() == pytest.approx(1, abs=1e-12)
    assert 0 < convolution.attention_distance < math.sqrt(2)
    # These weights are below a twentieth of the largest one, 4.
    near_zero = (toeplitz().abs() < 0.05 * 4).double().mean()
    assert float(convolution.near_zero) == pytest.approx(float(near_zero))
    # The bound is four standard deviations, which one matrix in 16,000 exceeds by chance; the seed
    # is fixed.
    assert abs(float(random.translation_equivariance)) < 4 * DEVIATION
    # With 4,000 rows, the error of their mean is a tenth of the tolerance below.
    rows = torch.randn(4000, H * W, generator=torch.Generator().manual_seed(2)).abs()
    shares = rows / rows.sum(1, keepdim=True)
    entropies = -(shares * shares.log()).sum(1)
    # The matrix has other random rows, so that its mean entropy differs a little.
    assert float(random.entropy) == pytest.approx(float(entropies.mean()), abs=0.05)


def test_statistics_equal_loops_over_pairs_of_patches() -> None:
    model = known()
    layers = cross_patch(model)
    assert layers.layer.values.tolist() == [f"blocks.{n}" for n in range(3)]
    for n, block in enumerate(model.blocks):
        a = block.linear_tokens.weight.detach().double().numpy()
        layer = layers.isel(layer=n)
        distance, entropy = 0.0, 0.0
        for i, (y, x) in enumerate(PLACES):
            shares = abs(a[i]) / abs(a[i]).sum()
            lengths = [math.dist((y, x), key) for key in PLACES]
            distance += shares @ lengths / len(PLACES)
            entropy -= sum(p * math.log(p) for p in shares if p > 0) / len(PLACES)
            np.testing.assert_array_equal(
                layer.weight.sel(query_y=y, query_x=x), a[i].reshape(H, W)
            )
        assert layer.attention_distance.item() == pytest.approx(distance, rel=1e-12)
        assert layer.entropy.item() == pytest.approx(entropy, rel=1e-12)
    even = sum(math.dist(a, b) for a in PLACES for b in PLACES) / len(PLACES) ** 2
    np.testing.assert_allclose(layers.uniform_distance, even)
    np.testing.assert_allclose(layers.uniform_entropy, math.log(H * W))


def test_types_are_those_of_attention_heads() -> None:
    types = tcnn_probe.head_types(cross_patch(known()))
    assert types.dims == ("layer", "head")
    assert types.values[:2].tolist() == [["convolutional"], ["convolutional"]]
    assert types.values[2] != "convolutional"
    model = known()
    nn.init.ones_(model.blocks[2].linear_tokens.weight)
    assert tcnn_probe.head_types(cross_patch(model)).values[2] == "averaging"


def test_matrix_of_mlp_mixer_is_the_product() -> None:
    """The matrix equals the effect of the block on a single patch,
    with an identity in place of the GELU.
    """
    block = mlp_model(MixerBlock).double().blocks[1]
    model = nn.Sequential(block)
    weight = cross_patch(model, grid=(H, W)).weight.isel(layer=0)
    # Without the GELU, the effect of one patch is a column of the product.
    block.mlp_tokens.act = nn.Identity()
    zero = torch.zeros(1, 1, H * W, dtype=torch.float64)
    # The patches are a corner, and one in the second row.
    for key in (0, 9):
        patch = zero.clone()
        patch[..., key] = 1
        effect = (block.mlp_tokens(patch) - block.mlp_tokens(zero)).detach()
        column = weight.sel(y=key // W, x=key % W)
        np.testing.assert_allclose(column, effect.reshape(H, W), atol=1e-12)


def test_a_relative_position_bias_is_convolutional() -> None:
    """The bias is that of a BEiT of one layer with queries of 0;
    in reverse or random order, it is not.

    The recorded attention is not quite convolutional: at the border there are fewer keys.
    """
    size, prefix = (16 * H, 16 * W), 1
    options = {"img_size": size, "embed_dim": 8, "depth": 1, "num_heads": 2}
    model = timm.create_model("beit_base_patch16_224", **options)
    layer = model.blocks[0].attn
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.relative_position_bias_table.normal_(generator=generator)
        layer.qkv.weight.zero_()  # biases of queries are 0 already
    bias = (
        layer.relative_position_bias_table[layer.relative_position_index]
        .permute(2, 0, 1)
        .detach()
        .double()
    )
    places = np.array([(math.nan, math.nan)] * prefix + PLACES)
    np.testing.assert_allclose(
        translation_equivariance(bias.numpy(), places, places), 1, atol=1e-12
    )
    # Patches in reverse order have the same numbers, but not along offsets.
    backwards = np.concatenate([places[:prefix], places[prefix:][::-1]])
    assert (translation_equivariance(bias.numpy(), backwards, places) < 0.1).all()
    noise = torch.randn(bias.shape, generator=generator).numpy()
    assert (abs(translation_equivariance(noise, places, places)) < 4 * DEVIATION).all()

    recorder = recorded(model.eval(), torch.randn(2, 3, *size, generator=generator))
    expected = [
        equivariance(attention[prefix:, prefix:], PLACES) for attention in bias.softmax(-1).numpy()
    ]
    # The bias alone would give 1, and the border reduces it a little.
    assert 0.9 < min(expected) <= max(expected) < 0.99
    equivariances = recorder.dataset.translation_equivariance.squeeze()
    np.testing.assert_allclose(
        # These are float32 sums of some hundred terms.
        equivariances,
        expected,
        atol=32 * np.finfo(np.float32).eps,
    )


def test_equivariance_of_patterns_without_variance_or_without_pairs() -> None:
    assert translation_equivariance(np.ones((1, H * W, H * W)), PLACES, PLACES) == 1
    one_query = np.random.default_rng(0).random((1, 1, H * W))
    assert np.isnan(translation_equivariance(one_query, PLACES[:1], PLACES)).all()


@pytest.mark.parametrize("dtype", ["float16", "int16"])
def test_equivariance_is_in_float64(dtype: str) -> None:
    """Sums of such large squares exceed float16 and int16."""
    # 200^2 times 1,225 pairs are 5 x 10^7.
    pattern = np.random.default_rng(0).integers(-200, 200, (1, H * W, H * W))
    expected = translation_equivariance(pattern.astype(float), PLACES, PLACES)
    np.testing.assert_array_equal(
        translation_equivariance(pattern.astype(dtype), PLACES, PLACES), expected
    )


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"\(heads, 35, 34\), a row for each query and a column for each key, "
        r"got \(1, 35, 35\)",
    ):
        translation_equivariance(np.ones((1, H * W, H * W)), PLACES, PLACES[1:])
    with pytest.raises(ValueError, match="ResMLP or MLP-Mixer, got Linear"):
        cross_patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"grid=\(rows, columns\) of 35 patches, got \(6, 6\)"):
        cross_patch(mlp_model(), grid=(6, 6))
    with pytest.raises(ValueError, match="of 35 patches, got None"):
        cross_patch(nn.Sequential(mlp_model().blocks[0]))
