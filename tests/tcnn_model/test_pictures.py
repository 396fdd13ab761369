"""Pictures of every depth and orientation become the upright RGB image
of eight bits that a viewer shows.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from tcnn_model.pictures import as_rgb, picture_endings, read_picture

# Prime sides, and 35 grey levels that are exact in 8, 12 and 16 bits: 0 and 255 among them.
LEVELS = np.rint(np.linspace(0, 255, 35)).astype(int).reshape(5, 7)


def _tiff_of_12_bits(path: Path) -> None:
    """Write an uncompressed TIFF with two values in three bytes, which Pillow cannot write."""
    rows = b""
    for row in np.rint(LEVELS / 255 * 4095).astype(int):
        bits = "".join(f"{value:012b}" for value in row)
        rows += int(bits.ljust(8 * 11, "0"), 2).to_bytes(11, "big")
    # Width, height, bits, no compression, black is zero, offset, one sample, rows of a strip,
    # bytes.
    numbers = (7, 5, 12, 1, 1, 8, 1, 5, len(rows))
    tags = (256, 257, 258, 259, 262, 273, 277, 278, 279)
    entries = b"".join(
        struct.pack("<HHII", tag, 4, 1, number) for tag, number in zip(tags, numbers, strict=True)
    )
    head = struct.pack("<2sHI", b"II", 42, 8 + len(rows))
    path.write_bytes(head + rows + struct.pack("<H", 9) + entries + bytes(4))


def _write(path: Path) -> None:
    shares = LEVELS / 255
    if path.stem == "12":
        _tiff_of_12_bits(path)
    elif path.stem == "float":
        Image.fromarray(shares.astype(np.float32)).save(path)
    elif path.stem == "16":
        Image.fromarray(np.rint(shares * 65535).astype(np.uint16)).save(path)
    elif path.stem == "big":
        Image.fromarray(np.rint(shares * 65535).astype(">u2")).save(path)
    else:
        Image.fromarray(LEVELS.astype(np.uint8)).save(path)


@pytest.mark.parametrize(
    "name",
    [
        "8.png",
        "8.bmp",
        "16.png",
        "16.tif",
        "16.pgm",
        "16.jp2",
        "big.tif",
        "12.tif",
        "float.tif",
        "float.pfm",
    ],
)
def test_every_depth_is_scaled_to_eight_bits(name: str, tmp_path: Path) -> None:
    _write(tmp_path / name)
    picture = read_picture(tmp_path / name)
    assert picture.mode == "RGB"
    # Each value is rounded once to the depth and once to eight bits, and 257 and 4095 / 255 levels
    # are one of these.
    np.testing.assert_array_equal(np.asarray(picture), LEVELS[..., None].repeat(3, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.float32([[0, 1.5]]), "got 0 to 1.5"),
        (np.float32([[-0.1, 1]]), "got -0.1 to 1"),
        (np.float32([[0, np.nan]]), "got nan to nan"),
        (np.int32([[0, 9]]), "integers of 32 bits"),
    ],
)
def test_unknown_ranges_are_refused(values: Any, message: str, tmp_path: Path) -> None:
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=rf"a\.tif: expected .*{message}"):
        read_picture(tmp_path / "a.tif")


@pytest.mark.parametrize(
    ("depth", "ending"),
    [
        *((np.uint8, ending) for ending in ("jpg", "png", "tif", "webp")),
        *((np.uint16, ending) for ending in ("png", "tif")),
    ],
)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_once(
    orientation: int, depth: Any, ending: str, tmp_path: Path
) -> None:
    """The orientation says which side of the stored picture is the top, and which the left."""
    stored = np.zeros((48, 32), depth)
    stored[:16, :16] = np.iinfo(depth).max
    stored[16:32, :16] = np.iinfo(depth).max // 2
    flips = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.T,
        6: stored.T[:, ::-1],
        7: stored.T[::-1, ::-1],
        8: stored.T[::-1],
    }
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / f"a.{ending}"
    Image.fromarray(stored).save(path, exif=exif)
    picture = read_picture(path)
    expected = np.rint(flips[orientation] / np.iinfo(depth).max * 255)
    # Compression changes edges by a few levels.
    np.testing.assert_allclose(np.asarray(picture)[..., 0], expected, atol=24)
    np.testing.assert_array_equal(np.asarray(as_rgb(picture)), np.asarray(picture))


def test_damaged_exif_is_ignored() -> None:
    picture = Image.new("RGB", (5, 7), "red")
    picture.info["exif"] = b"Exif\0\0nonsense"
    assert as_rgb(picture).size == (5, 7)


def test_endings_are_those_that_pillow_reads() -> None:
    assert {".png", ".jpg", ".webp", ".tif", ".bmp", ".gif"} < picture_endings()
    # Pillow writes PDF, and knows HDF5 and MPEG by name only.
    assert not {".pdf", ".h5", ".mpg"} & picture_endings()
