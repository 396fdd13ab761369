"""Energy inside a mask, the pointing game and rank correlation, entry by entry."""

import math

import numpy as np
import pytest
import torch

from tcnn_probe.attribution import energy_inside, pointing_game, rank_correlation

GENERATOR = torch.Generator().manual_seed(7)
MAPS = torch.randn(5, 7, 11, generator=GENERATOR)
MASKS = torch.rand(5, 7, 11, generator=GENERATOR) < 0.3
PIXELS = [(y, x) for y in range(7) for x in range(11)]


def test_energy_inside_a_mask() -> None:
    by_hand = []
    for image, mask in zip(MAPS.double(), MASKS, strict=True):
        total, inside = 0.0, 0.0
        for pixel in PIXELS:
            energy = max(float(image[pixel]), 0)
            total += energy
            inside += energy if mask[pixel] else 0
        by_hand.append(inside / total)
    np.testing.assert_allclose(energy_inside(MAPS, MASKS), by_hand, rtol=1e-12)


# Tolerances allow no neighbour, the four neighbours, the diagonal ones as well, and a disc.
@pytest.mark.parametrize("tolerance", [0, 1, 1.5, 4])
def test_pointing_game_with_a_tolerance(tolerance: float) -> None:
    by_hand = []
    for image, mask in zip(MAPS.tolist(), MASKS.tolist(), strict=True):
        y, x = max(PIXELS, key=lambda at: image[at[0]][at[1]])
        near = [math.hypot(j - y, i - x) for j, i in PIXELS if mask[j][i]]
        by_hand.append(float(min(near) <= tolerance))
    assert pointing_game(MAPS, MASKS, tolerance).tolist() == by_hand
    # These counts differ, which shows that the random masks tell the tolerances apart.
    assert sum(by_hand) == {0: 1, 1: 4, 1.5: 5, 4: 5}[tolerance]


def test_pointing_game_with_several_maxima() -> None:
    maps = torch.zeros(1, 7, 11)
    mask = torch.zeros(1, 7, 11, dtype=torch.bool)
    mask[0, 2] = True
    # Two of the three maxima are on the object.
    maps[0, 2, 4] = maps[0, 2, 9] = maps[0, 6, 1] = 3
    assert pointing_game(maps, mask).tolist() == [pytest.approx(2 / 3)]


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_constant_map_has_the_masks_share(value: float) -> None:
    constant = torch.full((5, 7, 11), value)
    share = MASKS.flatten(1).double().mean(1)
    torch.testing.assert_close(energy_inside(constant, MASKS), share)
    torch.testing.assert_close(pointing_game(constant, MASKS), share)
    assert rank_correlation(constant, MAPS).isnan().all()


def test_nan_maps_and_empty_masks() -> None:
    maps, masks = MAPS.clone(), MASKS.clone()
    maps[1, 3, 4] = torch.nan
    masks[2] = False
    expected = [False, True, True, False, False]
    assert energy_inside(maps, masks).isnan().tolist() == expected
    for tolerance in (0, 2):
        assert pointing_game(maps, masks, tolerance).isnan().tolist() == expected
    assert rank_correlation(maps, MAPS.flip(1)).isnan().tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_bad_masks_are_refused() -> None:
    for masks in (MASKS.float(), MASKS[:1]):
        for measure in (energy_inside, pointing_game):
            with pytest.raises(ValueError, match="expected masks of the maps' shape"):
                measure(MAPS, masks)


def ranks(values: list[float]) -> list[float]:
    """Return 1 + the number of smaller values + half the number of other equal values."""
    return [1 + sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]


def test_rank_correlation() -> None:
    comparisons = (MAPS.flip(2) + MAPS).round()  # there are many ties
    by_hand = []
    for image, comparison in zip(MAPS, comparisons, strict=True):
        a = np.array(ranks(image.flatten().tolist()))
        b = np.array(ranks(comparison.flatten().tolist()))
        by_hand.append(np.corrcoef(a, b)[0, 1])
    correlations = rank_correlation(MAPS, comparisons)
    np.testing.assert_allclose(correlations, by_hand, rtol=1e-12)
    assert not np.allclose(correlations, 1)
    # Ranks are invariant to a monotone transformation.
    np.testing.assert_allclose(rank_correlation(MAPS, MAPS.exp() * 5), 1)
    np.testing.assert_allclose(rank_correlation(MAPS, -MAPS), -1)
