"""Batches of a run, which depend neither on the process
or worker that loads them nor on where a run is resumed.
"""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from tcnn_model.training.config import GRAFIT, Config
from tcnn_model.training.distributed import Processes
from tcnn_model.training.seeding import own_randomness, seed_of
from tcnn_model.training.sources import Source

__all__ = ["Images", "create_transforms"]

STAND_INS = 20
"""Number of images that are tried in place of an unreadable one,
as in timm: longer series point to a broken source.
"""

Key = tuple[int, int, int]  # epoch, position in the epoch, number of the image
Transform = Callable[[Image.Image], Tensor]


def create_transforms(config: Config, model_data: dict[str, Any]) -> tuple[Transform, Transform]:
    """Create timm's transforms for training and validation.

    The "simple" crop is DeiT III's (thesis, Sec. 6.2.2), which timm lacks: the shorter side is
    resized to the image size, then a square is cut out of it with 4 pixels of reflected border.

    Args:
        config: Settings of the run.
        model_data: Data configuration of the model from ``resolve_model_data_config``, with the
            run's image size.

    Raises:
        ValueError: timm knows no such policy of augmentation.
    """
    from timm.data import create_transform

    shared = {name: model_data[name] for name in ("input_size", "mean", "std", "interpolation")}
    try:
        train = create_transform(
            **shared,
            is_training=True,
            hflip=config.hflip,
            auto_augment=config.auto_augment,
            color_jitter=config.color_jitter,
            re_prob=config.random_erasing,
            re_mode="pixel",  # DeiT's erased rectangles are noise, not grey
        )
    except AssertionError as error:  # timm checks policies with assert
        raise ValueError(f"auto_augment: {error}") from error
    if config.crop == "simple":
        size = shared["input_size"][-1]
        resize = transforms.Resize(size, transforms.InterpolationMode(shared["interpolation"]))
        # timm's first transform is the random resized crop, which these two replace.
        train.transforms[:1] = [
            resize,
            transforms.RandomCrop(size, padding=4, padding_mode="reflect"),
        ]
    validate = create_transform(
        **shared, is_training=False, crop_pct=config.crop_pct or model_data["crop_pct"]
    )
    return train, validate


@dataclass(frozen=True)
class _Unreadable:
    name: str
    reason: str


@dataclass(frozen=True)
class _Sample:
    """An image with its label, or with its label and number,
    and the unreadable images that it stands in for.
    """

    image: Tensor | None
    label: int | tuple[int, int]
    unreadable: list[_Unreadable]


