"""Pictures of frost: the user's photographs, or a texture that replaces them.

We may not distribute the published photographs. The texture has their mean colour and contrast, but
accuracies under it differ from those under ImageNet-C's frost.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image

__all__ = ["crop", "read_photographs", "texture"]

# The texture is twice as large as images, so that the crop of 224 x 224 differs from image to
# image.
_HEIGHT, _WIDTH = 448, 512
_DIRECTIONS = 6
# Mean and standard deviation of the published photographs.
_COLOUR, _CONTRAST = (0.57, 0.65, 0.69), 0.1


def read_photographs(pictures: Any) -> list[NDArray[Any]]:
    """Read pictures of frost from a folder, or from arrays; each (H, W, 3), float64 in [0, 1]."""
    if isinstance(pictures, str | Path):
        files = sorted(
            file
            for file in Path(pictures).glob("*")
            if file.suffix.lower() in (".png", ".jpg", ".jpeg")
        )
        pictures = [_read(file) for file in files]
    if not len(pictures):
        raise ValueError("expected at least one picture of frost, .png or .jpg, got none")
    return [_as_picture(array) for array in pictures]


def _read(file: Path) -> NDArray[Any]:
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def _as_picture(array: NDArray[Any]) -> NDArray[Any]:
    picture = array / 255 if array.dtype == np.uint8 else np.asarray(array, dtype=float)
    # The condition `min < 0 or max > 1` would let NaN pass.
    if picture.shape[2:] != (3,) or not (picture.min() >= 0 and picture.max() <= 1):
        raise ValueError(
            "expected pictures of frost of shape (H, W, 3), in [0, 1] or uint8; got the shape "
            f"{picture.shape} and values from {picture.min():.3g} to {picture.max():.3g}"
        )
    return picture


def crop(picture: NDArray[Any], shape: tuple[int, int], random: RandomState) -> NDArray[Any]:
    """Crop a random part (h, w, 3) of a picture (H, W, 3),
    which is enlarged first if it is too small.
    """
    factor = max(1.0, shape[0] / picture.shape[0], shape[1] / picture.shape[1])
    if factor > 1:
        size = (
            max(shape[1], round(picture.shape[1] * factor)),
            max(shape[0], round(picture.shape[0] * factor)),
        )
        pixels = Image.fromarray(np.rint(picture * 255).astype(np.uint8))
        picture = np.asarray(pixels.resize(size, Image.Resampling.BICUBIC)) / 255
    y = random.randint(0, max(1, picture.shape[0] - shape[0]))
    x = random.randint(0, max(1, picture.shape[1] - shape[1]))
    return picture[y : y + shape[0], x : x + shape[1]]


@lru_cache(maxsize=1)
def texture() -> NDArray[Any]:
    """Create our picture of frost, (448, 512, 3),
    which is always the same: needles of ice in several directions.

    In each direction, the needles are where filtered white noise changes its sign; a second,
    smoother noise determines where the direction prevails.
    """
    random = RandomState(0)
    down, right = np.fft.fftfreq(_HEIGHT)[:, None], np.fft.rfftfreq(_WIDTH)[None]

    def noise(length: float, width: float, angle: float = 0) -> NDArray[Any]:
        along, across = (
            down * np.sin(angle) + right * np.cos(angle),
            right * np.sin(angle) - down * np.cos(angle),
        )
        response = np.exp(-2 * np.pi**2 * ((length * along) ** 2 + (width * across) ** 2))
        field = np.fft.irfft2(
            np.fft.rfft2(random.normal(size=(_HEIGHT, _WIDTH))) * response,
            s=(_HEIGHT, _WIDTH),
        )
        return field / field.std()

    angles = np.arange(_DIRECTIONS) * np.pi / _DIRECTIONS
    ice = np.max([2 * noise(30, 30) - np.abs(noise(12, 1.2, angle)) for angle in angles], axis=0)
    ice = 1 + _CONTRAST / np.mean(_COLOUR) * (ice - ice.mean()) / ice.std()
    return np.clip(ice[..., None] * np.array(_COLOUR), 0, 1)
