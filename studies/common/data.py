"""Loaders for the studies: cluttered digits unless the user has data of their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from common.digits import MEAN, STD, ClutteredDigits, cluttered_digits

_DATASET_PREFIXES = ("torch/", "hfds/", "hfids/", "wds/", "tfds/")

__all__ = ["Loaders", "PixelBatches", "Probed", "digits_loaders", "image_loaders", "probed_images"]

RAND_AUGMENT = "rand-m9-mstd0.5-mmax9-inc1"
"""DeiT's, but for magnitudes above 9: at 10, images would be posterized to no bits, which Pillow refuses since 13."""

Loaders = tuple[DataLoader[Any], DataLoader[Any]]


def digits_loaders(*, size: int, batch_size: int, seed: int, limit: int | None = None, clutter: int = 6) -> Loaders:
    """Training and validation batches of cluttered digits, (B, 1, size, size)."""
    train, validation = cluttered_digits(size=size, limit=limit, seed=seed, fragments=clutter)
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(validation, 2 * batch_size)


def image_loaders(model: nn.Module, data: str, *, size: int, batch_size: int, workers: int) -> Loaders:
    """Training and validation batches of the user's images, through timm.

    Training images are augmented as DeiT's are but for mixup and cutmix: random resized crop, flip, RandAugment,
    random erasing.

    Args:
        model: whose normalisation and interpolation are used.
        data: a folder that holds ``train`` and ``val`` (or ``validation``) with one folder a class, or the name of a
            dataset as timm knows it (``hfds/...``, ``torch/...``), which timm loads from where it is kept.
        size: height and width, in pixels.
        batch_size: images per step.
        workers: loading processes.
    """
    config = timm.data.resolve_model_data_config(model)
    config["input_size"] = (config["input_size"][0], size, size)
    is_folder = Path(data).is_dir()
    if not is_folder and not data.startswith(_DATASET_PREFIXES):
        raise FileNotFoundError(f"--data: {data!r} is neither a folder nor a timm dataset name such as 'torch/cifar10'")
    name, root = ("", data) if is_folder else (data, None)
    augmentation = {"auto_augment": RAND_AUGMENT, "re_prob": 0.25, "re_mode": "pixel"}
    loaders = []
    for split, training in (("train", True), ("validation", False)):
        dataset = timm.data.create_dataset(name, root=root, split=split, is_training=training)
        dataset.transform = timm.data.create_transform(
            **config, is_training=training, **(augmentation if training else {})
        )
        loaders.append(
            DataLoader(
                dataset,
                batch_size,
                shuffle=training,
                drop_last=training,
                num_workers=workers,
                pin_memory=torch.cuda.is_available(),
            )
        )
    return loaders[0], loaders[1]


@dataclass(frozen=True)
class Probed:
    """Some images of a validation set, to look at closely.

    Args:
        images: shape (B, C, H, W), as the model takes them.
        labels: shape (B,).
        numbers: which of the set.
        classes: names by label.
        masks: where the objects are, shape (B, H, W), bool, if that is known.
    """

    images: Tensor
    labels: Tensor
    numbers: list[int]
    classes: list[str]
    masks: Tensor | None = None


def probed_images(dataset: Any, count: int) -> Probed:
    """So many images of a validation set, spread evenly over it, since folders are sorted by class."""
    numbers = spread(dataset, count)
    masks = None
    if isinstance(dataset, ClutteredDigits):
        scenes = [dataset.scene(number) for number in numbers]
        images, masks = (torch.stack([scene[part] for scene in scenes]) for part in (0, 2))
        labels = dataset.labels[numbers]
        names = [str(digit) for digit in range(10)]
    else:
        pairs = [dataset[number] for number in numbers]
        images, labels = torch.stack([image for image, _ in pairs]), torch.tensor([int(label) for _, label in pairs])
        known = getattr(getattr(dataset, "reader", None), "class_to_idx", {})
        by_index = {index: name for name, index in known.items()}
        count = len(by_index) or int(labels.max()) + 1
        names = [by_index.get(label, str(label)) for label in range(count)]
    return Probed(images, labels, numbers, names, masks)


class PixelBatches:
    """Batches of images in [0, 1], as they were before normalisation, and labels; each pass gives the same.

    Args:
        model: whose normalisation the images have, unless they are digits.
        loader: of the validation set.
        count: only so many of it, spread evenly; None for all.

    Attributes:
        normalization: (mean, std), each one number a channel: what the model wants done to these pixels.
    """

    def __init__(self, model: nn.Module, loader: DataLoader[Any], count: int | None) -> None:
        dataset = loader.dataset
        self.count = len(dataset) if count is None else min(count, len(dataset))
        some = Subset(dataset, spread(dataset, self.count))
        self._loader = DataLoader(some, loader.batch_size, num_workers=loader.num_workers)
        if isinstance(dataset, ClutteredDigits):
            self.normalization: tuple[tuple[float, ...], tuple[float, ...]] = (MEAN,), (STD,)
        else:
            config = timm.data.resolve_model_data_config(model)
            self.normalization = config["mean"], config["std"]

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        mean, std = (torch.tensor(of_channels)[:, None, None] for of_channels in self.normalization)
        for images, labels in self._loader:
            yield (images * std + mean).clamp_(0, 1), labels


def spread(dataset: Any, count: int) -> list[int]:
    """The numbers of so many images, spread evenly over a dataset, since folders are sorted by class."""
    count = min(count, len(dataset))
    return [round((i + 0.5) * len(dataset) / count - 0.5) for i in range(count)]
