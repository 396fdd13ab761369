"""Corruptions against the package imagecorruptions, with the same random numbers.

The package is the published code, ported to any image size. Where it departs from the published
code (elastic_transform; boxes in pixelate), that code is rewritten here.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import MT19937, Generator, RandomState
from numpy.typing import NDArray
from PIL import Image

from tcnn_probe.evaluation import CORRUPTIONS, corrupt
from tcnn_probe.evaluation.corrupt_images import _random_state

# These are the largest differences in levels of 256. For those of 1, the reference rounds to whole
# levels on the way, and ours does not.
DIFFERENCE = dict.fromkeys(CORRUPTIONS, 1e-3) | {
    "glass_blur": 1.0,
    "snow": 1.0,
    "pixelate": 1.001,
}
SEED = 5


def damaged(
    reference: Any, name: str, image: NDArray[Any], severity: int, random: RandomState
) -> NDArray[Any]:
    """Corrupt an image by the reference, which draws
    from NumPy's global generator; its result is not rounded.
    """
    np.random.set_state(random.get_state())  # noqa: NPY002
    function = elastic_transform if name == "elastic_transform" else getattr(reference, name)
    arguments = (
        (reference, image, severity)
        if name == "elastic_transform"
        else (Image.fromarray(image), severity)
    )
    return np.asarray(function(*arguments), dtype=float)


@pytest.mark.study(but=["contrast-3", "fog-3", "gaussian_noise-3", "jpeg_compression-3"])
@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "name", [name for name in CORRUPTIONS if name not in ("frost", "elastic_transform")]
)
def test_corruptions_equal_the_reference(
    name: str,
    severity: int,
    reference: Any,
    image: NDArray[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Impulse noise creates a generator.
    monkeypatch.setattr(np.random, "default_rng", lambda *_: Generator(MT19937(SEED)))
    # The published pixelate used boxes.
    monkeypatch.setattr(Image, "NEAREST", Image.Resampling.BOX)
    corruption = CORRUPTIONS[name]
    ours = corruption.function(
        image / 255, RandomState(MT19937(SEED)), 1.0, **corruption.at(severity)
    )
    expected = damaged(reference, name, image, severity, RandomState(MT19937(SEED)))
    np.testing.assert_allclose(np.clip(ours, 0, 1) * 255, expected, rtol=0, atol=DIFFERENCE[name])
    assert np.abs(expected - image).mean() > 1  # the corruption changes the image


@pytest.mark.parametrize("name", ["shot_noise", "motion_blur", "snow", "contrast"])
def test_corrupt_equals_the_reference_at_the_published_size(
    name: str, reference: Any, image: NDArray[Any]
) -> None:
    """This tests the rest of corrupt(): random numbers, the scale, and rounding to uint8."""
    large = np.asarray(Image.fromarray(image).resize((227, 224), Image.Resampling.BICUBIC))
    draws = _random_state(CORRUPTIONS[name], 3, 7)
    ours = corrupt(large, name, 2, seed=3, first=7)
    expected = damaged(reference, name, large, 2, draws)
    # corrupt() rounds to bytes, which costs half a level.
    np.testing.assert_allclose(ours, expected, rtol=0, atol=0.502 + DIFFERENCE[name])


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_frost_with_the_published_pictures(
    severity: int, reference: Any, frost_folder: Path, image: NDArray[Any]
) -> None:
    pictures = []  # the reference enlarges all pictures by a tenth, and never uses the sixth
    for number in range(1, 6):
        (file,) = frost_folder.glob(f"frost{number}.*")
        picture = reference.cv2.imread(str(file))
        size = tuple(int(np.ceil(side * 1.1)) for side in picture.shape[1::-1])
        pictures.append(
            reference.cv2.resize(picture, size, interpolation=reference.cv2.INTER_CUBIC)[..., ::-1]
        )
    parameters = CORRUPTIONS["frost"].at(severity)
    random = RandomState(MT19937(SEED))
    # The image is larger than the reference's smallest crop, and not square.
    large = np.asarray(Image.fromarray(image).resize((229, 241)))
    ours = CORRUPTIONS["frost"].function(
        large / 255,
        random,
        1.0,
        **parameters,
        photographs=[picture / 255 for picture in pictures],
    )
    expected = damaged(reference, "frost", large, severity, RandomState(MT19937(SEED)))
    np.testing.assert_allclose(np.clip(ours, 0, 1) * 255, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_elastic_transform_as_published(severity: int, reference: Any, image: NDArray[Any]) -> None:
    # The image is larger than the fixture, as displacements of up to 24 pixels would leave that
    # one.
    image = np.asarray(Image.fromarray(image).resize((137, 131)))
    corruption = CORRUPTIONS["elastic_transform"]
    ours = (
        corruption.function(image / 255, RandomState(MT19937(SEED)), 1.0, **corruption.at(severity))
        * 255
    )
    expected = damaged(reference, "elastic_transform", image, severity, RandomState(MT19937(SEED)))
    np.testing.assert_allclose(np.clip(ours, 0, 255), expected, rtol=0, atol=0.01)
    assert np.abs(expected - image).mean() > 10


def elastic_transform(reference: Any, image: NDArray[Any], severity: int) -> NDArray[Any]:
    """Apply the published code, which is for square images, rewritten without OpenCV."""
    height, width, _ = image.shape
    third = min(image.shape[:2]) // 3
    # 244 is a constant of the published code, for images of 224.
    amplitude = 244 * [2, 2, 0.05, 0.07, 0.12][severity - 1]
    sigma = 244 * [0.7, 0.08, 0.01, 0.01, 0.01][severity - 1]
    reach = 244 * [0.1, 0.2, 0.02, 0.02, 0.02][severity - 1]
    middle = np.array([width // 2, height // 2, 1.0])  # x, y, 1
    corners = middle + third * np.array([[1, 1, 0], [1, -1, 0], [-1, -1, 0]])
    moved = corners.copy()
    moved[:, :2] += np.random.uniform(-reach, reach, size=(3, 2))  # noqa: NPY002
    y, x = np.mgrid[:height, :width]
    # The inverse of the affine map of three corners gives the source of each pixel.
    from_x, from_y, _ = np.linalg.inv(moved.T @ np.linalg.inv(corners.T)) @ [
        x.ravel(),
        y.ravel(),
        1 + 0 * x.ravel(),
    ]
    warped = bilinear(image / 255, from_y, from_x).reshape(image.shape)
    fields = []
    for _ in range(2):
        noise = np.random.uniform(-1, 1, size=(height, width))  # noqa: NPY002
        fields.append(reference.gaussian(noise, sigma, mode="reflect", truncate=3) * amplitude)
    places = [y + fields[1], x + fields[0]]
    channels = [
        reference.map_coordinates(warped[..., c], places, order=1, mode="reflect") for c in range(3)
    ]
    return np.clip(np.stack(channels, -1), 0, 1) * 255


def bilinear(image: NDArray[Any], y: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    """Interpolate an image, mirrored about its outermost pixels, at the given positions: (n, C)."""
    values = np.zeros((len(y), image.shape[2]))
    for down in (0, 1):
        for right in (0, 1):
            row = np.floor(y) + down
            column = np.floor(x) + right
            weight = (1 - np.abs(y - row)) * (1 - np.abs(x - column))
            pixels = image[_mirrored(row, len(image)), _mirrored(column, image.shape[1])]
            values += weight[:, None] * pixels
    return values


def _mirrored(index: NDArray[Any], size: int) -> NDArray[Any]:
    # Pixels beyond the border repeat in reverse order without the outermost ones, with a period of
    # 2 size - 2.
    last = size - 1
    return np.abs((index + last) % (2 * last) - last).astype(int)
