"""Content information, the part of a head's attention
that depends on the image: known values, and brute force.
"""

import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import tcnn_probe
from tcnn_model import GPSA
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.sampled_queries import QUERIES, sample_queries
from tests.tcnn_probe.attention.bruteforce import attention_of, grid, information
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.networks import scatter

pytestmark = pytest.mark.numerical


def images(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


def numbers(model: nn.Module, *batches: Tensor, **options: Any) -> Any:
    return recorded(model, *batches, **options).dataset.isel(epoch=0).load()


class Positional(nn.Module):
    """Three heads on (B, 1, H, W) that attend by position alone:
    concentrated, uniform, and at random.
    """

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        place = torch.tensor(grid(height, width)).float()
        noise = torch.randn(
            height * width, height * width, generator=torch.Generator().manual_seed(0)
        )
        bias = torch.stack([-(torch.cdist(place, place) ** 2), 0 * noise, 5 * noise]).to(x)
        values = x.flatten(2)[:, :, :, None].expand(-1, 3, -1, -1)
        return scaled_dot_product_attention(0 * values, values, values, attn_mask=bias)


@pytest.mark.parametrize("count", [2, 7])
def test_attention_by_position_alone_has_no_content_information(count: int) -> None:
    """This holds also for GPSA's padding, which gets much attention at the border."""
    # The tolerance is for differences of float32 entropies of up to log 99 nat, times n / (n - 1).
    tolerance = 8 * 2.0**-24 * math.log(99) * count / (count - 1)
    plain = numbers(Positional().eval(), images(count, 1, 5, 7))
    assert abs(plain.content_information).max() < tolerance
    # At the border fewer keys share the weights, so that equivariance is not quite 1.
    np.testing.assert_allclose(
        # These two depend on the offset alone; noise differs at every position.
        plain.translation_equivariance.values[0, :2],
        [1, 1],
        atol=0.05,
    )
    # For independent random numbers on this grid, the standard deviation is 0.013.
    assert abs(plain.translation_equivariance.values[0, 2]) < 0.1

    layer = scatter(GPSA(3, 4, 3, padding=1))
    with torch.no_grad():
        # Queries of zero make content attention uniform, whatever the image.
        layer.query.zero_()
    gated = numbers(nn.Sequential(layer).eval(), images(count, 3, 5, 7))
    for name in ("content_information", "content_part_information"):
        assert abs(gated[name]).max() < tolerance


class Lookup(nn.Module):
    """Attention of every query to the key that the image names."""

    def forward(self, x: Tensor) -> Tensor:
        # Shape (B, 1, 1, 11). exp(-100) is 0 in float32, so the named key gets all the attention.
        mask = 100 * nn.functional.one_hot(x.long().flatten(), 11).to(x.dtype)[:, None, None]
        values = torch.zeros(len(x), 1, 11, 3).to(x)
        return scaled_dot_product_attention(
            values, values, values, attn_mask=mask.expand(-1, -1, 11, -1)
        )


@pytest.mark.filterwarnings("ignore:no attention_distance")
@pytest.mark.parametrize("count", [5, 11])
def test_information_is_log_n_if_each_of_n_images_has_its_own_key(count: int) -> None:
    """The result includes the correction for n images."""
    # Each image names another key.
    named = torch.randperm(11, generator=torch.Generator().manual_seed(0))[:count].float()
    content_information = numbers(
        nn.Sequential(Lookup()).eval(), *named.split(3)
    ).content_information
    # The tolerance is for float32 entropies of up to log 11.
    assert float(content_information.squeeze()) == pytest.approx(
        math.log(count) * count / (count - 1), abs=1e-6
    )


def small(name: str) -> tuple[nn.Module, Tensor]:
    if name == "vit":
        model = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=(48, 160),
            depth=2,
            embed_dim=12,
            num_heads=3,
        )
        return sharpen(model), images(7, 3, 48, 160)
    options = {"window_size": (2, 3), "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 12}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=(32, 96), **options)
    return sharpen(model), images(7, 3, 32, 96)


def at_sampled_queries(weights: np.ndarray, first: int = 0) -> np.ndarray:
    """Select the sampled queries: (B, W, heads, N_query, N_key) -> (B, w, heads, n, N_key)."""
    sizes = weights.shape[1], weights.shape[3]
    windows, queries = sample_queries(*sizes, QUERIES, first)
    samples = [
        weights[:, w][:, :, at.numpy()] for w, at in zip(windows.tolist(), queries, strict=True)
    ]
    return np.stack(samples, 1)


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_equals_brute_force_for_any_batches_in_any_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers have fused attention, or shifted windows, and more queries than are sampled."""
    model, x = small(name)
    monkeypatch.setattr(Attention, "BLOCK", 1 << 12)  # one image at a time
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # Swin does not use it by default
    with tcnn_probe.record(model) as recorder:  # the model runs in float32
        for batch in x[torch.randperm(7)].split([4, 1, 2]):
            model(batch)
        recorder.mark(epoch=0)
        model(x)
        recorder.mark(epoch=1)
    ds = recorder.dataset
    references = attention_of(model, x)
    assert {reference.layer for reference in references} == set(ds.layer.values)
    for reference in references:
        weights = reference.weights.unflatten(0, (7, -1)).numpy()
        content_information = ds.content_information.sel(layer=reference.layer)
        heads = weights.shape[2]
        expected = information(at_sampled_queries(weights, int(name == "vit")))
        # This is far above the tolerance.
        assert expected.max() > 0.05
        # The tolerance is for differences of entropies of a few nats, measured in float32.
        np.testing.assert_allclose(
            content_information[:, :heads], np.stack([expected] * 2), atol=1e-5
        )
        if name == "vit":
            expected = information(weights[..., :1, :])
            np.testing.assert_allclose(
                ds.class_content_information.sel(layer=reference.layer),
                np.stack([expected] * 2),
                atol=1e-5,
            )


def test_gated_attention_equals_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the whole attention, over real and padding pixels,
    and its content part are checked, for 91 queries.
    """
    monkeypatch.setattr(Attention, "BLOCK", 120_000)  # two images at a time
    layer = scatter(GPSA(3, 4, 3, padding=1))
    x = images(7, 3, 7, 13)
    ds = numbers(nn.Sequential(layer).eval(), *x.split([4, 1, 2]))
    with torch.no_grad():
        attention = layer.double().gated_attention(x.double())
        parts = {
            "content_information": attention.dense(),
            "content_part_information": attention.content(),
        }
    for name, weights in parts.items():
        expected = information(at_sampled_queries(weights.numpy()[:, None]))
        # This is far above the tolerance.
        assert expected.max() > 0.01
        np.testing.assert_allclose(ds[name].squeeze(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("windows", "queries"),
    [(1, 1), (1, 64), (1, 65), (1, 4096), (4, 49), (64, 49), (100, 3), (7, 9)],
)
def test_queries_are_sampled_evenly(windows: int, queries: int) -> None:
    which, at = sample_queries(windows, queries, QUERIES)
    assert at.numel() <= 64
    # The sample has at least three quarters of its maximal size.
    assert at.numel() > 48 or at.numel() == windows * queries
    assert all(len(set(row)) == len(row) for row in at.tolist())
    assert (at < queries).all()
    assert (which < windows).all()
    if queries == 4096:
        for of_axis in (at // 64, at % 64):
            counts = torch.bincount(of_axis[0] // 8, minlength=8)
            # An eighth of an axis would ideally have 64 / 8 = 8 queries.
            assert counts.min() >= 6, counts


def test_images_of_several_sizes_have_no_content_information(tmp_path: Any) -> None:
    """Both grids have 28 pixels: the value is NaN,
    the reason says what to do, and the next epoch is unaffected.
    """
    model = Positional().eval()
    with tcnn_probe.record(model, tmp_path / "a.zarr") as recorder:
        for x in (images(2, 1, 4, 7), images(2, 1, 7, 4)):
            model(x)
        with pytest.warns(RuntimeWarning, match="several sizes came between two marks: mark"):
            recorder.mark(epoch=0)
        model(images(2, 1, 4, 7))
        recorder.mark(epoch=1)
    statistics = recorder.dataset[["content_information", "translation_equivariance", "entropy"]]
    assert np.isnan(statistics.content_information[0]).all()
    assert np.isfinite(statistics.isel(epoch=1).to_array()).all()
    assert np.isfinite(statistics.entropy).all()
    assert "mark() after those of each size" in recorder.missing["content_information"][""]
