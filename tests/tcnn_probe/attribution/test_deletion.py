"""Deletion and insertion curves by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tcnn_probe
from tcnn_probe.attribution import area_under, deletion_curve, insertion_curve
from tcnn_probe.attribution.deletion import pixel_order
from tcnn_probe.attribution.pixels import background
from tests.tcnn_probe.attribution.models import Linear

GENERATOR = torch.Generator().manual_seed(7)
IMAGES = torch.randn(3, 2, 7, 11, dtype=torch.float64, generator=GENERATOR)
MAPS = torch.randn(3, 7, 11, dtype=torch.float64, generator=GENERATOR)
TARGETS = [2, 0, 1]


@torch.no_grad()
def by_hand(
    model: Linear, start: Tensor, end: Tensor, steps: int, score: str = "softmax"
) -> tuple[list[float], list[list[float]]]:
    """Compute the curves pixel by pixel, the most salient first."""
    curves = []
    for image in range(3):
        pixels = sorted(np.ndindex(7, 11), key=lambda at: -float(MAPS[image][at]))
        now = start[image].clone()
        done = 0
        curve = []
        for step in range(steps + 1):
            while done < round(step * 77 / steps):
                y, x = pixels[done]
                now[:, y, x] = end[image][:, y, x]
                done += 1
            logits = (model.weight * now).sum((1, 2, 3)) + model.bias
            scores = {
                "logit": logits,
                "sigmoid": 1 / (1 + (-logits).exp()),
                "softmax": logits.exp() / logits.exp().sum(),
            }
            curve.append(float(scores[score][TARGETS[image] % len(logits)]))
        curves.append(curve)
    return [round(step * 77 / steps) / 77 for step in range(steps + 1)], curves


@pytest.mark.parametrize(
    ("steps", "batch_size", "baseline"),
    # Steps take all 77 pixels at once, a number that does not divide them, or single pixels;
    # baselines are a number, or one per channel.
    [(1, 100, 0.0), (5, 2, torch.tensor([[[0.0]], [[1.0]]])), (77, 1, 0.4)],
)
def test_deletion_by_hand(steps: int, batch_size: int, baseline: float | Tensor) -> None:
    model = Linear()
    target = torch.tensor(TARGETS)
    end = torch.zeros_like(IMAGES) + baseline
    shares, curves = by_hand(model, IMAGES, end, steps)
    result = deletion_curve(
        model,
        IMAGES,
        MAPS,
        target,
        steps=steps,
        baseline=baseline,
        batch_size=batch_size,
    )
    np.testing.assert_allclose(result[0], shares, atol=1e-12)
    np.testing.assert_allclose(result[1], curves, atol=1e-12)
    heights = np.array(curves)
    areas = (heights[:, 1:] + heights[:, :-1]) / 2 @ np.diff(shares)
    np.testing.assert_allclose(area_under(*result), areas, atol=1e-12)


@pytest.mark.parametrize("score", ["logit", "sigmoid"])
@pytest.mark.parametrize("classes", [1, 3])
def test_deletion_measures_the_score(score: Any, classes: int) -> None:
    model = Linear(classes)
    target = torch.tensor(TARGETS) % classes
    expected = by_hand(model, IMAGES, torch.zeros_like(IMAGES), 3, score)
    curves = deletion_curve(model, IMAGES, MAPS, target, steps=3, score=score)
    np.testing.assert_allclose(curves[1], expected[1], rtol=1e-12)
    ds = tcnn_probe.faithfulness(model, IMAGES, {"mine": MAPS}, target, score=score, steps=3)
    areas = area_under(*curves)
    np.testing.assert_allclose(ds.deletion_auc.sel(attribution="mine"), areas, rtol=1e-12)
    assert ds.deletion_auc.range == ("0 to 1" if score == "sigmoid" else "any number")


def test_insertion_by_hand() -> None:
    model = Linear()
    target = torch.tensor(TARGETS)
    for start in (0.3, "blur"):
        begin = background("blur", IMAGES) if start == "blur" else torch.full_like(IMAGES, 0.3)
        shares, curves = by_hand(model, begin, IMAGES, 6)
        result = insertion_curve(model, IMAGES, MAPS, target, steps=6, start=start, batch_size=2)
        np.testing.assert_allclose(result[0], shares, atol=1e-12)
        np.testing.assert_allclose(result[1], curves, atol=1e-12)


def test_blur_by_hand() -> None:
    """A loop applies a Gaussian of 11 x 7 pixels (the image has 7 rows),
    with a reflected border.
    """
    image = IMAGES[:1, :1]
    kernels = []
    for side in (7, 11):
        # The paper's standard deviation is 5, over 11 pixels or as many as there are.
        offsets = np.arange(side) - side // 2
        weights = np.exp(-0.5 * (offsets / 5.0) ** 2)
        kernels.append(weights / weights.sum())
    padded = np.pad(image[0, 0].numpy(), ((3, 3), (5, 5)), mode="reflect")
    slow = np.empty((7, 11))
    for y in range(7):
        for x in range(11):
            slow[y, x] = (padded[y : y + 7, x : x + 11] * np.outer(*kernels)).sum()
    np.testing.assert_allclose(background("blur", image)[0, 0], slow, atol=1e-6)
    assert background("blur", torch.ones(1, 2, 1, 3)).shape == (1, 2, 1, 3)


def test_order_of_equal_pixels_is_random_and_the_same_for_all_images() -> None:
    maps = torch.zeros(2, 7, 11)
    maps[:, 3, 5] = 1
    order = pixel_order(maps)
    assert order[0, 3 * 11 + 5] == 0
    assert sorted(order[0].tolist()) == list(range(77))
    assert torch.equal(order[0], order[1])
    rest = order[0][order[0] > 0]
    # Reading order would have a correlation of 1 or -1; 76 random ranks have a standard deviation
    # of 0.11.
    assert abs(np.corrcoef(rest, np.arange(76))[0, 1]) < 0.3
    assert not torch.equal(order, pixel_order(maps, seed=1))
    # The order of equal values must not depend on the dtype.
    assert torch.equal(order, pixel_order(maps.half()))


def test_nan_maps_have_no_area() -> None:
    maps = MAPS.clone()
    # One pixel of one image is NaN, and the other images keep their areas.
    maps[1, 2, 3] = torch.nan
    _, curve = deletion_curve(Linear(), IMAGES, maps, torch.tensor(TARGETS))
    assert curve.isnan().all(1).tolist() == [False, True, False]
    assert not curve[[0, 2]].isnan().any()
