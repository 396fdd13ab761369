"""Pictures of frost: our texture compared with the published photographs, and crops of pictures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import RandomState

from tcnn_probe.evaluation.corruptions.frost_pictures import (
    crop,
    read_photographs,
    texture,
)


def test_the_texture_looks_like_the_photographs(frost_folder: Path) -> None:
    ours = texture()
    photographs = [picture.mean((0, 1)) for picture in read_photographs(frost_folder)[:5]]
    # The mean colours are similar.
    np.testing.assert_allclose(ours.mean((0, 1)), np.mean(photographs, 0), atol=0.04)
    assert 0.07 < ours.mean(2).std() < 0.13  # for the photographs, 0.06 to 0.17
    assert 0 <= ours.min() < ours.max() <= 1
    # The texture is cached, as it takes longer than all other corruptions of a small image.
    assert texture() is ours


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ([np.zeros((5, 7, 4))], r"shape \(H, W, 3\), .* got the shape \(5, 7, 4\)"),
        ([np.full((5, 7, 3), 1.5)], "values from 1.5 to 1.5"),
        ([np.full((5, 7, 3), np.nan)], "values from nan"),
    ],
)
def test_bad_pictures_are_refused(pictures: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_photographs(pictures)


def test_crops_lie_anywhere_in_the_picture() -> None:
    y, x = np.mgrid[:11, :13]
    # Each pixel holds its own position.
    picture = np.stack([y, x, 0 * x], -1) / 20
    corners = {
        tuple(np.rint(crop(picture, (7, 5), RandomState(n))[0, 0, :2] * 20))
        # There are 32 corners. The probability to miss one in 200 draws is 32 (31/32)^200 = 0.06,
        # and the draws are always the same.
        for n in range(200)
    }
    assert corners == {(y, x) for y in range(4) for x in range(8)}


def test_small_pictures_are_enlarged() -> None:
    picture = np.linspace(0.2, 0.8, 5)[:, None, None] * np.ones((5, 4, 3))
    enlarged = crop(picture, (17, 23), RandomState(0))
    assert enlarged.shape == (17, 23, 3)
    # Bicubic interpolation overshoots its input a little.
    assert 0.15 <= enlarged.min() < enlarged.max() <= 0.85
    # The picture is constant along rows, and so is its enlargement.
    assert np.ptp(enlarged, axis=1).max() < 0.01
