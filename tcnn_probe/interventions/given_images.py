"""Something taken over given images, for an ablation: the images as batches, and whoever is taking something."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from tcnn_model import GPSA
from tcnn_probe.images import as_images, as_pictures

__all__ = ["GivenImages", "TakenOverImages", "as_batches"]

GivenImages = Tensor | Iterable[Any]


class TakenOverImages:
    """Something taken by forwards in the thread that makes this, until ``finished``."""

    def __init__(self) -> None:
        self.finished, self.images, self.total = False, 0, 0
        """``images`` is how many are running, and ``total`` how many did, these included."""
        self.size: torch.Size | None = None
        """The size of one image, once finished."""
        self._thread = threading.get_ident()

    @property
    def taking(self) -> bool:
        """Whether the forward that runs here is one of those that something is taken over."""
        return not self.finished and self._thread == threading.get_ident()

    def begin(self, images: int) -> None:
        """A forward of so many images begins."""
        self.images, self.total = images, self.total + images

    def rows_by_image(self, rows: Tensor, layer: str) -> Tensor:
        """(images * windows, ...) as (images, windows, ...)."""
        if rows.shape[0] % self.images:
            raise ValueError(
                f"{layer!r} gives {rows.shape[0]} rows for {self.images} images: which are one image's is not known"
            )
        return rows.unflatten(0, (self.images, -1))

    def finish(self, size: torch.Size | None) -> None:
        """Nothing more comes; ``size`` is that of one image."""
        self.finished, self.size = True, size

    def check(self, inputs: Iterable[Any]) -> None:
        """Refuse images of another size, once finished."""
        size = next((x.shape[1:] for x in inputs if isinstance(x, Tensor)), None)
        if self.finished and size is not None and self.size not in (None, size):
            raise ValueError(f"expected images of the size of images=, {tuple(self.size)}; got {tuple(size)}")


def as_batches(images: GivenImages, model: nn.Module) -> Iterator[Tensor]:
    """Batches as the model takes them, made one at a time; TypeError or ValueError if one is none of images."""
    if isinstance(images, Dataset) and not isinstance(images, IterableDataset):
        raise TypeError(f"expected batches of images, got single ones: {type(images).__name__}; give its DataLoader")
    if isinstance(images, Mapping) or (not isinstance(images, Tensor) and as_pictures(images) is not None):
        images = as_images(images, model)
    like, size = next(model.parameters(), None), None
    for given in [images] if isinstance(images, Tensor) else images:
        batch = _as_batch(given, model)
        size = batch.shape[1:] if size is None else size
        if size != batch.shape[1:]:
            raise ValueError(f"expected images of one size, got {tuple(size)} and {tuple(batch.shape[1:])}")
        yield batch if like is None else batch.to(like.device, like.dtype)
    if size is None:
        raise ValueError("expected images, got none")


def _as_batch(given: Any, model: nn.Module) -> Tensor:
    """Images, or the first of a loader's pair; a batch of one, of one image for a model of feature maps."""
    batch = given[0] if isinstance(given, (tuple, list)) and given else given
    if not isinstance(batch, Tensor) or not batch.numel():
        got = f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(f"expected batches of images as the model takes them, got {got}")
    if batch.ndim < 2 or not batch.is_floating_point():
        raise TypeError(
            f"expected batches of images, floating point; of a pair (images, labels) give the first: got "
            f"{batch.dtype} of shape {tuple(batch.shape)}"
        )
    alone = batch.ndim == 3 and any(isinstance(module, nn.Conv2d | GPSA) for module in model.modules())
    return batch[None] if alone else batch
