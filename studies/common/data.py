"""Loaders of the studies: cluttered digits, unless the user has data of their own."""

import copy
import csv
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import ImageNetInfo, Mixup
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, Subset, default_collate

from common.digits import MEAN, STD, ClutteredDigits, cluttered_digits
from common.folder import ClassFolders, imagenet_rows, open_folder, spread
from common.models import check_input, own_model
from common.output import InputError

__all__ = [
    "Loaders",
    "PixelBatches",
    "Probed",
    "at_resolution",
    "boxed_images",
    "chance",
    "digits_loaders",
    "image_loaders",
    "labels_of",
    "loaders_for",
    "own_model_and_data",
    "probed_images",
    "with_shuffled_labels",
]

RAND_AUGMENT = "rand-m9-mstd0.5-mmax9-inc1"
"""DeiT's, without magnitudes above 9: at 10,
images would be posterized to zero bits, which Pillow refuses since 13.
"""

VIEWS = 3
"""Number of views of an image in an epoch, as in DeiT."""

Loaders = tuple[DataLoader[Any], DataLoader[Any]]


def digits_loaders(
    *, size: int, batch_size: int, seed: int, limit: int | None = None, clutter: int = 6
) -> Loaders:
    """Return training and validation batches of cluttered digits, (B, 1, size, size)."""
    train, validation = cluttered_digits(size=size, limit=limit, seed=seed, fragments=clutter)
    # Otherwise drop_last would leave no batch of a small training set.
    batch_size = min(batch_size, len(train))
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(
        validation, 2 * batch_size
    )


def loaders_for(args: Namespace) -> Loaders:
    """Return the batches of digits for a command line."""
    sizes = {"size": args.img_size, "batch_size": args.batch_size, "clutter": args.clutter}
    return digits_loaders(**sizes, seed=args.seed, limit=args.limit)


