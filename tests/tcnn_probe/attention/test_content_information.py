"""Content information, the part of a head's attention that the image decides: known values, and brute force."""

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
from tcnn_probe.attention.patterns import QUERIES, sample_queries
from tcnn_probe.heads import static_pattern
from tcnn_probe.heads.static_pattern import translation_equivariance
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
    """Three heads on (B, 1, H, W), by position alone: a concentrated one, an even one, and one that looks anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        place = torch.tensor(grid(height, width)).float()
        noise = torch.randn(
            height * width, height * width, generator=torch.Generator().manual_seed(0)
        )
        bias = torch.stack(
            [-(torch.cdist(place, place) ** 2), 0 * noise, 5 * noise]
        ).to(x)
        values = x.flatten(2)[:, :, :, None].expand(-1, 3, -1, -1)
        return scaled_dot_product_attention(0 * values, values, values, attn_mask=bias)


@pytest.mark.parametrize("count", [2, 7])
def test_attention_by_position_alone_has_none(count: int) -> None:
    """Also under GPSA's padding, at the border of which much attention falls on it, and in shifted windows."""
    # Differences of float32 entropies of up to log 99 nat, times n / (n - 1).
    tolerance = 8 * 2.0**-24 * math.log(99) * count / (count - 1)
    plain = numbers(Positional().eval(), images(count, 1, 5, 7))
    assert abs(plain.content_information).max() < tolerance
    # At the border fewer keys share a row, so that it is not quite 1.
    np.testing.assert_allclose(
        # The two that depend on the offset alone; noise is another at every place.
        plain.translation_equivariance.values[0, :2],
        [1, 1],
        atol=0.05,
    )
    # For independent random numbers on this grid it has a standard deviation of 0.013.
    assert abs(plain.translation_equivariance.values[0, 2]) < 0.1

    layer = scatter(GPSA(3, 4, 3, padding=1))
    with torch.no_grad():
        # Queries of zero leave content attention even, whatever the image.
        layer.query.zero_()
    gated = numbers(nn.Sequential(layer).eval(), images(count, 3, 5, 7))
    for name in ("content_information", "content_part_information"):
        assert abs(gated[name]).max() < tolerance

    swin = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=24,
        window_size=2,
        depths=(2,),
        num_heads=(3,),
        embed_dim=12,
    )
    with torch.no_grad():
        for name, parameter in swin.named_parameters():
            # Queries and keys of zero, and a bias far beyond its initial 0.02, so that position alone decides.
            parameter.mul_(60 if "bias_table" in name else "qkv" not in name)
    windowed = numbers(swin.eval(), images(count, 3, 24, 24))
    assert (windowed.entropy / windowed.uniform_entropy < 0.95).all()
    assert abs(windowed.content_information).max() < tolerance


class Lookup(nn.Module):
    """Every query looks at the key that the image names."""

    def forward(self, x: Tensor) -> Tensor:
        # (B, 1, 1, 11).
        # exp(-100) is nothing in float32: the key that is named gets all.
        mask = (
            100
            * nn.functional.one_hot(x.long().flatten(), 11).to(x.dtype)[:, None, None]
        )
        values = torch.zeros(len(x), 1, 11, 3).to(x)
        return scaled_dot_product_attention(
            values, values, values, attn_mask=mask.expand(-1, -1, 11, -1)
        )


@pytest.mark.filterwarnings("ignore:no attention_distance")
@pytest.mark.parametrize("count", [5, 11])
def test_another_key_in_each_of_n_images_is_log_n(count: int) -> None:
    """The correction for n images is part of the number."""
    # Another key for every image.
    named = torch.randperm(11, generator=torch.Generator().manual_seed(0))[
        :count
    ].float()
    content_information = numbers(
        nn.Sequential(Lookup()).eval(), *named.split(3)
    ).content_information
    # float32 entropies of up to log 11.
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
    if name == "swin":
        options = {
            "window_size": (2, 3),
            "depths": (2, 2),
            "num_heads": (3, 6),
            "embed_dim": 12,
        }
        return sharpen(
            timm.create_model(
                "swin_tiny_patch4_window7_224", img_size=(32, 96), **options
            )
        ), images(7, 3, 32, 96)
    options = {"depth": 1, "embed_dim": 12, "num_heads": 3}
    return sharpen(
        timm.create_model("cait_xxs24_224", img_size=(48, 160), **options)
    ), images(7, 3, 48, 160)


def at_sampled_queries(weights: np.ndarray) -> np.ndarray:
    """(B, W, heads, N_query, N_key) at the queries that are sampled: (B, w, heads, n, N_key)."""
    windows, queries = sample_queries(weights.shape[1], weights.shape[3], QUERIES)
    samples = [
        weights[:, w][:, :, at.numpy()]
        for w, at in zip(windows.tolist(), queries, strict=True)
    ]
    return np.stack(samples, 1)


