"""Pictures of frost: textures made here, or photographs that are given.

The published photographs are not ours to hand on. The textures stand in for them: needles of ice in crystals of random
orientation, on a slowly varying ground, with the photographs' mean colour, contrast and, roughly, spectrum.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image

__all__ = ["crop", "read_photographs", "textures"]

HEIGHT, WIDTH, CRYSTALS, ORIENTATIONS = 448, 512, 160, 12
BRIGHTNESS = (0.5, 0.59, 0.68, 0.78)  # one texture each
CONTRAST = 0.1  # standard deviation
TINT = (0.89, 1.02, 1.09)


def read_photographs(given: Any) -> list[NDArray[Any]]:
    """Pictures of frost from a folder, an array or several of these; each (H, W, 3), float64 in [0, 1].

    Raises:
        TypeError: it is none of these.
        ValueError: a folder without images, or an array of another shape or range.
    """
    if isinstance(given, str | Path):
        files = sorted(p for p in Path(given).glob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg"))
        if not files:
            raise ValueError(f"expected a folder with .png or .jpg pictures of frost, found none in {str(given)!r}")
        return [_read(file) for file in files]
    if isinstance(given, np.ndarray):
        given = [given] if given.ndim == 3 else given
    if not isinstance(given, Sequence | np.ndarray) or not all(isinstance(each, np.ndarray) for each in given):
        raise TypeError(f"expected for frost a folder, an array (H, W, 3), or several; got {type(given).__name__}")
    if not len(given):
        raise ValueError("expected at least one picture of frost, got none")
    return [_as_picture(each) for each in given]


def _read(file: Path) -> NDArray[Any]:
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB")) / 255


def _as_picture(array: NDArray[Any]) -> NDArray[Any]:
    picture = array / 255 if array.dtype == np.uint8 else array.astype(float)
    if picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
        raise ValueError(f"expected a picture of frost of shape (H, W, 3), got {array.shape}")
    if not (picture.min() >= 0 and picture.max() <= 1):  # also NaN
        raise ValueError(
            f"expected pictures of frost in [0, 1], or uint8; got {picture.min():.3g} to {picture.max():.3g}"
        )
    return picture


def crop(picture: NDArray[Any], shape: tuple[int, int], random: RandomState) -> NDArray[Any]:
    """A random part of a picture (H, W, 3), enlarged first if it is too small; (h, w, 3)."""
    factor = max(1.0, shape[0] / picture.shape[0], shape[1] / picture.shape[1])
    if factor > 1:
        size = max(shape[1], round(picture.shape[1] * factor)), max(shape[0], round(picture.shape[0] * factor))
        pixels = Image.fromarray(np.rint(picture * 255).astype(np.uint8))
        picture = np.asarray(pixels.resize(size, Image.Resampling.BICUBIC)) / 255
    y, x = (random.randint(0, max(1, whole - part)) for whole, part in zip(picture.shape, shape, strict=False))
    return picture[y : y + shape[0], x : x + shape[1]]


@lru_cache(maxsize=1)
def textures() -> tuple[NDArray[Any], ...]:
    """Our pictures of frost, always the same; each of shape (448, 512, 3), in [0, 1]."""
    needles = _needles(RandomState(len(BRIGHTNESS)))
    return tuple(_texture(number, mean, needles) for number, mean in enumerate(BRIGHTNESS))


def _texture(number: int, mean: float, needles: NDArray[Any]) -> NDArray[Any]:
    from scipy.spatial import cKDTree

    random = RandomState(number)
    places = random.uniform(size=(CRYSTALS, 2)) * (HEIGHT, WIDTH)
    pixels = np.stack(np.meshgrid(np.arange(HEIGHT), np.arange(WIDTH), indexing="ij"), -1) + 12 * _warp(random)
    distance, nearest = cKDTree(places).query(pixels, k=2)
    needles = np.roll(needles, random.randint(HEIGHT, size=2), axis=(1, 2))  # they are periodic
    orientation = random.randint(ORIENTATIONS, size=CRYSTALS)
    chosen = np.take_along_axis(needles, orientation[nearest[..., 0]][None], 0)[0]
    seams = np.exp(-(distance[..., 1] - distance[..., 0]) / 3)
    levels = random.normal(size=CRYSTALS)[nearest[..., 0]]
    ice = chosen + 0.8 * seams + 0.4 * levels + 0.6 * _warp(random)[..., 0]
    ice = mean + CONTRAST * (ice - ice.mean()) / ice.std()
    return np.clip(ice[..., None] * np.array(TINT), 0, 1)


def _warp(random: RandomState) -> NDArray[Any]:
    """Two smooth random fields of unit variance, (H, W, 2)."""
    squared = _frequencies()[0] ** 2 + _frequencies()[1] ** 2
    return np.stack([_filtered(random, np.exp(-squared * 30**2 * 2)) for _ in range(2)], -1)


def _needles(random: RandomState) -> NDArray[Any]:
    """Streaks along each of the orientations, (orientations, H, W), with sharp bright ridges."""
    streaks = []
    for angle in np.arange(ORIENTATIONS) * np.pi / ORIENTATIONS:
        down, right = _frequencies()
        along = down * np.sin(angle) + right * np.cos(angle)
        across = right * np.sin(angle) - down * np.cos(angle)
        field = _filtered(random, np.exp(-2 * np.pi**2 * ((12 * along) ** 2 + (1.2 * across) ** 2)))
        ridges = -np.abs(field)
        streaks.append((ridges - ridges.mean()) / ridges.std())
    return np.stack(streaks)


def _frequencies() -> tuple[NDArray[Any], NDArray[Any]]:
    return np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None]


def _filtered(random: RandomState, response: NDArray[Any]) -> NDArray[Any]:
    """White noise through a filter, (H, W), of unit variance."""
    field = np.fft.irfft2(np.fft.rfft2(random.normal(size=(HEIGHT, WIDTH))) * response, s=(HEIGHT, WIDTH))
    return field / field.std()
