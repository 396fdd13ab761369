from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import zoom as scipy_zoom

from tcnn_probe.evaluation.corruptions.resampling import (
    area_weights,
    reference_shape,
    scale_of,
    shrink,
    zoom,
)


def slow_means(layer: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """Compute means over 60 samples along each pixel of the coarse grid."""
    means = np.zeros((*shape, *layer.shape[2:]))
    samples = (np.arange(60) + 0.5) / 60
    for y, x in np.ndindex(shape):
        rows = (y + samples) * layer.shape[0] / shape[0]
        columns = (x + samples) * layer.shape[1] / shape[1]
        pixels = layer[np.ix_(rows.astype(int), columns.astype(int))]
        means[y, x] = pixels.mean((0, 1))
    return means


def test_shrink_equals_means_over_samples() -> None:
    layer = np.random.default_rng(0).random((23, 29, 3))
    # The slow means take 60 x 60 points of each cell, so that edges of pixels are off by up to 1 /
    # 120 of a cell.
    np.testing.assert_allclose(shrink(layer, (11, 7)), slow_means(layer, (11, 7)), atol=0.01)
    np.testing.assert_allclose(
        shrink(layer[..., 0], (11, 7)), slow_means(layer[..., 0], (11, 7)), atol=0.01
    )
    assert shrink(layer, (23, 29, 1)) is layer


def test_area_weights_are_overlaps() -> None:
    np.testing.assert_allclose(
        area_weights(np.array([1.0, 3.2]), 1.5, 4),
        [[0.25, 1, 0.25, 0], [0, 0, 0.05, 1]],
    )


# The published factors are 1 to 1.31; larger ones leave less than half of the image.
@pytest.mark.parametrize("factor", [1.0, 1.07, 1.31, 2.5, 4.5])
def test_zoom_equals_scipys_zoom_of_the_centre(factor: float) -> None:
    image = np.random.default_rng(0).random((23, 31, 3))
    sides = [int(np.ceil(size / factor)) for size in (23, 31)]
    top = (23 - sides[0]) // 2
    left = (31 - sides[1]) // 2
    middle = image[top : top + sides[0], left : left + sides[1]]
    np.testing.assert_allclose(
        zoom(image, factor),
        scipy_zoom(middle, (factor, factor, 1), order=1),
        atol=1e-12,
    )


def test_the_shorter_side_sets_the_scale() -> None:
    assert scale_of((64, 48, 3)) == 48 / 224
    assert reference_shape((64, 48, 3), 48 / 224) == (299, 224)
    assert reference_shape((300, 400), 1.0) == (300, 400)
