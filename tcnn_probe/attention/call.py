"""A call of softmax attention as probes see it: logits of some queries at a time, never the whole N x N matrix."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor, nn

from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.architectures.grids import Windows
from tcnn_probe.attention.layout import Layout

__all__ = ["AttentionCall", "Block", "GivenLogits", "Logits", "ProductLogits"]

_ALL = slice(None)
_FEW = 32


class Logits(ABC):
    """Logits of some rows, queries and keys at a time; a row is an image or a window of one.

    Args:
        shape: (rows, heads, N_query, N_key).
        source: what they are made of, for its device and dtype.
        masked: whether logits may be minus infinity.
    """

    def __init__(self, shape: tuple[int, int, int, int], source: Tensor, *, masked: bool) -> None:
        self.shape, self.source, self.masked = shape, source, masked

    @abstractmethod
    def __call__(self, rows: slice, queries: slice, keys: slice = _ALL, *, out: Tensor | None = None) -> Tensor:
        """A part of them, float32 or float64 and contiguous, the caller's own to overwrite; into ``out`` if given."""

    def weights(self, rows: slice = _ALL, queries: slice = _ALL) -> Tensor:
        """Their softmax, 0 for queries that may see no key at all, as torch's own attention has it."""
        return self.softmax(self(rows, queries))

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or float64 where the model is."""
        return at_least_float32(self.source.dtype)

    @property
    def device(self) -> torch.device:
        """The layer's own."""
        return self.source.device

    def softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The attention of some of them; 0 for queries that may see no key at all."""
        weights = torch.softmax(logits, -1, out=out)
        return weights.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0) if self.masked else weights

    def new_empty(self, *shape: int) -> Tensor:
        """Room for statistics."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class ProductLogits(Logits):
    """scale * q k^T + mask.

    Args:
        query: shape (rows, heads, N_query, d).
        key: shape (rows, heads, N_key, d).
        scale: of the products.
        mask: to be added, or True where a query may see a key; broadcasts to (rows, heads, N_query, N_key).
    """

    def __init__(self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None) -> None:
        rows, heads, queries, _ = query.shape
        super().__init__((rows, heads, queries, key.shape[2]), query, masked=mask is not None)
        self._query, self._key, self._scale = query, key, scale
        self._mask = None if mask is None else mask.expand(self.shape)

    def __call__(self, rows: slice, queries: slice, keys: slice = _ALL, *, out: Tensor | None = None) -> Tensor:
        """See :class:`Logits`: of a part of the products alone."""
        query, key = self._query[rows, :, queries].to(self.dtype), self._key[rows, :, keys].to(self.dtype)
        logits = query.new_empty(*query.shape[:3], key.shape[2]) if out is None else out
        each: tuple[Tensor, ...] = (logits, query, key)
        if query.shape[0] > _FEW:  # windows: merging rows and heads copies queries and keys, which is cheap then
            each = tuple(x.flatten(0, 1)[None] for x in each)
        for one, q, k in zip(*each, strict=True):
            torch.baddbmm(one, q, k.transpose(1, 2), beta=0, alpha=self._scale, out=one)
        if self._mask is None:
            return logits
        mask = self._mask[rows, :, queries, keys]
        return logits.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else logits.add_(mask)


class GivenLogits(Logits):
    """What a softmax was given, shape (rows, heads, N_query, N_key)."""

    def __init__(self, logits: Tensor) -> None:
        rows, heads, queries, keys = logits.shape
        super().__init__((rows, heads, queries, keys), logits, masked=True)  # perhaps: nobody says

    def __call__(self, rows: slice, queries: slice, keys: slice = _ALL, *, out: Tensor | None = None) -> Tensor:
        """See :class:`Logits`."""
        some = self.source[rows, :, queries, keys]
        return (self.new_empty(*some.shape) if out is None else out).copy_(some)


@dataclass(frozen=True)
class Block:
    """Images, windows of each of them and queries of each window whose attention is formed at once."""

    images: slice
    windows: slice
    queries: slice


