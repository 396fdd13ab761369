"""Infidelity and sensitivity, as requested from captum, by hand for one perturbation at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tcnn_probe.attribution import captum_maps, infidelity, sensitivity
from tcnn_probe.attribution.perturbation import random_squares
from tests.tcnn_probe.attribution.models import Linear, OneBlock, bright

pytestmark = pytest.mark.numerical
IMAGES = torch.randn(3, 2, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([2, 0, 1])


def test_contributions_of_a_linear_model_are_faithful() -> None:
    model = Linear()
    maps = captum_maps("InputXGradient", model, IMAGES, TARGETS)[0]
    # The map's sum over a square is exactly the change of the score, up to rounding in float64.
    assert infidelity(model, IMAGES, maps, TARGETS).abs().max() < 1e-12
    # This is a mean of squares of the errors above.
    assert infidelity(model, IMAGES, maps, TARGETS, normalize=False).max() < 1e-24
    # With normalisation, the scale of a map does not matter.
    assert infidelity(model, IMAGES, 5 * maps, TARGETS).abs().max() < 1e-12
    assert (infidelity(model, IMAGES, 5 * maps, TARGETS, normalize=False) > 1).all()
    assert (infidelity(model, IMAGES, maps.flip(2), TARGETS) > 0.1).all()
    assert infidelity(model, IMAGES, maps * torch.nan, TARGETS).isnan().all()


@pytest.mark.parametrize(
    ("batch_size", "normalize"), [(1, True), (4, False), (4, True), (50, True)]
)
def test_infidelity_by_hand(batch_size: int, normalize: bool) -> None:
    model = OneBlock()
    x = bright()
    maps = torch.rand(3, 12, 20, generator=torch.Generator().manual_seed(4))
    target = torch.tensor([1, 0, 1])
    squares = random_squares(7, (12, 20), seed=9)
    by_hand = []
    for image in range(3):
        predictions, fell = [], []
        for square in squares:
            covered = torch.where(square, torch.tensor(0.25), x[image])
            with torch.no_grad():
                before = model(x[image][None])
                after = model(covered[None])
            predictions.append(float((maps[image] * square).sum()))
            fell.append(float((before - after)[0, target[image]]))
        a, b = np.array(predictions), np.array(fell)
        scale = (a * b).sum() / (a * a).sum() if normalize else 1
        by_hand.append(((scale * a - b) ** 2).mean())
    options = {"baseline": 0.25, "samples": 7, "seed": 9, "normalize": normalize}
    infidelities = infidelity(model, x, maps, target, batch_size=batch_size, **options)  # type: ignore[arg-type]
    # These are sums of 240 pixels and differences of scores near 4, in float32.
    np.testing.assert_allclose(infidelities, by_hand, rtol=1e-4, atol=1e-4)
    assert infidelities[0] > 0.01


def test_sides_of_perturbed_squares() -> None:
    squares = random_squares(100, (7, 11), seed=0)
    sides = set()
    for square in squares:
        rows = square.any(1).nonzero()[:, 0]
        columns = square.any(0).nonzero()[:, 0]
        assert square.sum() == len(rows) ** 2 == len(columns) ** 2
        sides.add(len(rows))
    # Sides are up to half of the shorter side of the image.
    assert sides == {1, 2, 3}
    assert squares.any(0).all()
    assert torch.equal(squares, random_squares(100, (7, 11), seed=0))
    assert random_squares(2, (1, 1), seed=0).all()


@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_sensitivity_by_hand(batch_size: int) -> None:
    model = Linear()
    noise = torch.rand(5, 2, 7, 11, generator=torch.Generator().manual_seed(6)) * 2 - 1

    def explain(x: Tensor, target: Tensor) -> Tensor:
        assert len(x) <= max(batch_size, 1)
        return (x.sum(1) ** 2) * target[:, None, None]

    by_hand = []
    for image, k in zip(IMAGES, [2, 1, 1], strict=True):
        original = k * image.sum(0) ** 2
        moved = [
            k * (image + 0.3 * direction.double()).sum(0) ** 2 - original for direction in noise
        ]
        by_hand.append(max(float(direction.norm()) for direction in moved) / float(original.norm()))
    target = torch.tensor([2, 1, 1])
    sensitivities = sensitivity(
        model,
        IMAGES,
        explain,
        target,
        radius=0.3,
        samples=5,
        seed=6,
        batch_size=batch_size,
    )
    np.testing.assert_allclose(sensitivities, by_hand, rtol=1e-6)


def test_constant_explanation_is_not_sensitive() -> None:
    sensitivities = sensitivity(
        Linear(), IMAGES, lambda x, target: torch.ones(len(x), 7, 11), TARGETS
    )
    assert sensitivities.tolist() == [0, 0, 0]


def test_a_method_may_change_its_images_in_place() -> None:
    explain = (lambda x, target: x.mul_(0.5)[:, 0]), (lambda x, target: (x * 0.5)[:, 0])
    in_place, expected = (
        sensitivity(Linear(), IMAGES, method, TARGETS, samples=3) for method in explain
    )
    torch.testing.assert_close(in_place, expected)
