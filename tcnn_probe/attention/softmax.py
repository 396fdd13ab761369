"""Softmax attention: logits of some queries at a time, never the whole N x N matrix."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.statistics import softmax_statistics

__all__ = ["Block", "DeferredLogits", "GivenLogits", "Logits", "ProductLogits", "SoftmaxAttention"]

_ALL = slice(None)
# Up to so many rows one product for each row is quicker than a batched one, which copies queries and keys first.
_FEW_ROWS = 32


class Logits(ABC):
    """Logits of some rows, queries and keys at a time; a row is an image, or a window of an image.

    Args:
        shape: Sizes (rows, heads, N_query, N_key).
        source: Tensor that they are made of, for its device and dtype.
        masked: Whether logits may be minus infinity.
    """

    def __init__(self, shape: tuple[int, int, int, int], source: Tensor, *, masked: bool) -> None:
        self.shape, self.source, self.masked = shape, source, masked

    @abstractmethod
    def __call__(self, rows: slice, queries: slice, keys: slice = _ALL, *, out: Tensor | None = None) -> Tensor:
        """Return a part of them, float32 or float64, contiguous, and free to be overwritten; in ``out`` if given."""

    def weights(self, rows: slice = _ALL, queries: slice = _ALL) -> Tensor:
        """Return their softmax; 0 for queries that may see no key at all, as torch's own attention has it."""
        logits = self(rows, queries)
        weights = torch.softmax(logits, -1)
        return weights.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0) if self.masked else weights

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or float64 where the model is in float64."""
        return at_least_float32(self.source.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the layer."""
        return self.source.device

    def new_empty(self, *shape: int) -> Tensor:
        """Allocate a tensor for statistics."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class ProductLogits(Logits):
    """Logits scale * q k^T + mask.

    Args:
        query: Shape (rows, heads, N_query, d).
        key: Shape (rows, heads, N_key, d).
        scale: Factor of the products.
        mask: Numbers to add, or True where a query may see a key; broadcasts to (rows, heads, N_query, N_key).
    """

    def __init__(self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None) -> None:
        rows, heads, queries, _ = query.shape
        super().__init__((rows, heads, queries, key.shape[2]), query, masked=mask is not None)
        self._query, self._key, self._scale = query, key, scale
        self._mask = None if mask is None else mask.expand(self.shape)

    def __call__(self, rows: slice, queries: slice, keys: slice = _ALL, *, out: Tensor | None = None) -> Tensor:
        """Return a part of them, see :class:`Logits`; only that part of the products is formed."""
        query = self._query[rows, :, queries].to(self.dtype)
        key = self._key[rows, :, keys].to(self.dtype)
        logits = query.new_empty(*query.shape[:3], key.shape[2]) if out is None else out
        by_row = (logits, query, key)
        if query.shape[0] > _FEW_ROWS:
            by_row = (logits.flatten(0, 1)[None], query.flatten(0, 1)[None], key.flatten(0, 1)[None])
        for row, q, k in zip(*by_row, strict=True):
            torch.baddbmm(row, q, k.transpose(1, 2), beta=0, alpha=self._scale, out=row)
        if self._mask is None:
            return logits
        mask = self._mask[rows, :, queries, keys]
        return logits.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else logits.add_(mask)


class GivenLogits(Logits):
    """Logits that a model gave to a softmax.

    Args:
        logits: Shape (rows, heads, N_query, N_key); perhaps with minus infinity, as nothing says that there is none.
    """

    def __init__(self, logits: Tensor) -> None:
        rows, heads, queries, keys = logits.shape
        super().__init__((rows, heads, queries, keys), logits, masked=True)

    def __call__(self, rows: slice, queries: slice, keys: slice = _ALL, *, out: Tensor | None = None) -> Tensor:
        """Return a copy of a part of them, see :class:`Logits`."""
        part = self.source[rows, :, queries, keys]
        return (self.new_empty(*part.shape) if out is None else out).copy_(part)


class DeferredLogits(Logits):
    """Logits that are rebuilt once they are asked for: most edits of heads never ask.

    Args:
        shape: Sizes (rows, heads, N_query, N_key).
        source: Tensor for their device and dtype.
        rebuild: Function that gives the logits.
    """

    def __init__(self, shape: tuple[int, int, int, int], source: Tensor, rebuild: Callable[[], Logits]) -> None:
        super().__init__(shape, source, masked=True)
        self._rebuild = rebuild

    def __call__(self, rows: slice, queries: slice, keys: slice = _ALL, *, out: Tensor | None = None) -> Tensor:
        """Return a part of them, see :class:`Logits`."""
        return self._rebuilt(rows, queries, keys, out=out)

    @cached_property
    def _rebuilt(self) -> Logits:
        return self._rebuild()


@dataclass(frozen=True)
class Block:
    """Images, windows of each of them, and queries of each window, whose attention is formed at once."""

    images: slice
    windows: slice
    queries: slice


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttention(Attention):
    """The softmax of logits, fused or not, in whatever module it is.

    Talking heads (CaiT) mix the heads after the softmax: A is the softmax's, before that.

    Args:
        logits: Logits of some rows and queries at a time.
        class_token: Whether the first token before the grid, if there is any, is a class token, and no register.
        distillation_token: Whether the second one, if there is one, is a distillation token.
        compare: Comparison with what torch gave the model, see :meth:`discrepancy`; None without one.
    """

    logits: Logits
    class_token: bool = True
    distillation_token: bool = False
    compare: Callable[[], tuple[Tensor, float] | None] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (rows, heads, N_query, N_key), where rows = images * windows."""
        return self.logits.shape

    @property
    def source(self) -> Tensor:
        """The queries, or the logits."""
        return self.logits.source

    @property
    def class_query(self) -> int | None:
        """Index of the class token among the queries; None without one, or with one for each class.

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
        """Index of the distillation token among the queries; None without one."""
        queries = self.layout.queries
        has_second = queries is not None and queries.prefix > 1
        return 1 if has_second and self.distillation_token and self.class_query == 0 else None

    def weights(self, queries: slice = _ALL, image: int | None = None) -> Tensor:
        """Return the attention of some queries, see :class:`~tcnn_probe.attention.attention.Attention`."""
        rows = _ALL if image is None else slice(image * self.windows, (image + 1) * self.windows)
        return self.logits.weights(rows, queries).unflatten(0, (-1, self.windows))

    def statistics(self) -> dict[str, Any]:
        """Return entropies and distances, the scale on which to read them, and sums for content information."""
        return softmax_statistics(self)

    def discrepancy(self, output: Any = None) -> tuple[Tensor, float] | None:
        """Compare A with what torch gave the model: the output of the layer has nothing to say here."""
        return None if self.compare is None else self.compare()

    def blocks(self) -> Iterator[Block]:
        """Yield rows and queries that belong together: a block, or the logits of one query where these are more."""
        # So many queries of one row at a time, or so many queries of rows that are taken whole.
        at_once = max(1, self.block // (self.heads * self.keys))
        windows = min(self.windows, max(1, at_once // self.queries))
        images = max(1, at_once // (self.queries * windows)) if windows == self.windows else 1
        sizes = (self.images, images), (self.windows, windows), (self.queries, at_once)
        for starts in product(*(range(0, count, step) for count, step in sizes)):
            ends = [min(start + step, count) for start, (count, step) in zip(starts, sizes, strict=True)]
            yield Block(*map(slice, starts, ends))

    def rows_of(self, block: Block) -> slice:
        """Return the rows of a block, which are neighbours."""
        first = block.images.start * self.windows + block.windows.start
        last = (block.images.stop - 1) * self.windows + block.windows.stop
        return slice(first, last)

    def by_image(self, rows: Tensor) -> Tensor:
        """Return (rows, ...) as (images, windows, ...)."""
        return rows.unflatten(0, (self.images, self.windows))