def with_shuffled_labels(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a loader of digits with permuted labels,
    so that nothing in an image tells its label.
    """
    dataset = copy.copy(loader.dataset)
    generator = torch.Generator().manual_seed(seed)
    dataset.labels = dataset.labels[torch.randperm(len(dataset), generator=generator)]
    return DataLoader(dataset, loader.batch_size, shuffle=True, drop_last=True)


def image_loaders(
    model: nn.Module,
    folders: tuple[ClassFolders, ClassFolders],
    *,
    size: int,
    batch_size: int,
    workers: int,
    augment: str = "light",
) -> Loaders:
    """Return training and validation batches of the user's images, as timm prepares them.

    Training images are augmented as in DeiT, whose recipe the T-CNN paper follows: random resized
    crop, flip, RandAugment and random erasing; if ``augment`` is "papers", also repeated
    augmentation, mixup and CutMix. The labels of a batch are then class probabilities (B, K),
    smoothed by 0.1. Mixed images take longer to learn from, so that they suit trainings as long as
    the papers'.

    Args:
        model: Model whose normalisation and interpolation are used.
        folders: Images for training and for validation.
        size: Height and width, in pixels.
        batch_size: Images per step; fewer if there are fewer images to train on.
        workers: Number of loading processes.
        augment: "papers" or "light".

    Raises:
        InputError: Batches of a single image cannot be mixed.
    """
    config = timm.data.resolve_model_data_config(model)
    config["input_size"] = (config["input_size"][0], size, size)
    augmentation = {"auto_augment": RAND_AUGMENT, "re_prob": 0.25, "re_mode": "pixel"}
    if len(folders[0]) < batch_size:
        batch_size = len(folders[0])
        print(f"batches of {batch_size} images: there are no more to train on")
    mixes = augment == "papers"
    if mixes and batch_size % 2:
        batch_size -= 1  # images are mixed in pairs
        if not batch_size:
            raise InputError("--augment papers mixes images in pairs: got batches of 1")
    loaders = []
    for dataset, training in zip(folders, (True, False), strict=True):
        dataset.transform = timm.data.create_transform(
            **config, is_training=training, **(augmentation if training else {})
        )
        loaders.append(
            DataLoader(
                dataset,
                batch_size,
                shuffle=training and not mixes,
                sampler=RepeatedViews(len(dataset)) if training and mixes else None,
                collate_fn=Mixing(model) if training and mixes else None,
                drop_last=training,
                num_workers=workers,
                # Pinned memory speeds up copies to a GPU, and warns without one.
                pin_memory=torch.cuda.is_available(),
            )
        )
    return loaders[0], loaders[1]


class RepeatedViews(Sampler[int]):
    """Indices of the images of an epoch: a random third
    of them in random order, each three times in a row.

    timm's ``RepeatAugSampler`` draws the same order in each epoch unless the training loop sets its
    epoch.

    Args:
        count: Number of training images, and of indices in an epoch.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        # The order is drawn from torch's global generator, which finetune seeds for each epoch.
        order = torch.randperm(self._count).repeat_interleave(VIEWS)
        return iter(order[: self._count].tolist())


class Mixing:
    """Collate function that mixes the images of a batch
    by timm's mixup or CutMix, with DeiT's strengths.

    Args:
        model: Model, with the number of classes of the targets.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mix = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=model.num_classes)

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) and class probabilities (B, K)."""
        images, labels = default_collate(samples)
        return self._mix(images, labels)


def at_resolution(
    model: nn.Module, loader: DataLoader[Any], size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the validation images at another resolution, with their labels.

    Photographs are read again, and cropped and resized as timm does for this size.
    """
    if isinstance(loader.dataset, ClutteredDigits):
        # Scenes are drawn at one size only, so they are resized.
        shape = (size, size)
        for images, labels in loader:
            yield (
                F.interpolate(images, size=shape, mode="bilinear", antialias=True),
                labels,
            )
        return
    config = timm.data.resolve_model_data_config(model)
    config["input_size"] = (config["input_size"][0], size, size)
    dataset = copy.copy(loader.dataset)
    dataset.transform = timm.data.create_transform(**config)
    yield from DataLoader(dataset, loader.batch_size, num_workers=loader.num_workers)


def own_model_and_data(args: Namespace, size: int | None) -> tuple[nn.Module, Loaders]:
    """Return the user's model and images; images have the model's own size if ``size`` is None.

    Raises:
        InputError, RuntimeError, OSError: The model or the images cannot be used, or not together.
    """
    folders = open_folder(args.data, args.limit)
    classes = folders[0].classes
    model = own_model(args, classes)
    # A transformer takes images of its own size only.
    size = size or timm.data.resolve_model_data_config(model)["input_size"][-1]
    loaders = image_loaders(
        model,
        folders,
        size=size,
        batch_size=args.batch_size,
        workers=args.workers,
        # Studies that train little or nothing do not have --augment.
        augment=getattr(args, "augment", "light"),
    )
    # A model that does not take the images is refused now, and not after the first epoch.
    check_input(model, folders[1][0][0], args.num_classes or len(classes))
    return model, loaders


def labels_of(dataset: ClutteredDigits | ClassFolders) -> np.ndarray:
    """Return the label of each image, shape (N,)."""
    return np.asarray(dataset.labels if isinstance(dataset, ClutteredDigits) else dataset.targets)


def chance(dataset: ClutteredDigits | ClassFolders) -> float:
    """Return the accuracy of always naming the most frequent class."""
    labels = labels_of(dataset)
    return float(np.bincount(labels).max() / len(labels))


@dataclass(frozen=True)
class Probed:
    """Images to look at closely.

    Args:
        images: Images of shape (B, C, H, W), as the model takes them.
        labels: Classes, shape (B,).
        numbers: Indices in the validation set; empty if the images are not from it.
        classes: Names of the classes by label.
        masks: Masks of the objects, shape (B, H, W), bool, if they are known.
    """

    images: Tensor
    labels: Tensor
    numbers: list[int]
    classes: list[str]
    masks: Tensor | None = None


def probed_images(dataset: Any, count: int) -> Probed:
    """Return ``count`` images of a validation set,
    spread evenly over it, since folders are sorted by class.
    """
    numbers = spread(len(dataset), count)
    masks = None
    if isinstance(dataset, ClutteredDigits):
        # Their masks are known, since the scenes are made here.
        scenes = [dataset.scene(number) for number in numbers]
        images, masks = (torch.stack([scene[part] for scene in scenes]) for part in (0, 2))
        labels = dataset.labels[numbers]
        names = [str(digit) for digit in range(10)]
    else:
        pairs = [dataset[number] for number in numbers]
        images = torch.stack([image for image, _ in pairs])
        labels = torch.tensor([label for _, label in pairs])
        names = dataset.classes
        if imagenet_rows(names):  # WordNet ids, which few people can read
            names = [
                ImageNetInfo().label_name_to_description(name).partition(",")[0] for name in names
            ]
    return Probed(images, labels, numbers, names, masks)


@torch.no_grad()
def boxed_images(file: str, validation: ClassFolders, model: nn.Module) -> Probed:
    """Return photographs with a box around the object in each;
    their labels are the predictions of the model.

    Args:
        file: Comma-separated table without a header: file name, and left, top, right and bottom of
            the box in pixels. Names are relative to the table's folder.
        validation: Images whose transform and classes are used.
        model: Model that predicts the labels.

    Raises:
        InputError: The table or an image does not exist or cannot be read.
    """
    images, masks = [], []
    try:
        for name, *box in csv.reader(Path(file).read_text().splitlines()):
            left, top, right, bottom = map(float, box)
            photograph = validation.loader(str(Path(file).parent / name))
            # The box is drawn as an image, so that it is resized and cropped exactly as the
            # photograph is.
            mask = Image.new("RGB", photograph.size)
            mask.paste("white", (round(left), round(top), round(right), round(bottom)))
            images.append(validation.transform(photograph))
            masks.append(validation.transform(mask)[0])
        if not images:
            raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        raise InputError(
            f"--boxes: expected lines of file,left,top,right,bottom in {file!r}: {error}"
        ) from None
    # Masks are normalised by the transform; the edge of a box is halfway between normalised black
    # and white.
    black, white = (
        validation.transform(Image.new("RGB", photograph.size, color))[0]
        for color in ("black", "white")
    )
    inside = torch.stack(masks) > (black + white) / 2
    batch = torch.stack(images)
    # The model is copied, so that eval() does not change the mode of the study's model.
    labels = copy.deepcopy(model).eval()(batch).argmax(1)
    return replace(
        probed_images(validation, 1),
        images=batch,
        labels=labels,
        numbers=[],
        masks=inside,
    )


class PixelBatches:
    """Batches of images in [0, 1], before normalisation,
    with their labels; every pass yields the same batches.

    Args:
        model: Model whose normalisation the images have, unless they are digits.
        loader: Loader of the validation set.
        count: Number of images, spread evenly; None for all.

    Attributes:
        normalization: Mean and standard deviation of each channel, which the model expects of these
            pixels.
    """

    def __init__(self, model: nn.Module, loader: DataLoader[Any], count: int | None) -> None:
        dataset = loader.dataset
        self.count = len(dataset) if count is None else min(count, len(dataset))
        subset = Subset(dataset, spread(len(dataset), self.count))
        self._loader = DataLoader(subset, loader.batch_size, num_workers=loader.num_workers)
        if isinstance(dataset, ClutteredDigits):
            self.normalization: tuple[tuple[float, ...], tuple[float, ...]] = (
                (MEAN,),
                (STD,),
            )
        else:
            config = timm.data.resolve_model_data_config(model)
            self.normalization = config["mean"], config["std"]

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        mean, std = (torch.tensor(of_channels)[:, None, None] for of_channels in self.normalization)
        for images, labels in self._loader:
            # Rounding may take pixels slightly out of [0, 1], which the corruptions do not accept.
            yield (images * std + mean).clamp_(0, 1), labels
