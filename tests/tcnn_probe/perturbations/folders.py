"""Published test sets in small: folders of tiny images."""

from pathlib import Path

import numpy as np
from PIL import Image

# Class indices of ImageNet-1k, by their WordNet ids.
GOLDFISH, SHARK, HAMMERHEAD, STINGRAY = "n01443537", "n01484850", "n01494475", "n01498041"
INDEX = {GOLDFISH: 1, SHARK: 2, HAMMERHEAD: 4, STINGRAY: 6}


def picture(path: Path, level: int, size: tuple[int, int] = (17, 23)) -> Path:
    """A grey image of one level, height x width, whose format the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), level, np.uint8)).save(path)
    return path


def by_class(root: Path, classes: list[str], each: int = 2) -> Path:
    """Images of level 10, 20, ... in the order of the classes given."""
    for number, name in enumerate(classes):
        for image in range(each):
            picture(root / name / f"{image}.JPEG", 10 * (number * each + image + 1))
    return root
