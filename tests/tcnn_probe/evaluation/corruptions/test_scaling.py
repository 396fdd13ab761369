"""A small image is treated as an image of the published size that is seen at a lower resolution.

Each image is enlarged seven times by boxes and corrupted as published. The corruption of the small
image must equal the result, seen at the lower resolution.
"""

from typing import Any

import numpy as np
import pytest
from numpy.random import MT19937, RandomState
from numpy.typing import NDArray
from PIL import Image

from tcnn_probe.evaluation import CORRUPTIONS
from tcnn_probe.evaluation.corruptions.resampling import scale_of

# 32 pixels times 7 are 224; 7 is odd, so that each pixel of the small image has a central one in
# the large image.
TIMES = 7


@pytest.fixture
def small(image: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(Image.fromarray(image).resize((37, 32))) / 255


def run(
    name: str, image: NDArray[Any], severity: int, seed: int = 5, **options: Any
) -> NDArray[Any]:
    corruption = CORRUPTIONS[name]
    scale = scale_of(image.shape)
    return corruption.function(
        image, RandomState(MT19937(seed)), scale, **corruption.at(severity), **options
    )


def enlarged(image: NDArray[Any]) -> NDArray[Any]:
    return image.repeat(TIMES, 0).repeat(TIMES, 1)


def averaged(image: NDArray[Any]) -> NDArray[Any]:
    height, width, channels = image.shape
    return image.reshape(height // TIMES, TIMES, width // TIMES, TIMES, channels).mean((1, 3))


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", ["snow", "frost"])
def test_added_layers_are_averaged(name: str, severity: int, small: NDArray[Any]) -> None:
    large = enlarged(small)
    assert scale_of(small.shape) == pytest.approx(1 / TIMES)
    assert scale_of(large.shape) == 1
    np.testing.assert_allclose(
        run(name, small, severity), averaged(run(name, large, severity)), atol=1e-12
    )


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_discs_of_defocus_blur_are_averaged(severity: int, small: NDArray[Any]) -> None:
    half = TIMES // 2
    expected = run("defocus_blur", enlarged(small), severity)[half::TIMES, half::TIMES]
    blurred = run("defocus_blur", small, severity)
    inside = np.s_[2:-2, 2:-2]  # the border is mirrored at another position
    np.testing.assert_allclose(blurred[inside], expected[inside], atol=1e-12)
    # A disc of radius 3 lies within the seven pixels.
    assert (np.abs(blurred - small).mean() > 1e-3) == (severity > 1)


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_strokes_of_motion_blur_are_shortened(severity: int, small: NDArray[Any]) -> None:
    half = TIMES // 2
    for seed in range(5):  # each seed gives another direction
        expected = run("motion_blur", enlarged(small), severity, seed)[half::TIMES, half::TIMES]
        blurred = run("motion_blur", small, severity, seed)
        assert (
            np.square(blurred - expected).mean()
            # Shorter strokes have fewer samples, so the error may be a twentieth of the blur
            # itself.
            < 0.05 * np.square(expected - small).mean()
        )


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("severity", [1, 3, 5])
def test_pixels_are_displaced_one_by_one(severity: int, scale: float, small: NDArray[Any]) -> None:
    # There is no blur before and after, so that pixels are moved but not mixed.
    parameters = CORRUPTIONS["glass_blur"].at(severity) | {"deviation": 1e-6}
    displaced = CORRUPTIONS["glass_blur"].function(
        small, RandomState(MT19937(5)), scale, **parameters
    )
    expected = small.copy()
    random = RandomState(MT19937(5))
    reach = int(parameters["reach"])
    height, width, _ = small.shape
    margin = int(np.ceil(reach * scale))
    for _ in range(int(parameters["rounds"])):
        moves = random.randint(-reach, reach, size=(height - 2 * margin, width - 2 * margin, 2))
        # Fractions of a pixel are rounded up or down at random, so that they are right on average.
        up = random.random_sample(moves.shape) if scale < 1 else np.zeros(moves.shape)
        for i, y in enumerate(range(height - margin, margin, -1)):
            for j, x in enumerate(range(width - margin, margin, -1)):
                right, down = np.floor(moves[i, j] * scale + up[i, j]).astype(int)
                row = min(max(y + down, 0), height - 1)
                column = min(max(x + right, 0), width - 1)
                expected[y, x] = expected[row, column]
    np.testing.assert_array_equal(displaced, expected)


@pytest.mark.parametrize("severity", [3, 5])
def test_elastic_displacements_are_scaled(severity: int) -> None:
    sizes = []
    for size in (224, 112):
        ramp = np.broadcast_to(
            # A ramp shows how far each pixel was moved.
            np.arange(float(size))[:, None, None],
            (size, size + 3, 1),
        )
        parameters = CORRUPTIONS["elastic_transform"].at(severity) | {"corners": 0.0}
        function = CORRUPTIONS["elastic_transform"].function
        warped = function(ramp, RandomState(MT19937(5)), scale_of(ramp.shape), **parameters)
        sizes.append((warped - ramp)[8:-8, 8:-8].std())
    # Smooth random fields have few independent parts, so that their standard deviations scatter.
    assert sizes[1] / sizes[0] == pytest.approx(0.5, rel=0.1)


def test_corners_of_the_elastic_map_are_scaled(small: NDArray[Any]) -> None:
    parameters = CORRUPTIONS["elastic_transform"].at(1) | {"amplitude": 0.0}
    function = CORRUPTIONS["elastic_transform"].function
    ramps = [
        np.broadcast_to(np.arange(float(height))[:, None, None], (height, width, 1))
        for height, width in ((224, 259), (32, 37))
    ]
    large, little = (
        function(ramp, RandomState(MT19937(5)), scale_of(ramp.shape), **parameters)
        for ramp in ramps
    )
    half = TIMES // 2
    inside = np.s_[8:-8, 8:-8]
    # These are the centres of the large pixels, in pixels of the small image.
    scaled = large[half::TIMES, half::TIMES] / TIMES
    assert np.abs(scaled - little)[inside].max() < 0.8
    assert np.abs(little - ramps[1])[inside].max() > 1.5


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # Zooming interpolates between pixels, of which the small image has fewer; the others act on
    # single pixels.
    [("zoom_blur", 0.25), ("contrast", 1e-9), ("brightness", 1e-9)],
)
def test_corruptions_without_lengths_do_not_depend_on_the_scale(
    name: str, tolerance: float, small: NDArray[Any]
) -> None:
    expected = averaged(run(name, enlarged(small), 3))
    corrupted = run(name, small, 3)
    assert np.square(corrupted - expected).mean() < tolerance * np.square(expected - small).mean()


def test_large_images_get_the_published_lengths() -> None:
    assert scale_of((1000, 225)) == 1
    assert scale_of((1000, 56, 3)) == 0.25
    point = np.zeros((301, 331, 1))
    point[150, 160] = 1
    disc = run("defocus_blur", point, 3) > 1e-9
    # Radius 6, and one pixel of smoothing on each side.
    assert disc.any(0).sum() == 13 + 2
    assert disc.any(1).sum() == 13 + 2
