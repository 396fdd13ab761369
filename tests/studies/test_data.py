"""Images of one's own, as the studies load them."""

import random

import numpy as np
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from common.data import RAND_AUGMENT


def test_no_random_augmentation_fails() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (timm's)
    image, augment = (
        Image.fromarray(np.arange(7 * 5 * 3, dtype=np.uint8).reshape(7, 5, 3)),
        rand_augment_transform(RAND_AUGMENT, {}),
    )
    for _ in range(700):
        assert augment(image).size == (5, 7)
