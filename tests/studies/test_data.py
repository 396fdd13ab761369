"""A user's own images, as the studies load them."""

import random
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from common.data import RAND_AUGMENT, image_loaders
from common.folder import open_folder
from common.output import InputError
from common.small_images import load_image_set


def test_random_augmentations_do_not_fail() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (timm draws from the global generator)
    image = Image.fromarray(np.arange(7 * 5 * 3, dtype=np.uint8).reshape(7, 5, 3))
    augment = rand_augment_transform(RAND_AUGMENT, {})
    # Each call draws two of fifteen operations, so 700 images leave none out.
    for _ in range(700):
        assert augment(image).size == (5, 7)


def test_a_users_folder_is_loaded_by_workers(image_folder: Path) -> None:
    """Validation images equal those that the main process loads;
    training images are shuffled and augmented.
    """
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
    read = torch.cat([labels for _, labels in batches[0]])
    assert read.tolist() == [0] * 4 + [1] * 4
    shapes = [(tuple(images.shape), len(labels)) for images, labels in train]
    # Two batches of three of the eight images; the last two are dropped.
    assert shapes == [((3, 3, 32, 32), 3)] * 2


def test_photographs_are_augmented_as_the_papers_did(image_folder: Path) -> None:
    """Each training image comes three times, mixed in pairs,
    with soft labels; validation images are unchanged.
    """
    model = timm.create_model("test_resnet", num_classes=2)
    folders = open_folder(str(image_folder), None)
    folders[0].samples = folders[0].samples[:7]
    options = {"size": 32, "batch_size": 7, "workers": 0, "augment": "papers"}
    train, validation = image_loaders(model, folders, **options)
    order = list(train.sampler)
    assert len(order) == len(train.sampler) == 7
    assert order[0] == order[1] == order[2] != order[3] == order[4] == order[5]
    ((images, shares),) = train
    assert images.shape == (6, 3, 32, 32)
    torch.testing.assert_close(shares.sum(1), torch.ones(6))
    # Label smoothing by 0.1 leaves at least 0.05 for each of two classes, whatever the mixture.
    assert float(shares.min()) >= 0.05 - 1e-6
    assert all(labels.ndim == 1 for _, labels in validation)
    with pytest.raises(InputError, match="mixes images in pairs: got batches of 1"):
        image_loaders(model, folders, **options | {"batch_size": 1})


def test_a_limit_holds_for_digits_too(tmp_path: Path) -> None:
    """A quarter of them is for validation, as of photographs."""
    data = load_image_set("digits", 43, tmp_path)
    assert [len(data.images), len(data.labels)] == [33, 33]
    assert [len(data.validation), len(data.validation_labels)] == [10, 10]