class _Seeded(Dataset[_Sample]):
    """Images by key. The augmentation of each image is drawn
    from generators that are seeded by its key.

    In training the next image stands in for one that cannot be read or transformed, so that batches
    keep their size: processes stay in step, and a resumed run finds its position by counting steps.
    In validation such an image is left out.

    Args:
        source: Images by number.
        transform: Function from an image to a tensor.
        seed: Seed of the run.
        training: Whether another image stands in for one that cannot be read.
        numbered: Whether each label comes with the number of its image, as Grafit needs.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        seed: int,
        *,
        training: bool,
        numbered: bool,
    ) -> None:
        self.source = source
        self.transform = transform
        self.seed = seed
        self.training = training
        self.numbered = numbered

    def __getitem__(self, key: Key) -> _Sample:
        epoch, place, index = key
        unreadable = []
        for offset in range(1 + STAND_INS if self.training else 1):
            number = (index + offset) % len(self.source)
            try:
                image, label = self.source.read(number)
                with own_randomness(seed_of(self.seed, epoch, place)):
                    tensor = self.transform(image)
            # Decoders raise many types of errors for damaged files, such as AttributeError; the
            # transform of a huge image may raise MemoryError.
            except Exception as error:
                unreadable.append(
                    _Unreadable(self.source.name(number), f"{type(error).__name__}: {error}")
                )
                continue
            return _Sample(tensor, (label, number) if self.numbered else label, unreadable)
        return _Sample(None, -1, unreadable)


def _ignore_ctrl_c(_: int) -> None:
    # A terminal sends SIGINT to all processes; a worker that dies of it would end the run before
    # its checkpoint.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collate(samples: Sequence[_Sample]) -> tuple[Tensor, Tensor, list[_Unreadable]]:
    readable = [(sample.image, sample.label) for sample in samples if sample.image is not None]
    images = torch.stack([image for image, _ in readable]) if readable else torch.empty(0)
    labels = torch.tensor([label for _, label in readable], dtype=torch.long)
    return images, labels, [image for sample in samples for image in sample.unreadable]


@dataclass(frozen=True)
class _Counted:
    """Iterator over batches with a length, which progress bars show."""

    batches: Iterator[tuple[Tensor, Tensor]]
    count: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches

    def __len__(self) -> int:
        return self.count


@dataclass
class Images:
    """The batches of a training on several processes.

    A global batch holds the same images for any number n of processes: process r takes images r, r
    + n, r + 2n, ... of it. With repeated augmentation (thesis, Table 3.9, after Hoffer et al.) an
    epoch shows only a part of the images, but each several times in the same global batch, with
    different augmentations.

    Args:
        train, validate: Images by number.
        transforms: Transforms for training and validation.
        config: Settings of the run.
        processes: The processes that train together.
    """

    train: Source
    validate: Source
    transforms: tuple[Transform, Transform]
    config: Config
    processes: Processes

    def __post_init__(self) -> None:
        config = self.config
        count = self.processes.count
        self._sizes = [
            min(len(source), config.limit or len(source)) for source in (self.train, self.validate)
        ]
        self._batch = config.batch_size * count
        together = self._batch * config.accumulate
        if self._sizes[0] < together:
            raise ValueError(
                f"a step of {together} images ({config.batch_size} x {config.accumulate} "
                f"accumulated x {count} processes) is more than the {self._sizes[0]} to train on: "
                f"give a batch_size of at most {self._sizes[0] // (config.accumulate * count)}"
            )
        # Incomplete steps are dropped: a smaller last batch would have a noisier gradient at the
        # same learning rate.
        self.per_epoch = self._sizes[0] // together * config.accumulate
        self.unreadable: dict[str, str] = {}
        self._epoch = 0

    def begin(self, epoch: int) -> None:
        """Use the order of images of this epoch from now on."""
        self._epoch = epoch

    def order(self, epoch: int) -> Tensor:
        """Return the numbers of the training images in the order of an epoch."""
        generator = torch.Generator().manual_seed(seed_of(self.config.seed, epoch))
        numbers = _spread(len(self.train), self._sizes[0])
        shuffled = numbers[torch.randperm(len(numbers), generator=generator)]
        return shuffled.repeat_interleave(self.config.repeated_augmentation)[: len(shuffled)]

    def training(self, first: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Return this process's batches of the epoch, from batch number ``first`` on."""
        order = self.order(self._epoch)
        keys: list[list[Key]] = []
        for batch in range(first, self.per_epoch):
            start = batch * self._batch
            # Processes take turns, so that the images of a global batch do not depend on the number
            # of processes.
            places = range(start + self.processes.rank, start + self._batch, self.processes.count)
            keys.append([(self._epoch, place, int(order[place])) for place in places])
        return _Counted(self._load(self.train, self.transforms[0], keys), len(keys))

    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the validation batches of this process;
        every image goes to exactly one process.
        """
        numbers = _spread(len(self.validate), self._sizes[1])[
            self.processes.rank :: self.processes.count
        ].tolist()
        # The epoch and the position in a key only seed the augmentation: validation is the same in
        # every epoch.
        keys = [(0, number, number) for number in numbers]
        size = self.config.batch_size
        batches = [keys[start : start + size] for start in range(0, len(keys), size)]
        return _Counted(self._load(self.validate, self.transforms[1], batches), len(batches))

    def _load(
        self, source: Source, transform: Transform, keys: list[list[Key]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        training = source is self.train
        numbered = training and self.config.objective == GRAFIT
        loader = DataLoader(
            _Seeded(
                source,
                transform,
                self.config.seed,
                training=training,
                numbered=numbered,
            ),
            batch_sampler=keys,
            num_workers=self.config.workers,
            collate_fn=_collate,
            pin_memory=self.processes.device.type == "cuda",
            # A DataLoader draws from its generator, by default torch's global one.
            generator=torch.Generator(),
            worker_init_fn=_ignore_ctrl_c,
        )
        for images, labels, unreadable in loader:
            self._warn(unreadable)
            if training and len(labels) < self.config.batch_size:
                raise OSError(
                    f"{STAND_INS} images in a row cannot be read, the last one "
                    f"{unreadable[-1].name}"
                )
            if len(labels):
                yield images, labels

    def _warn(self, unreadable: list[_Unreadable]) -> None:
        for image in unreadable:
            if image.name not in self.unreadable:
                self.unreadable[image.name] = image.reason
                warnings.warn(
                    f"skipped {image.name}, which cannot be read: {image.reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        allowed = self.config.max_unreadable * sum(self._sizes)
        if len(self.unreadable) > allowed:
            last, reason = next(reversed(self.unreadable.items()))
            raise OSError(
                f"{len(self.unreadable)} images cannot be read, the last one {last}: more than the "
                f"share of {self.config.max_unreadable:g} that max_unreadable allows; {reason}"
            )


def _spread(length: int, count: int) -> Tensor:
    """Return ``count`` evenly spaced numbers below ``length``:
    the first ones would all be of the first classes.
    """
    return ((torch.arange(count) + 0.5) * length / count - 0.5).round().long()
