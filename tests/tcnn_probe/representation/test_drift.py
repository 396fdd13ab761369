"""Drift compared with its definition, pair of patches by pair of patches in float64."""

import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import xarray as xr

import tcnn_probe
from tcnn_probe.representation import gram_distance, layer_drift, linear_cka


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    squared_lengths = math.fsum(a * a) * math.fsum(b * b)
    return math.fsum(a * b) / math.sqrt(squared_lengths)


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """Compute the definition for the patches of an image, (N, C) and (N, C')."""
    n = len(x)
    squares = []
    for i, j in np.ndindex(n, n):
        difference = cosine(x[i], x[j]) - cosine(y[i], y[j])
        squares.append(difference**2)
    return math.sqrt(math.fsum(squares) / n**2)


def distances(x: np.ndarray, y: np.ndarray) -> list[float]:
    """Compute the definition image by image, (images, N, C) and (images, N, C')."""
    return [distance(*pair) for pair in zip(x, y, strict=True)]


def patches(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    # A mean of twice the standard deviation keeps the cosines from all being near 0.
    return rng.standard_normal(shape) + 2 * rng.standard_normal(shape[-1])


def test_drift_equals_its_definition() -> None:
    x = patches(3, 7, 5)
    y = patches(3, 7, 11, seed=1)
    expected = distances(x, y)
    assert min(expected) > 0.05
    actual = gram_distance(x, y)
    # A cosine of C channels is off by at most about (2 C + 4) eps, and so is the root mean square.
    bound = 2 * (2 * 11 + 4) * np.finfo(float).eps
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)
    assert gram_distance(x[1], y[1]) == pytest.approx(expected[1], abs=bound)


def test_squared_drift_is_the_loss_of_dinov3() -> None:
    """DINOv3's code computes a mean squared difference,
    by its configuration within images with negative cosines.
    """
    x = torch.from_numpy(patches(2, 13, 5))
    noise = torch.from_numpy(patches(2, 13, 5, seed=2))
    y = x + 0.3 * noise
    unit_x = F.normalize(x, dim=-1)
    unit_y = F.normalize(y, dim=-1)
    expected = F.mse_loss(unit_x @ unit_x.mT, unit_y @ unit_y.mT).item()
    squared = gram_distance(x, y) ** 2
    assert squared.mean() == pytest.approx(expected, rel=1e-12)


def test_rotation_and_lengths_do_not_matter_and_small_distances_are_accurate() -> None:
    x = patches(7, 5)
    rotation = np.linalg.qr(patches(5, 5, seed=3))[0]
    lengths = np.random.default_rng(4).uniform(0.1, 10, (7, 1))
    # This is the bound above for 5 channels.
    moved = lengths * x @ rotation
    assert gram_distance(x, moved) < 2 * 14 * np.finfo(float).eps
    # To first order a change of 1e-9 changes cosines by as much, which products of channels would
    # lose.
    backwards = x[::-1]
    near = gram_distance(x, x + 1e-8 * backwards)
    nearer = gram_distance(x, x + 1e-9 * backwards)
    assert near / nearer == pytest.approx(10, rel=1e-4)


def test_zero_patches_and_opposite_cosines() -> None:
    filled = patches(3, 2)
    zero = filled.copy()
    zero[1] = 0
    # All cosines of a zero patch are 0, also with itself; the other cosines do not change.
    first = cosine(filled[1], filled[0])
    last = cosine(filled[1], filled[2])
    squares = 2 * (first**2 + last**2) + 1
    expected = math.sqrt(squares / 9)
    assert gram_distance(filled, zero) == pytest.approx(expected, rel=1e-14)
    # The cosines 1 and -1 differ by 2, in half of the pairs.
    opposite = gram_distance([[1.0], [1.0]], [[1.0], [-1.0]])
    assert opposite == pytest.approx(math.sqrt(2))
    missing = np.full((3, 2), np.nan)
    assert math.isnan(gram_distance(filled, missing))
    with pytest.raises(ValueError, match=r"two or more tokens twice.*got \(3, 2\) and"):
        gram_distance(filled, filled[:2])
    with pytest.raises(ValueError, match="two or more tokens twice"):
        gram_distance(filled[:1], filled[:1])


