"""Statistics over given images, by which ablations replace attention
or the terms that heads add.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from tcnn_model import GPSA
from tcnn_model.precision import at_least_float32
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.reconstruction import ReconstructionError
from tcnn_probe.heads.anatomy import Convolution, nearest_convolution
from tcnn_probe.hooks.modes import without_gradients
from tcnn_probe.images import as_images, as_pictures
from tcnn_probe.interventions.token_places import TokenPlaces
from tcnn_probe.models import for_model

__all__ = [
    "AttentionReference",
    "ConvolutionReference",
    "GivenImages",
    "ReferenceStatistics",
    "TermReference",
    "as_batches",
    "check_reconstruction",
    "fingerprints",
]

GivenImages = Tensor | Iterable[Any]

# An attention differs from its convolution by about the root of the tolerance, in nat.
_ROUNDS, _TOLERANCE = 100, 1e-13


class ReferenceStatistics:
    """Statistics of forwards in the thread that creates the object, until :meth:`finish`.

    Attributes:
        is_finished: Whether all images have passed.
        images: Number of images in the running batch.
        total: Number of images so far, including the running batch.
        size: Size of one image, once finished.
        fingerprints: Fingerprint of each image, in the order in which they passed.
    """

    def __init__(self) -> None:
        self.is_finished = False
        self.images = 0
        self.total = 0
        self.size: torch.Size | None = None
        self.fingerprints: list[bytes] = []
        # Other threads may run the model at the same time, on other images.
        self._thread = threading.get_ident()

    @property
    def is_collecting(self) -> bool:
        """True if forwards in this thread are those of the given images."""
        return not self.is_finished and self._thread == threading.get_ident()

    def begin(self, images: int) -> None:
        """Begin a forward of a batch of images."""
        self.images = images
        self.total = self.total + images

    def finish(self, size: torch.Size | None) -> None:
        """End the collection; ``size`` is the size of one image."""
        self.is_finished = True
        self.size = size

    def check(self, inputs: Iterable[Any]) -> None:
        """Raise for images of another size than the given images."""
        size = next((x.shape[1:] for x in inputs if isinstance(x, Tensor)), None)
        if self.is_finished and size is not None and self.size not in (None, size):
            raise ValueError(
                f"expected images of the size of images=, {tuple(self.size)}; got {tuple(size)}"
            )

    def overlap(self, images: Tensor) -> str:
        """Describe the bias by evaluated images
        that are among the given images; "" if there is none.
        """
        return ""

    def _by_image(self, rows: Tensor) -> Tensor:
        """Return (images * windows, ...) as (images, windows, ...)."""
        return rows.unflatten(0, (self.images, -1))


class AttentionReference(ReferenceStatistics):
    """Attention of some heads of a layer: its mean over the given images,
    or the attention of each image.

    Args:
        shuffled: Whether the attention of each image is kept, instead of the mean.
        seed: Seed of the order in which images get this attention: a random cycle, in which no
            image keeps its own; None for the order of the given images.
        whole: Whether the attention of gated layers is all of it, instead of its content part.
    """

    def __init__(self, *, shuffled: bool, seed: int | None = None, whole: bool = False) -> None:
        super().__init__()
        self._shuffled = shuffled
        self._seed = seed
        self.whole = whole
        # Keys are indices of the attention in the layer's call. Attention has the shape (images, or
        # 1 for the sum or mean, windows, heads, N_query, N_key).
        self._heads: dict[int, Sequence[int]] = {}
        self._attention: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def add(self, number: int, heads: Sequence[int], weights: Tensor, layer: str) -> None:
        """Add the attention of the current batch, (images * windows, all heads, N_query, N_key)."""
        attention = self._by_image(
            # In a sum in half precision, the last images would be lost by rounding.
            weights[:, list(heads)].to(at_least_float32(weights.dtype))
        )
        if number in self._attention:
            attention = torch.cat([self._attention[number], attention])
        self._attention[number] = attention if self._shuffled else attention.sum(0, keepdim=True)
        self._heads[number], self._counts[number] = (
            heads,
            self._counts.get(number, 0) + self.images,
        )
        # If more attentions than images have passed, the layer is shared by several blocks or
        # called in a loop.
        if self._counts[number] > self.total:
            raise ValueError(
                f"{layer!r} is called several times for the same images: it is not known which "
                "attention to exchange for which"
            )

    def finish(self, size: torch.Size | None) -> None:
        """End the collection, and turn sums into means unless the attention
        of each image is kept.
        """
        super().finish(size)
        if not self._shuffled:
            self._attention = {
                number: total / self._counts[number] for number, total in self._attention.items()
            }

    def overlap(self, images: Tensor) -> str:
        """Describe the bias by evaluated images
        that are among the given images; "" if there is none.
        """
        prints = fingerprints(images)
        if not self._shuffled:
            reference_prints = set(self.fingerprints)
            count = sum(fingerprint in reference_prints for fingerprint in prints)
            return (
                f"{count} of {len(prints)} images of a forward are among images=: the mean "
                "attention that they get has a share of their own, so that too little is lost. "
                "Take images= from others, such as the training set"
                if count
                else ""
            )
        donors = self._order(len(self.fingerprints))
        count = sum(
            fingerprint == self.fingerprints[donors[place % len(donors)]]
            for place, fingerprint in enumerate(prints)
        )
        return (
            f"{count} of {len(prints)} images of a forward get their own attention: they are among "
            "images=, at the place that they are given. Take images= from others, or choose "
            "another seed="
            if count and self._seed is not None  # None asks for the given order
            else ""
        )

    @without_gradients
    def _collect(self, attention: Attention, heads: Sequence[int], layer: str) -> None:
        check_reconstruction(attention)
        weights = attention.weights().flatten(0, 1) if self.whole else attention.content()
        self.add(attention.number, heads, weights, layer)

    def attention_for(
        self, attention: Attention, heads: Sequence[int], layer: str
    ) -> Tensor | None:
        """Return the attention that replaces that of some heads,
        or collect it while the given images pass through the model.

        Returns:
            Shape (images, or 1 for the mean, windows, heads, N_query, N_key); None until it is
            collected.
        """
        if self.is_collecting:
            self._collect(attention, heads, layer)
        if not self.is_finished:
            return None
        number, rows, queries, keys = (
            attention.number,
            attention.rows,
            attention.queries,
            attention.keys if self.whole else attention.content_keys,
        )
        reference = self._attention[number]
        windows, _, *size = reference.shape[1:]
        if rows % windows or size != [queries, keys]:
            raise ValueError(
                f"expected images of the size of images=: of these {layer!r} has {windows} x "
                f"{size[0]} queries and {size[1]} keys, and now {rows} x {queries} queries in all "
                f"and {keys} keys"
            )
        places = [self._heads[number].index(head) for head in heads]
        if not self._shuffled:
            # (images or 1, windows, heads, N_query, N_key), of the heads in the order of the edit.
            return reference[:, :, places]
        donors = self._order(len(reference))[torch.arange(rows // windows) % len(reference)]
        return reference[donors.to(reference.device)][:, :, places]

    def _order(self, images: int) -> Tensor:
        """Return the image whose attention each image gets."""
        order = torch.arange(images)
        if self._seed is not None:
            cycle = torch.randperm(images, generator=torch.Generator().manual_seed(self._seed))
            # Each image of a single cycle gets its predecessor's attention, so none gets its own,
            # unless there is only one.
            order[cycle] = cycle.roll(1)
        return order


class ConvolutionReference(AttentionReference):
    """Convolutions that are nearest to the mean attention of some heads over the given images.

    Attributes:
        convolutions: Convolution inside the heads of each attention of the layer's call.
        masses: Attention at each offset, summed over queries of patches, shape (heads, offsets).
        places: Places of the tokens of each attention.
    """

    def __init__(self) -> None:
        super().__init__(shuffled=False, whole=True)
        self.convolutions: dict[int, Convolution] = {}
        self.masses: dict[int, np.ndarray] = {}
        self.places: dict[int, TokenPlaces] = {}
        self._visible: dict[int, Tensor] = {}

    def see(self, attention: Attention, places: TokenPlaces, layer: str) -> None:
        """Note the places of the tokens of the current batch, and which keys its queries see."""
        number, visible = attention.number, places.visible(attention)
        first = self._visible.setdefault(number, visible[0].cpu())
        if bool((visible != first.to(visible.device)).any()):
            raise ValueError(
                f"masks hide other keys from the queries of {layer!r} in other images, so that "
                "their mean attention is near no convolution; give images of one size without "
                "padding"
            )
        self.places[number] = places

    def finish(self, size: torch.Size | None) -> None:
        """End the collection, and fit the convolutions."""
        super().finish(size)
        for number, mean in self._attention.items():
            self._attention[number] = self._fit(number, mean[0])[None].to(mean)

    def _fit(self, number: int, mean: Tensor) -> Tensor:
        """Return convolutions, (windows, heads, N_query, N_key),
        of mean attention of this shape.
        """
        places, visible = self.places[number], self._visible[number].numpy()
        patches = places.is_patch.numpy()
        index = places.offsets[patches]
        of_patches = mean[:, :, patches].transpose(0, 1).double().cpu().numpy()
        seen = visible[:, patches]
        windows = len(seen)
        convolution = nearest_convolution(
            of_patches.reshape(len(of_patches), -1, index.shape[1]),
            np.tile(index, (windows, 1)),
            seen.reshape(-1, index.shape[1]),
            rounds=_ROUNDS,
            tolerance=_TOLERANCE,
        )
        self.convolutions[number] = convolution
        self.masses[number] = np.array(
            [np.bincount(index.ravel(), head.sum(0).ravel()) for head in of_patches]
        )
        fitted = torch.zeros(mean.shape, dtype=torch.float64)
        for window, keys in enumerate(seen):
            unscaled = convolution.kernel[:, index] * keys
            total = unscaled.sum(-1, keepdims=True)
            of_window = unscaled / np.where(total > 0, total, 1)
            fitted[window][:, patches] = torch.from_numpy(of_window)
        return fitted


class TermReference(ReferenceStatistics):
    """Means over the given images of the terms
    that single heads add to the output of their layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[Tensor, int]] = {}

    def add(self, number: int, terms: Sequence[Tensor]) -> None:
        """Add the terms of each head in one attention of the layer's call,
        (images * windows, ...) each.
        """
        sums = [self._by_image(x).sum(0, dtype=at_least_float32(x.dtype)) for x in terms]
        stacked = torch.stack(sums)
        before, count = self._sums.get(number, (torch.zeros_like(stacked), 0))
        self._sums[number] = before + stacked, count + self.images

    def add_to(self, output: Tensor, number: int, places: Sequence[int]) -> Tensor:
        """Return the output, (B * windows, ...),
        with the mean terms of heads at some positions added.
        """
        sums, count = self._sums[number]
        # Terms of heads add up, so that several heads are replaced at once.
        mean = (sums[list(places)].sum(0) / count).to(output)
        return (output.unflatten(0, (-1, len(mean))) + mean).flatten(0, 1)


