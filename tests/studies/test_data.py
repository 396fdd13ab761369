"""Images of one's own, as the studies load them."""

import random
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from common.data import RAND_AUGMENT, image_loaders
from common.folder import open_folder


def test_no_random_augmentation_fails() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (timm's)
    image, augment = (
        Image.fromarray(np.arange(7 * 5 * 3, dtype=np.uint8).reshape(7, 5, 3)),
        rand_augment_transform(RAND_AUGMENT, {}),
    )
    for _ in range(700):
        assert augment(image).size == (5, 7)


def test_a_folder_of_ones_own_is_loaded_by_workers(image_folder: Path) -> None:
    """The validation images are those that the main process loads; training images are shuffled and augmented."""
    model = timm.create_model("test_resnet", num_classes=2)
    folders = open_folder(str(image_folder), None)
    options = {"size": 32, "batch_size": 3}
    (train, by_workers), (_, alone) = (
        image_loaders(model, folders, **options, workers=count) for count in (2, 0)
    )
    batches = [list(loader) for loader in (by_workers, alone)]
    for (images, labels), (expected, classes) in zip(*batches, strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(labels, classes)
    assert torch.cat([labels for _, labels in batches[0]]).tolist() == [0] * 4 + [1] * 4
    shapes = [(tuple(images.shape), len(labels)) for images, labels in train]
    assert shapes == [((3, 3, 32, 32), 3)] * 2  # of eight images; the rest is dropped
