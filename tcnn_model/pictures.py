"""Pictures of any depth and orientation as upright RGB images of eight bits."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps

__all__ = ["as_rgb", "picture_endings", "read_picture"]


@cache
def picture_endings() -> frozenset[str]:
    """Return the endings of files that Pillow reads, such as ".webp"."""
    Image.init()
    endings = set()
    for ending, kind in Image.registered_extensions().items():
        opener = Image.OPEN.get(kind, (None,))[0]
        # Of some files, such as .h5, Pillow only knows the kind, and needs a plugin for the pixels.
        is_stub = isinstance(opener, type) and issubclass(opener, ImageFile.StubImageFile)
        if opener is not None and not is_stub and kind != "MPEG":
            endings.add(ending)
    return frozenset(endings)


def read_picture(path: str | os.PathLike[str]) -> Image.Image:
    """Return the picture in a file, as :func:`as_rgb` does.

    Raises:
        OSError: The file does not exist, or is not a picture.
        ValueError: The range of its values is unknown.
    """
    # Pillow maps a file that is opened by name into memory, with height for width if a TIFF lies on
    # its side.
    with Path(path).open("rb") as file, Image.open(file) as picture:
        try:
            return as_rgb(picture)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return a picture as RGB, turned as its EXIF data say, as viewers of photographs do.

    Grey pictures of 16 bits, and of floating-point values in [0, 1], are scaled to eight bits;
    Pillow's own conversion would clip them to white or black.

    Raises:
        ValueError: The range of the values is unknown.
    """
    # Pillow itself turns a TIFF when it loads the pixels, and its orientation is then gone.
    picture.load()
    rgb = _eight_bits(picture)
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data raise many types, and viewers ignore them
        return rgb
    if orientation == 1:
        return rgb
    rgb.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(rgb)


def _eight_bits(picture: Image.Image) -> Image.Image:
    mode = picture.mode
    # Pillow opens some files of 16 bits as integers of 32.
    is_short = mode == "I" and picture.format in ("PNG", "PPM")
    if mode.startswith("I;16") or is_short:
        # A TIFF may have 12 bits.
        tags: Any = getattr(picture, "tag_v2", {})
        bits = tags.get(258, (16,))[0]
        return _grey(np.asarray(picture) / (2**bits - 1))
    if mode == "F":
        values = np.asarray(picture)
        low, high = values.min(), values.max()
        if not (low >= 0 and high <= 1):  # also if one is NaN
            raise ValueError(
                f"expected floating-point values in [0, 1], got {low:g} to {high:g}: which value "
                "is white is unknown"
            )
        return _grey(values)
    if mode == "I":
        raise ValueError(
            "expected 8 or 16 bits a value, got integers of 32 bits: which value is white is "
            "unknown"
        )
    return picture.convert("RGB")


def _grey(values: NDArray[Any]) -> Image.Image:
    """Return an RGB image of grey values in [0, 1]."""
    return Image.fromarray(np.rint(values * 255).astype(np.uint8)).convert("RGB")