def check_reconstruction(attention: Attention) -> None:
    """Raise if a rebuilt attention, which is to be replaced,
    is not the one that the layer computed.
    """
    compared = attention.discrepancy(None) if attention.gate is None else None
    if compared is None:
        return
    difference, rounding = compared
    # In this form the condition also rejects NaN.
    if not bool(difference <= rounding):
        raise ReconstructionError(
            f"attention of {type(attention.module).__name__} as rebuilt differs from the layer's "
            f"own output by {float(difference):.2g} of its largest value, so it cannot be replaced"
        )


def fingerprints(images: Tensor) -> list[bytes]:
    """Return fingerprints of images or targets (B, ...):
    their values at 4,096 places, or all if there are fewer.
    """
    values = images.detach().reshape(len(images), -1)
    # Positions are spread evenly over channels and rows, so that crops and colour changes differ,
    # too. They are many because drawings on a plain ground share most of their values.
    count = min(values.shape[1], 4096)
    places = torch.arange(count, device=values.device) * values.shape[1] // count
    return [row.numpy().tobytes() for row in values[:, places].float().cpu()]


def as_batches(images: GivenImages, model: nn.Module) -> Iterator[Tensor]:
    """Yield batches as the model takes them, one at a time.

    Raises:
        TypeError, ValueError: A batch does not hold images, or images have several sizes.
    """
    if isinstance(images, Dataset) and not isinstance(images, IterableDataset):
        raise TypeError(
            f"expected batches of images, got single ones: {type(images).__name__}; give its "
            "DataLoader"
        )
    if isinstance(images, Mapping | np.ndarray) or (
        not isinstance(images, Tensor) and as_pictures(images) is not None
    ):
        images = as_images(images, model)
    size = None
    for item in [images] if isinstance(images, Tensor) else images:
        batch = _as_batch(item, model)
        size = batch.shape[1:] if size is None else size
        if size != batch.shape[1:]:
            raise ValueError(
                f"expected images of one size, got {tuple(size)} and {tuple(batch.shape[1:])}"
            )
        yield for_model(batch, model)
    if size is None:
        raise ValueError("expected images, got none")


def _as_batch(item: Any, model: nn.Module) -> Tensor:
    """Return images, or the first item of a loader's pair;
    a single image of a convnet becomes a batch.
    """
    batch = item[0] if isinstance(item, (tuple, list)) and item else item
    if not isinstance(batch, Tensor) or not batch.numel():
        got = f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(f"expected batches of images as the model takes them, got {got}")
    if batch.ndim < 2 or not batch.is_floating_point():
        raise TypeError(
            "expected batches of images, floating point; of a pair (images, labels) give the "
            f"first: got {batch.dtype} of shape {tuple(batch.shape)}"
        )
    # A model of feature maps takes (B, C, H, W); for others (B, N, C) may be a batch already.
    is_single = batch.ndim == 3 and any(
        isinstance(module, nn.Conv2d | GPSA) for module in model.modules()
    )
    return batch[None] if is_single else batch