def recorded(epochs: int = 3) -> tuple[xr.DataArray, list[torch.Tensor]]:
    """Return features of a small ViT by epoch,
    both as recorded and as its last block returns them.
    """
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(48, 80), depth=2, embed_dim=33, num_heads=3
    ).eval()
    images = torch.randn(5, 3, 48, 80)
    probe = tcnn_probe.features(["blocks.0", "blocks.1"], images=5, tokens=range(1, 16))
    outputs: list[torch.Tensor] = []
    model.blocks[1].register_forward_hook(
        lambda module, args, output: outputs.append(output[:, 1:])
    )
    with (
        tcnn_probe.record(model, probes=["softmax", probe]) as recorder,
        torch.no_grad(),
    ):
        # The loop resembles a training, but each epoch is a step in a random direction.
        for epoch in range(epochs):
            model(images)
            recorder.mark(epoch=epoch)
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return recorder.tree["features"].feature, outputs


def test_drift_of_a_recording_by_epoch_and_between_all_epochs() -> None:
    features, outputs = recorded()
    drift = layer_drift(features, features.sel(epoch=0))
    assert drift.gram_distance.dims == ("epoch", "layer", "image")
    assert drift.cka.dims == ("epoch", "layer")
    x = outputs[2].double().numpy()
    y = outputs[0].double().numpy()
    expected = distances(x, y)
    # This is ten times the tolerance.
    assert min(expected) > 0.05
    # As float16 each channel is off by 2**-11 of itself, a cosine by 4 times and a difference by 8
    # times as much.
    actual = drift.gram_distance.sel(epoch=2, layer="blocks.1")
    np.testing.assert_allclose(actual, expected, rtol=0, atol=8 * 2**-11)
    means = features.sel(token="mean", layer="blocks.1").values.astype(float)
    cka = drift.cka.sel(layer="blocks.1")
    expected = linear_cka(means[2], means[0])
    assert cka[2].item() == pytest.approx(expected, rel=1e-12)

    # The first epoch is compared with itself.
    np.testing.assert_array_equal(drift.gram_distance.sel(epoch=0), 0)
    np.testing.assert_allclose(drift.cka.sel(epoch=0), 1, rtol=1e-12)

    # Every epoch is compared with every other.
    table = layer_drift(features, features.rename(epoch="teacher")).gram_distance
    assert set(table.dims) == {"epoch", "teacher", "layer", "image"}
    xr.testing.assert_allclose(table.sel(teacher=0, drop=True), drift.gram_distance)
    # Three images are one fewer than CKA needs.
    of_few = layer_drift(features[:, :, :3], features[0, :, :3])
    assert of_few.cka.isnull().all()
    assert of_few.gram_distance.notnull().all()


def test_layers_of_different_widths_and_missing_images() -> None:
    rng = np.random.default_rng(0)
    values = np.full((2, 5, 4, 7), np.nan)
    values[0, :, :, :3] = rng.standard_normal((5, 4, 3))
    values[1] = rng.standard_normal((5, 4, 7))
    dims = ("layer", "image", "token", "channel")
    tokens = ["mean", "1", "2", "3"]
    coords = {"layer": ["a", "b"], "image": range(5), "token": tokens}
    features = xr.DataArray(values, coords, dims)
    second = features.isel(channel=slice(5)).copy()
    second[0, :, :, :3] = rng.standard_normal((5, 4, 3))
    second[1, 2] = np.nan
    drift = layer_drift(features, second)
    # These are the patches of the second image, without the mean; the layer has three channels.
    part = np.s_[0, 1, 1:, :3]
    expected = distance(values[part], second.values[part])
    actual = drift.gram_distance.sel(layer="a")[1].item()
    assert actual == pytest.approx(expected)
    missing = drift.gram_distance.isnull().values
    assert np.argwhere(missing).tolist() == [[1, 2]]
    assert drift.cka.isnull().values.tolist() == [False, True]


def test_bad_arguments_are_refused() -> None:
    tokens = ["mean", "1", "2"]
    coords = {"image": range(4), "token": tokens}
    values = np.random.default_rng(0).standard_normal((4, 3, 5))
    features = xr.DataArray(values, coords, ("image", "token", "channel"))
    layer_drift(features, features)
    with pytest.raises(ValueError, match="of the same images, tokens and layers"):
        layer_drift(features, features.assign_coords(image=range(1, 5)))
    with pytest.raises(ValueError, match=r"the mean and two patches .* \['mean', '1'\]"):
        layer_drift(features, features[:, :2])
    with pytest.raises(ValueError, match=r"along 'token', .* got \[\]"):
        layer_drift(features[:, 0], features)
    with pytest.raises(ValueError, match="dims 'image' and 'channel'"):
        layer_drift(features.rename(image="row"), features)
