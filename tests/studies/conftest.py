"""A user's own folder of images, as the studies read it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of four noise images each, with unequal sides, in train/ and val/."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "images" / split / label).mkdir(parents=True)
            for n in range(4):
                # The sides are primes, so that resizing and cropping have work to do.
                pixels = rng.integers(0, 255, (71, 83, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / label / f"{n}.png")
    return tmp_path / "images"