@dataclass(frozen=True)
class AttentionCall:
    """One call of softmax attention in a forward; A is its attention, rows of which sum to one.

    Talking heads (CaiT) mix the heads after the softmax: A is the softmax's, before that.

    Args:
        module: that called it.
        images: B.
        windows: into which each image is divided, 1 for global attention; row b * windows + w of ``logits`` is window
            w of image b.
        logits: gives the logits of some rows and queries.
        layout: where queries and keys lie.
        name: of the layer.
        class_token: whether the first token before the grid, if there is any, is a class token, and no register.
        distillation_token: whether the second one, if there is one, is a distillation token.
        cut: where the windows lie in the image; None if it is not known, or if one window is the image.
        limit: how many of the images, the first ones, count for sums over images; None for all.
    """

    BLOCK: ClassVar[int] = 1 << 20
    """Logits at a time on a CPU: 4 MiB in float32, which stay in its cache."""

    module: nn.Module
    images: int
    windows: int
    logits: Logits
    layout: Layout
    name: str = ""
    class_token: bool = True
    distillation_token: bool = False
    cut: Windows | None = None
    limit: int | None = None

    @classmethod
    def block_on(cls, device: torch.device) -> int:
        """Logits at a time; 64 MiB of them on a GPU, where every block, small or large, is a dozen kernel launches."""
        return cls.BLOCK << (0 if device.type == "cpu" else 4)

    @property
    def block(self) -> int:
        """Logits at a time, on the device of the layer."""
        return self.block_on(self.logits.device)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.logits.shape[1]

    @property
    def queries(self) -> int:
        """N_query, of each window."""
        return self.logits.shape[2]

    @property
    def keys(self) -> int:
        """N_key, of each window."""
        return self.logits.shape[3]

    @property
    def in_windows(self) -> bool:
        """Whether there are several windows, or one that is larger than the image."""
        return self.windows > 1 or self.cut is not None

    @property
    def class_query(self) -> int | None:
        """Index of the class token among the queries, None if there is none, or one for each class.

        Also of a single latent, and of the first of several if the layer hands on that one alone.
        """
        if self.layout.asking == "classes":
            return None
        alone = self.queries == 1 and self.keys > 1 and self.windows == 1
        if self.layout.asking == "latents":
            return 0 if alone or getattr(self.module, "pool", None) == "token" else None
        queries = self.layout.queries
        leads = queries.prefix > 0 if queries is not None else self.queries <= self.layout.prefix
        return 0 if alone or (leads and self.class_token) else None

    @property
    def distillation_query(self) -> int | None:
        """Index of the distillation token among the queries, None if there is none."""
        queries = self.layout.queries
        there = queries is not None and queries.prefix > 1 and self.distillation_token
        return 1 if there and self.class_query == 0 else None

    def own_key(self, query: int) -> int | None:
        """Index among the keys of a class or distillation token that is a query, None if it is not one of them."""
        return query if self.layout.asking == "tokens" and query < self.layout.prefix else None

    def weights(self, queries: slice, image: int | None = None) -> Tensor:
        """Attention of some queries, of one image or all: (B or 1, windows, heads, queries, N_key), float32 or more.

        0 for queries that may see no key at all, as torch's own attention has it.
        """
        rows = slice(None) if image is None else slice(image * self.windows, (image + 1) * self.windows)
        return self.logits.weights(rows, queries).unflatten(0, (-1, self.windows))

    def row(self, query: int, images: Sequence[int]) -> Tensor:
        """Attention of one query: shape (images, windows, heads, N_key)."""
        return torch.stack([self.weights(slice(query, query + 1), image)[0, :, :, 0] for image in images])

    def on_grid(self, rows: Tensor) -> Tensor:
        """The keys on the grid of (..., N_key): shape (..., height, width)."""
        keys = self.layout.keys
        assert keys is not None
        return rows[..., keys.prefix :].unflatten(-1, (keys.height, keys.width))

    def blocks(self) -> Iterator[Block]:
        """Rows and queries that belong together: a block, or the logits of one query where these are more."""
        _, heads, queries, keys = self.logits.shape
        many = max(1, self.block // (heads * keys))  # queries of one row at a time, or rows with all their queries
        windows = min(self.windows, max(1, many // queries))
        images = max(1, many // (queries * windows)) if windows == self.windows else 1
        sizes = (self.images, images), (self.windows, windows), (queries, many)
        for first in product(*(range(0, count, step) for count, step in sizes)):
            yield Block(*(slice(n, min(n + step, count)) for n, (count, step) in zip(first, sizes, strict=True)))

    def rows(self, block: Block) -> slice:
        """The rows of a block: these are neighbours."""
        return slice(
            block.images.start * self.windows + block.windows.start,
            (block.images.stop - 1) * self.windows + block.windows.stop,
        )

    def by_image(self, of_rows: Tensor) -> Tensor:
        """(rows, ...) as (images, windows, ...)."""
        return of_rows.unflatten(0, (self.images, self.windows))