@pytest.mark.parametrize("name", ["vit", "swin", "cait"])
def test_brute_force_whatever_the_batches_and_their_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused attention, shifted windows, talking heads and class attention, of layers of more queries than are seen."""
    model, x = small(name)
    monkeypatch.setattr(Attention, "BLOCK", 1 << 12)  # an image at a time
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # which Swin is not by default
    with tcnn_probe.record(model) as recorder:  # in float32
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
        expected = information(at_sampled_queries(weights))
        content_information = ds.content_information.sel(layer=reference.layer)
        heads = weights.shape[2]
        # Far above the tolerance.
        assert expected.max() > 0.05
        # Differences of entropies of a few nat, which were measured in float32.
        np.testing.assert_allclose(
            content_information[:, :heads], np.stack([expected] * 2), atol=1e-5
        )
        if (
            name != "swin"
            and weights.shape[3] in (1, weights.shape[4])
            and np.isfinite(ds.class_entropy.sel(layer=reference.layer)).all()
        ):
            expected = information(weights[..., :1, :])
            np.testing.assert_allclose(
                ds.class_content_information.sel(layer=reference.layer),
                np.stack([expected] * 2),
                atol=1e-5,
            )


def test_brute_force_of_gated_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Information of the whole attention over real and padding pixels, and of its content part; 91 queries."""
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
        # Far above the tolerance.
        assert expected.max() > 0.01
        np.testing.assert_allclose(ds[name].squeeze(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("windows", "queries"),
    [(1, 1), (1, 64), (1, 65), (1, 4096), (4, 49), (64, 49), (100, 3), (7, 9)],
)
def test_queries_are_chosen_evenly(windows: int, queries: int) -> None:
    which, at = sample_queries(windows, queries, QUERIES)
    assert at.numel() <= 64
    # At least three quarters of what may be looked at.
    assert at.numel() > 48 or at.numel() == windows * queries
    assert all(len(set(row)) == len(row) for row in at.tolist())
    assert (at < queries).all()
    assert (which < windows).all()
    if queries == 4096:
        for of_axis in (at // 64, at % 64):
            counts = torch.bincount(of_axis[0] // 8, minlength=8)
            # 64 queries over 8 eighths of an axis would be 8 each.
            assert counts.min() >= 6, counts


def test_images_of_several_sizes_are_refused(tmp_path: Any) -> None:
    """28 pixels each time, on another grid: NaN, with the remedy, and the next epoch as if nothing had been."""
    model = Positional().eval()
    with tcnn_probe.record(model, tmp_path / "a.zarr") as recorder:
        for x in (images(2, 1, 4, 7), images(2, 1, 7, 4)):
            model(x)
        with pytest.warns(
            RuntimeWarning, match="several sizes came between two marks: mark"
        ):
            recorder.mark(epoch=0)
        model(images(2, 1, 4, 7))
        recorder.mark(epoch=1)
    statistics = recorder.dataset[
        ["content_information", "translation_equivariance", "entropy"]
    ]
    assert np.isnan(statistics.content_information[0]).all()
    assert np.isfinite(statistics.isel(epoch=1).to_array()).all()
    assert np.isfinite(statistics.entropy).all()
    assert (
        "mark() after those of each size" in recorder.missing["content_information"][""]
    )


def test_equivariance_of_patterns_that_are_known() -> None:
    """A Toeplitz pattern, though its rows are cut off at the border; noise; a corner; the same everywhere; no pairs."""
    rng = np.random.default_rng(0)
    places = np.array(grid(5, 7), dtype=float)
    kernel = rng.random((9, 13))
    offsets = (places[None] - places[:, None] + (4, 6)).astype(int)
    corner = np.zeros((35, 35))
    corner[:, 0] = 1
    of_heads = np.stack(
        [kernel[offsets[..., 0], offsets[..., 1]], corner, np.ones((35, 35))]
    )
    equivariance = translation_equivariance(of_heads, places, places)
    np.testing.assert_allclose(equivariance[[0, 2]], 1, atol=1e-12)
    assert abs(equivariance[1]) < 0.2
    noise = translation_equivariance(rng.random((400, 35, 35)), places, places)
    pairs, groups = 35**2, 9 * 13
    # The deviation of the F statistic's denominator.
    deviation = math.sqrt(2 * (groups - 1) / ((pairs - groups) * (pairs - 1)))
    # Four standard errors of the mean of 400.
    assert abs(noise.mean()) < 4 * deviation / 20
    # Of 400 draws a deviation scatters by 3.5 %.
    assert noise.std() == pytest.approx(deviation, rel=0.15)
    alone = translation_equivariance(rng.random((2, 1, 35)), places[:1], places)
    assert np.isnan(alone).all()


def test_estimate_from_few_images_is_unbiased_where_content_is_weak() -> None:
    """Groups of eight and of two of 1,024 images; without the factor n / (n - 1), these lack an eighth and a half."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(3, 1, 11, 23)) + 0.3 * generator.normal(
        size=(3, 1024, 11, 23)
    )
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    entropies = -(weights * np.log(weights)).sum(-1).mean(-1)  # (heads, images)

    def estimate(count: int) -> np.ndarray:
        groups = weights.reshape(3, -1, count, 11, 23).mean(2)
        entropy = entropies.reshape(3, -1, count).mean(2)
        estimates = [
            static_pattern.information(groups[:, group], entropy[:, group], count)
            for group in range(groups.shape[1])
        ]
        return np.mean(estimates, 0)

    of_all_images = estimate(1024)
    for count in (2, 8):
        # The correction removes the bias of second order: higher orders and the scatter of the estimates are left.
        np.testing.assert_allclose(estimate(count), of_all_images, rtol=0.05)
